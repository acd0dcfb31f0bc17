"""`hf-specdec bench`: plain generate, stock assisted generation and ours, on the same prompts in one process."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from .common import load_draft, parse_k

WIDTH = 150


def bench(
    target: str,
    draft: str | None,
    prompts: str,
    limit: int | None,
    k: str,
    max_new_tokens: int,
    repetitions: int,
    batch: int,
    dtype: str,
    clock: str,
    threads: int | None,
    out: Path | None,
) -> None:
    import torch

    from .. import enable
    from ..bench.arms import standard_arms
    from ..bench.embedded import load_target
    from ..bench.meter import CLOCKS
    from ..bench.prompts import load_prompts
    from ..bench.report import print_report, save_json, save_plot
    from ..bench.runner import plan, run_benchmark
    from ..bench.terminal import counting

    if clock not in CLOCKS:
        raise ValueError(f"--clock {clock}: choose one of {sorted(CLOCKS)}.")
    if min(max_new_tokens, repetitions, batch) < 1:
        raise ValueError("--max-new-tokens, --repetitions and --batch must be at least 1.")
    chosen = load_prompts(prompts, limit)
    if threads is not None:
        torch.set_num_threads(threads)
    model, tokenizer = load_target(target, dtype)
    arms = standard_arms(enable(model), load_draft(draft, dtype, model, tokenizer), parse_k(k))
    with counting("Measuring", plan(chosen, arms, batch, repetitions)) as step:
        report = run_benchmark(
            model,
            tokenizer,
            chosen,
            arms,
            max_new_tokens=max_new_tokens,
            repetitions=repetitions,
            batch=batch,
            clock=clock,
            step=step,
        )
    console = Console(highlight=False, width=max(Console().width, WIDTH))
    print_report(report, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        save_json(report, out / "bench.json")
        save_plot(report, out / "bench.png")
        console.print(f"Written: {out / 'bench.json'}, {out / 'bench.png'}", markup=False)
