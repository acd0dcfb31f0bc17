"""16-bit forks: how often speculative greedy output equals plain greedy output, and whether every fork is a near-tie.

    python benchmarks/bf16_forks.py --prompts shipped --prompts spec_bench.jsonl

In 16 bit, logits depend on how many tokens share a pass, so that a near-tie may break either way. Every fork is listed with
its position, both tokens and the top-2 gap of the same target in float32.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from hf_specdec import enable
from hf_specdec.bench.arms import generate_arm
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench.forks import Judge
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.report import save_json
from hf_specdec.bench.runner import environment
from hf_specdec.bench.terminal import counting
from hf_specdec.commands.common import load_draft, parse_k


def main(
    target: str = "smollm2",
    draft: str | None = None,
    k: str = "auto",
    dtype: str = "bfloat16",
    max_new_tokens: int = 64,
    prompts: Annotated[list[str], typer.Option(help="As for `hf-specdec bench`; may be given several times.")] = ["shipped"],
    limit: int | None = None,
    threads: int | None = None,
    out: Path | None = None,
):
    """Print the share of equal outputs and every fork; exit code 1 if a fork is no near-tie."""
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = [prompt for source in prompts for prompt in load_prompts(source, limit)]
    model, tokenizer = load_target(target, dtype)
    plain = generate_arm("plain", model)
    ours = generate_arm(
        "ours",
        enable(model),
        assistant_model=load_draft(draft, dtype, model, tokenizer),
        speculative=True,
        num_assistant_tokens=parse_k(k),
    )
    judge, forks, accepted, console = Judge(model), [], 0, Console(highlight=False)
    with counting("Comparing", len(chosen)) as step:
        for prompt in chosen:
            ids = prompt.ids(tokenizer)
            answer = ours.run([ids], max_new_tokens)
            accepted += answer.trace.accepted
            fork = judge.fork(ids, plain.run([ids], max_new_tokens).tokens[0], answer.tokens[0])
            if fork is not None:
                forks.append({"prompt": prompt.id, "category": prompt.category, **fork.to_dict()})
                console.print(f"{prompt.category} {prompt.id}: {fork.explain(tokenizer)}", markup=False, soft_wrap=True)
            step(f"{len(forks)} forks")
    near = sum(fork["near_tie"] for fork in forks)
    console.print(
        f"{len(chosen) - len(forks)} of {len(chosen)} outputs equal to plain greedy in {dtype}; "
        f"{accepted} drafted tokens accepted."
    )
    if forks:
        gaps = sorted(fork["top2_gap"] for fork in forks)
        console.print(
            f"{near} of {len(forks)} forks are near-ties; top-2 gap in float32: median {statistics.median(gaps):.3f}, "
            f"largest {gaps[-1]:.3f}; rounding error of the logits there: up to {max(f['rounding'] for f in forks):.3f}."
        )
    if out is not None:
        save_json(
            {
                "environment": environment(model),
                "prompts": len(chosen),
                "max_new_tokens": max_new_tokens,
                "k": k,
                "forks": forks,
            },
            out,
        )
    raise typer.Exit(0 if near == len(forks) else 1)


if __name__ == "__main__":
    typer.run(main)
