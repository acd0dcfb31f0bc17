"""Conversations over HTTP: `transformers serve`, and `hf-specdec serve` with and without conversations kept in memory, in turns.

    python benchmarks/serving.py --dtype bfloat16 --repetitions 3 --out serving.json

Four conversations, greedy: two turns of 128 tokens, whole requests with their prompt pass, and a third one of a single token, which is what a reader waits for. Every
server is asked the same: what was answered before is in all of them the first server's. Beside the times stands the check: how many of the answers are the first
server's. The embedded model says much of its first answer again in the second, which prompt lookup gains from: read the turns apart.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

from rich.console import Console
from rich.table import Table

from hf_specdec.bench.embedded import embedded_folder
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.terminal import counting

CONVERSATIONS = {  # a shipped prompt, and what is said next
    "code": ("code_edit", 1, "Now write it out once more, with a docstring."),
    "summary": ("summary", 1, "Now in one sentence."),
    "chat 1": ("chat", 1, "Make that shorter."),
    "chat 2": ("chat", 2, "Make that shorter."),
}
LAST = "Say it in other words."
BIN = Path(sys.executable).parent
SERVERS = {
    "transformers serve": [BIN / "transformers", "serve", "{model}", "--device", "cpu", "--dtype", "{dtype}", "--log-level", "error"],
    "hf-specdec serve --keep 0": [BIN / "hf-specdec", "serve", "{model}", "--dtype", "{dtype}", "--keep", "0"],
    "hf-specdec serve": [BIN / "hf-specdec", "serve", "{model}", "--dtype", "{dtype}"],
}


def ask(port: int, path: str, body: dict | None = None) -> dict:
    request = Request(f"http://localhost:{port}{path}", None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as reply:
        return json.loads(reply.read())


@contextmanager
def serving(command: list, model: str, dtype: str):
    """The port of a server that answers, until the end."""
    with socket.create_server(("localhost", 0)) as own:
        port = own.getsockname()[1]
    words = [str(word).format(model=model, dtype=dtype) for word in command]
    process = subprocess.Popen([*words, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        while process.poll() is None:
            try:
                ask(port, "/health")
                break
            except OSError:
                time.sleep(0.2)
        else:
            raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}.")
        yield port
    finally:
        process.terminate()
        process.wait()


def answer(port: int, model: str, messages: list[dict], tokens: int) -> tuple[str, int, float]:
    """(text, its tokens, seconds)."""
    begin = time.perf_counter()
    reply = ask(port, "/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0.0})
    return reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"], time.perf_counter() - begin


def measure(ports: dict[str, int], model: str, repetitions: int, tokens: int) -> list[dict]:
    """One row per repetition, conversation, turn and server."""
    rows, first = [], next(iter(ports))
    with counting("Asking", repetitions * len(CONVERSATIONS) * 3) as step:
        for repetition in range(repetitions):
            for name, (kind, number, second) in CONVERSATIONS.items():
                messages = []
                for turn, (text, limit) in enumerate(((load_prompts(kind)[number].text, tokens), (second, tokens), (LAST, 1)), 1):
                    messages.append({"role": "user", "content": text})
                    found = {server: answer(port, model, messages, limit) for server, port in ports.items()}
                    rows += [{"repetition": repetition, "name": name, "turn": turn, "server": server, "tokens": count, "seconds": seconds, "equal": said == found[first][0]}
                             for server, (said, count, seconds) in found.items()]
                    messages.append({"role": "assistant", "content": found[first][0]})
                    step(f"{name}, turn {turn}")
    return rows


def shown(rows: list[dict], title: str) -> Table:
    table = Table("server", *(f"{name}, {turn}" for turn in (1, 2) for name in CONVERSATIONS), *(f"{name}, first token (ms)" for name in CONVERSATIONS), "texts equal", title=title)
    for server in SERVERS:
        def median(turn: int, name: str, of) -> float:
            return statistics.median(of(row) for row in rows if (row["server"], row["turn"], row["name"]) == (server, turn, name))

        rates = [median(turn, name, lambda row: row["tokens"] / row["seconds"]) for turn in (1, 2) for name in CONVERSATIONS]
        waits = [1000 * median(3, name, lambda row: row["seconds"]) for name in CONVERSATIONS]
        equal = [row["equal"] for row in rows if row["server"] == server and row["turn"] < 3]
        table.add_row(server, *(f"{each:.0f}" for each in rates + waits), f"{sum(equal)} of {len(equal)}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a folder; the embedded model without it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = args.model or str(embedded_folder())
    with ExitStack() as stack:
        ports = {name: stack.enter_context(serving(command, model, args.dtype)) for name, command in SERVERS.items()}
        measure(ports, model, 1, 8)  # what is done once, in every server
        rows = measure(ports, model, args.repetitions, args.tokens)
    Console(width=200).print(shown(rows, f"tokens per second in turn 1 and 2, {args.dtype}"))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
