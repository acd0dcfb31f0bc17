"""Conversations over HTTP: `transformers serve`, and `hf-specdec serve` with and without conversations kept in memory, in turns.

    python benchmarks/serving.py --dtype bfloat16 --repetitions 3 --out serving.json

Four conversations, greedy: two turns of 128 tokens, whole requests with their prompt pass, and a third one of a single token, which is what a reader waits for. Every
server is asked the same: what was answered before is in all of them the first server's. Beside the times stands the check: how many of the answers are the first
server's. The embedded model says much of its first answer again in the second, which prompt lookup gains from: read the turns apart.

    python benchmarks/serving.py --together 7 --dtype float32

Several clients at a time, one answer after the other (`--max-batch 1`) and with shared passes, in turns: how long a short request waits for its first token beside a long
answer, and all tokens per second of that many requests at once.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
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
LONG, SHORT = "Write a long story about a lighthouse keeper and the sea.", "What is the capital of {}? Explain in detail."
PLACES = ("France", "Peru", "Japan", "Kenya", "Norway", "India", "Canada", "Egypt", "Chile", "Greece", "Cuba", "Nepal", "Spain", "Ghana", "Fiji", "Iraq")
BIN = Path(sys.executable).parent
SERVERS = {
    "transformers serve": [BIN / "transformers", "serve", "{model}", "--device", "cpu", "--dtype", "{dtype}", "--log-level", "error"],
    "hf-specdec serve --keep 0": [BIN / "hf-specdec", "serve", "{model}", "--dtype", "{dtype}", "--keep", "0"],
    "hf-specdec serve": [BIN / "hf-specdec", "serve", "{model}", "--dtype", "{dtype}"],
}

LANES = {f"--max-batch {batch}": [BIN / "hf-specdec", "serve", "{model}", "--dtype", "{dtype}", "--max-batch", str(batch)] for batch in (1, 8)}


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


def streamed(port: int, model: str, text: str, tokens: int) -> dict:
    """{seconds until the first token, seconds in all, tokens, text} of an answer."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
    request, begin, found = Request(f"http://localhost:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}), time.perf_counter(), {"text": ""}
    with urlopen(request, timeout=600) as reply:
        for line in reply:
            event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: {") else {"choices": []}
            if piece := "".join(choice["delta"].get("content") or "" for choice in event["choices"]):
                found.setdefault("first", time.perf_counter() - begin)
                found["text"] += piece
            found |= {"tokens": event["usage"]["completion_tokens"]} if event.get("usage") else {}
    return found | {"seconds": time.perf_counter() - begin}


def at_a_time(jobs: list, wait: float = 0.0) -> tuple[list[dict], float]:
    """What the jobs return, begun `wait` seconds one after the other, and how long all took."""
    found, begin = [{}] * len(jobs), time.perf_counter()
    threads = [threading.Thread(target=lambda place=place: found.__setitem__(place, jobs[place]())) for place in range(len(jobs))]
    for thread in threads:
        thread.start()
        time.sleep(wait)
    for thread in threads:
        thread.join()
    return found, time.perf_counter() - begin


def crowd(ports: dict[str, int], model: str, repetitions: int, tokens: int, clients: int) -> list[dict]:
    """One row per repetition and server."""
    rows, texts = [], {}
    for repetition in range(repetitions):
        for server, port in ports.items():
            (long, short), _ = at_a_time([lambda: streamed(port, model, LONG, tokens), lambda: streamed(port, model, SHORT.format("Italy"), 8)], 1.0)
            many, seconds = at_a_time([lambda place=place: streamed(port, model, SHORT.format(place), tokens // 2) for place in PLACES[:clients]])
            said = [each["text"] for each in (long, short, *many)]
            rows.append({"repetition": repetition, "server": server, "first": short["first"], "long": long["seconds"], "rate": sum(each["tokens"] for each in many) / seconds,
                         "equal": sum(map(str.__eq__, said, texts.setdefault("first", said))), "texts": len(said)})
    return rows


def crowded(rows: list[dict], title: str) -> Table:
    table = Table("server", "first token of a short one beside a long one (s)", "the long one (s)", "tokens/s of all", "texts equal", title=title)
    for server in LANES:
        own = [row for row in rows if row["server"] == server]
        table.add_row(server, *(f"{statistics.median(row[name] for row in own):.2f}" for name in ("first", "long", "rate")), f"{sum(row['equal'] for row in own)} of {sum(row['texts'] for row in own)}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a folder; the embedded model without it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--together", type=int, default=0, help=f"clients at a time, {len(PLACES)} at most")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = args.model or str(embedded_folder())
    with ExitStack() as stack:
        ports = {name: stack.enter_context(serving(command, model, args.dtype)) for name, command in (LANES if args.together else SERVERS).items()}
        if args.together:
            crowd(ports, model, 1, 8, 2)
            rows = crowd(ports, model, args.repetitions, args.tokens, args.together)
            Console(width=160).print(crowded(rows, f"{args.together} clients, {args.dtype}"))
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
            return
        measure(ports, model, 1, 8)  # what is done once, in every server
        rows = measure(ports, model, args.repetitions, args.tokens)
    Console(width=200).print(shown(rows, f"tokens per second in turn 1 and 2, {args.dtype}"))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
