"""Throughput against plain generate at batch 1, 2, 4, 8, 16: with K "auto" it is never to fall behind.

    python benchmarks/batch_curve.py --threads 1
    python benchmarks/batch_curve.py --draft mixture --format bf16 --clock wall

Plain generate gets the same batch, padded on the left. Texts are compared: in float32 they are to be equal.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_specdec import enable, mx
from hf_specdec.bench.arms import Arm, generate_arm
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench.meter import CLOCKS
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.terminal import counting
from hf_specdec.commands.common import parse_k


def timed(arm: Arm, rows: list[list[int]], tokens: int, clock: str) -> tuple[float, list[list[int]]]:
    begin = CLOCKS[clock]()
    answer = arm.run(rows, tokens)
    return CLOCKS[clock]() - begin, answer.tokens


def main(
    target: str = "smollm2",
    batches: Annotated[list[int], typer.Option(help="Rows per call; may be given several times.")] = [1, 2, 4, 8, 16],
    draft: Annotated[str, typer.Option(help="A registered draft without weights.")] = "prompt_lookup",
    k: str = "auto",
    dtype: str = "float32",
    format: Annotated[str | None, typer.Option(help="bf16 or an MX format for the Linear layers of both.")] = None,
    prompts: str = "shipped",
    max_new_tokens: int = 48,
    repetitions: int = 3,
    threads: int | None = None,
    clock: str = "cpu",
    out: Path | None = None,
):
    """Print plain and our tokens per second and their ratio, the median over repetitions that alternate."""
    if clock not in CLOCKS:
        raise typer.BadParameter(f"--clock {clock}: choose one of {sorted(CLOCKS)}.")
    if threads is not None:
        torch.set_num_threads(threads)
    model, tokenizer = load_target(target, dtype, "cpu")
    if format:
        mx.compress(model, format, measure=False, lm_head=format)
    arms = [generate_arm("plain", enable(model)),
            generate_arm("ours", model, speculative={"draft": draft}, num_assistant_tokens=parse_k(k))]
    pool = [prompt.ids(tokenizer) for prompt in load_prompts(prompts, None)]
    pool = [pool[i * 7 % len(pool)] for i in range(len(pool))] if len(pool) % 7 else pool  # kinds of prompts mixed
    table = Table("rows", "plain, tokens/s", "ours, tokens/s", "ratio", "ratios", "rows that differ", title=f"{draft}, K={k}, {dtype} {format or ''}, {clock}")
    results = {}
    with counting("Measuring", len(batches) * (repetitions + 1) * 2) as step:
        for batch in batches:
            rows = [pool[i % len(pool)] for i in range(batch)]
            spent, texts = {arm.name: [] for arm in arms}, {}
            for repetition in range(repetitions + 1):
                for arm in arms if repetition % 2 else arms[::-1]:
                    seconds, texts[arm.name] = timed(arm, rows, max_new_tokens, clock)
                    spent[arm.name].append(seconds)
                    step(f"{batch} rows, {arm.name}")
            ratios = [a / b for a, b in zip(spent["plain"][1:], spent["ours"][1:])]  # the first round warms up
            speeds = {name: sum(map(len, texts[name])) / statistics.median(own[1:]) for name, own in spent.items()}
            differ = sum(a != b for a, b in zip(texts["plain"], texts["ours"]))
            results[batch] = {"tokens_per_second": speeds, "ratios": ratios, "differ": differ}
            table.add_row(str(batch), *(f"{speed:.1f}" for speed in speeds.values()), f"{statistics.median(ratios):.2f}x",
                          " ".join(f"{ratio:.2f}" for ratio in ratios), str(differ))
    Console(highlight=False, width=110).print(table)
    if out is not None:
        settings = {"target": target, "draft": draft, "k": k, "dtype": dtype, "format": format, "threads": torch.get_num_threads(), "clock": clock}
        out.write_text(json.dumps({"torch": torch.__version__, **settings, "batches": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
