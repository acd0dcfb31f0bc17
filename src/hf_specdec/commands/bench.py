"""`hf-specdec bench`: plain generate, stock assisted generation and ours, on the same prompts in one process."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from .common import check_draft, check_overwrite, load_draft, parse_k, refuse_compressed, stored_config
from .leaving import PROGRAM

WIDTH = 150
TUNED = "ours tuned"
DENSE = "leave --kernels out, as it runs on mx's kernels without them, or name the original checkpoint"
COMPILED = ("Compiled passes are watched by no hooks: their passes are timed by the loop, masks included, and what is outside the forwards is not "
            "measured. Stock assisted generation is not compiled.")
COMPILED_CPU = ("Compiled passes are watched by no hooks, and --clock cpu has no other way to see them: of these runs the whole is measured alone. Stock "
                "assisted generation is not compiled.")


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
    config: Path | None = None,
    compile: bool = False,
    kernels: bool = False,
) -> None:
    import torch

    from .. import SpeculativeConfig, enable
    from ..bench.arms import kernel_arms, standard_arms
    from ..bench.embedded import load_target
    from ..bench.meter import CLOCKS
    from ..bench.prompts import load_prompts
    from ..bench.runner import plan, run_benchmark
    from ..bench.terminal import counting

    check_overwrite(out, "bench.json", ("bench.png",), {"environment", "settings", "results"})
    if clock not in CLOCKS:
        raise ValueError(f"--clock {clock}: choose one of {sorted(CLOCKS)}.")
    if min(max_new_tokens, repetitions, batch) < 1:
        raise ValueError("--max-new-tokens, --repetitions and --batch must be at least 1.")
    tokens = SpeculativeConfig(num_assistant_tokens=parse_k(k)).num_assistant_tokens
    tuned = None if config is None else SpeculativeConfig.from_pretrained(config)
    chosen = load_prompts(prompts, limit)
    if kernels:
        refuse_compressed(target, stored_config(target), DENSE)
    if threads is not None:
        torch.set_num_threads(threads)
    check_draft(draft)
    model, tokenizer = load_target(target, dtype, encoder_decoders=True)
    if kernels:
        refuse_compressed(target, model.config, DENSE)
    assistant = load_draft(draft, dtype, model, tokenizer)
    arms = that_run(standard_arms(enable(model), assistant, tokens, compile=compile), "stock", [chosen[0].ids(tokenizer)[:8]], 2)
    pairs = [(model, assistant), *([in_tiles(target, draft, dtype)] if kernels else [])]
    if kernels:
        arms += kernel_arms(*pairs[1], tokens, compile)
    if compile:
        longest = max((prompt.ids(tokenizer) for prompt in chosen), key=len)
        warm(pairs, tokens, batch, len(longest) + max_new_tokens)
        arms = that_compile(arms, [longest] * batch, max_new_tokens)
    if tuned is not None:
        arms.append(_tuned_arm(model, tuned))
    with counting("Measuring", plan(chosen, arms, batch, repetitions)) as step:
        report = run_benchmark(model, tokenizer, chosen, arms, max_new_tokens=max_new_tokens, repetitions=repetitions, batch=batch, clock=clock, step=step)
    compiled = any(arm.compiled for arm in arms)
    _tell(report, tuned, (COMPILED if clock == "wall" else COMPILED_CPU) if compiled else None, out)


def _tell(report: dict, tuned, note: str | None, out: Path | None) -> None:
    """Write and print what was measured, and `note` beneath it."""
    from ..bench.report import print_report, save_json, save_plot

    if out is not None:  # first of all: who reads what is printed may go
        out.mkdir(parents=True, exist_ok=True)
        save_json(report, out / "bench.json")
    console = Console(highlight=False, width=max(Console().width, WIDTH))
    print_report(report, console)
    if note is not None:
        console.print(note, style="dim")
    if tuned is not None:
        _print_prediction(report, tuned, console)
    if out is not None:
        save_plot(report, out / "bench.png")
        console.print(f"Written: {out / 'bench.json'}, {out / 'bench.png'}", markup=False)


def in_tiles(target: str, draft: str | None, dtype: str):
    """(target, draft) once more, the target and a draft model in the kernels' tiles (`mx.to_tiles`)."""
    from .. import enable, mx
    from ..bench.embedded import load_target

    model, tokenizer = load_target(target, dtype, encoder_decoders=True)
    mx.to_tiles(model)
    assistant = load_draft(draft, dtype, model, tokenizer)
    if hasattr(assistant, "generate") and not any(isinstance(module, mx.linear.MXMatrix) for module in assistant.modules()):
        mx.to_tiles(assistant)
    return enable(model), assistant


def warm(pairs: list, k: int | str, batch: int, longest: int) -> None:
    """Have everything compiled before a clock runs, also for the rows that are left when others have ended. pairs: (target, draft)."""
    from .. import warmup
    from ..bench.arms import model_of
    from ..drafts.base import Draft

    for model, draft in pairs:
        for rows in range(1, batch + 1):
            warmup(model, draft if isinstance(draft, Draft) else model_of(draft), {"num_assistant_tokens": k, "compile": "model"}, longest, rows,
                   sampling={"do_sample": False})


def that_compile(arms: list, rows: list[list[int]], max_new_tokens: int) -> list:
    """The arms, without plain generate over a static cache where it fails; it compiles here, for texts up to this length."""
    from ..bench.arms import PLAIN_COMPILED

    return that_run(arms, PLAIN_COMPILED, rows, max_new_tokens)


def that_run(arms: list, begin: str, rows: list[list[int]], max_new_tokens: int) -> list:
    """The arms, without those whose names begin so that fail: stock assisted generation refuses models that carry states, static caches are not for all models."""
    kept = []
    for arm in arms:
        try:
            if arm.name.startswith(begin):
                arm.run(rows, max_new_tokens)
            kept.append(arm)
        except Exception as error:  # whatever transformers, tracing or the compiler says
            typer.echo(f"{PROGRAM}: {arm.name} is left out: {type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}", err=True)
    return kept


def _tuned_arm(model, tuned):
    """What `tune` has written, its draft loaded beforehand."""
    from dataclasses import replace

    from .. import SpeculativeDecoder
    from ..bench.arms import generate_arm, model_of

    decoder = SpeculativeDecoder(config=tuned)
    decoder.load(model)
    return generate_arm(TUNED, model, model_of(decoder.draft), compiled=tuned.compile, speculative=replace(tuned, draft_options={}), assistant_model=decoder.draft)


def _print_prediction(report: dict, tuned, console: Console) -> None:
    """What `tune` predicted, beside what was measured."""
    own = [row for row in report["results"] if row["arm"] == TUNED and row["decoding_speed_up"]]
    measured = ", ".join(f"{row['category']} {row['decoding_speed_up']:.2f}x" for row in own)
    predicted = "nothing" if tuned.predicted_speedup is None else f"{tuned.predicted_speedup:.2f}x"
    console.print(f"{TUNED}: {tuned.draft}, K={tuned.num_assistant_tokens}; tune predicted {predicted} of decoding on its prompts; measured: {measured}", markup=False)
