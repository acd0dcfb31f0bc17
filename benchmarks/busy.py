"""Beside other work: the same calls while other processes keep the cores busy.

    python benchmarks/busy.py --busy 2

SmolLM2-135M-Instruct as it is embedded, dense and in tiles; contestants in turns, prompt after prompt, `--busy` endless loops in processes of their
own beside them. Wall time of whole calls, prompt pass included. Every text is compared with plain generate's.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_specdec import enable, mx
from hf_specdec.bench.arms import Arm, generate_arm
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.terminal import counting

LOOP = "while True: sum(range(100000))"


@contextmanager
def others(count: int) -> Iterator[None]:
    """So many processes that never wait for anything."""
    processes = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def contestants(dtype: str):
    """The tokenizer, and who takes part: the first one is what others are held against."""
    model, tokenizer = load_target(dtype=dtype)
    tiles = enable(mx.to_tiles(load_target(dtype=dtype)[0]))
    return tokenizer, [
        generate_arm("plain generate", model),
        generate_arm("stock prompt lookup", model, prompt_lookup_num_tokens=7),
        generate_arm("plain generate, tiles", tiles),
        generate_arm('lookup, K "auto", tiles', tiles, speculative=True),
        generate_arm("lookup, K = 7, tiles", tiles, speculative=True, num_assistant_tokens=7),
    ]


def timed(arm: Arm, ids: list[int], tokens: int) -> tuple[float, list[int]]:
    begin = time.perf_counter()
    answer = arm.run([ids], tokens)
    return time.perf_counter() - begin, answer.tokens[0]


@torch.inference_mode()
def main(
    busy: Annotated[int, typer.Option(help="Processes beside the benchmark.")] = 2,
    dtype: str = "float32",
    threads: int = 2,
    prompts: str = "code_edit",
    limit: int = 3,
    tokens: int = 96,
    repetitions: int = 2,
):
    """Print seconds a call (median, and the slowest), the speed of all calls together over plain generate's, and whose texts are the same."""
    torch.set_num_threads(threads)
    tokenizer, arms = contestants(dtype)
    texts = [prompt.ids(tokenizer) for prompt in load_prompts(prompts, limit)]
    taken: dict[str, list[float]] = {arm.name: [] for arm in arms}
    same = dict.fromkeys(taken, 0)
    with others(busy), counting("Generating", repetitions * len(texts) * len(arms)) as step:
        for _ in range(repetitions):
            for ids in texts:
                expected = None
                for arm in arms:
                    step(arm.name)
                    seconds, text = timed(arm, ids, tokens)
                    expected = text if expected is None else expected
                    taken[arm.name].append(seconds)
                    same[arm.name] += text == expected
    table = Table("", "seconds a call", "the slowest", "speed", "same text", title=f"{busy} other processes, {threads} threads, {dtype}")
    plain = sum(taken[arms[0].name])
    for name, seconds in taken.items():
        table.add_row(name, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", f"{plain / sum(seconds):.2f}x", f"{same[name]} of {len(seconds)}")
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
