"""What compile=True wins: plain generate of the dense model, and this package eager and compiled, with K = 0 and with prompt lookup.

    python benchmarks/compiled.py --threads 2 --clock wall
    python benchmarks/compiled.py --format mxfp6_e2m3

SmolLM2-135M-Instruct in bfloat16 on a CPU; `format` is that of our Linear layers and head ("bf16": the same weights, in tiles), and our
attention is `hf_specdec_rows`. The contestants take turns. "per token" leaves out the prompt pass, which is not compiled.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_specdec import enable, mx, warmup
from hf_specdec.bench.arms import generate_arm
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench.forks import first_difference
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.terminal import counting
from hf_specdec.drafts import Draft, PromptLookupDraft
from hf_specdec.proposal import Proposal

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
console = Console(highlight=False, width=130)


class Nothing(Draft):
    """Proposes nothing: the loop at K = 0."""

    name = "nothing"

    def propose(self, context, k):
        return Proposal.from_lists([[] for _ in k], context.device, self.name)


def main(
    target: str = "smollm2",
    format: Annotated[list[str], typer.Option(help="bf16 or an MX format; may be given several times.")] = ["bf16", "mxfp6_e2m3"],
    k: int = 7,
    prompt: Annotated[list[str], typer.Option(help="Of the shipped prompts.")] = ["code_edit/1", "chat/1"],
    max_new_tokens: int = 64,
    repetitions: int = 3,
    threads: int | None = None,
    clock: str = "cpu",
    out: Path | None = None,
):
    """Print seconds per call and milliseconds per token after the first, medians, with their ratios to plain generate."""
    if threads is not None:
        torch.set_num_threads(threads)
    dense, tokenizer = load_target(target, "bfloat16", "cpu")
    dense.generation_config.eos_token_id = None  # all write the same number of tokens
    prompts = {each.id: each.ids(tokenizer) for each in load_prompts("shipped", None) if each.id in prompt}
    arms = {"plain generate, dense": generate_arm("", dense)}
    for name in format:
        model = mx.compress(copy.deepcopy(dense), name, measure=False, lm_head=name)
        model.set_attn_implementation("hf_specdec_rows")
        longest = max(map(len, prompts.values())) + max_new_tokens
        begin = time.process_time()
        made = warmup(enable(model), config={"num_assistant_tokens": k}, max_length=longest)
        console.print(f"{name}: {made} passes compiled in {time.process_time() - begin:.0f} s of processor time")
        arms[f"plain generate, {name}"] = generate_arm("", model)
        for title, draft in (("K=0", Nothing), (f"lookup, K={k}", PromptLookupDraft)):
            for compiled in (False, True):
                options = {"speculative": {"seed": 0, "compile": compiled}, "num_assistant_tokens": k, "assistant_model": draft()}
                arms[f"{title}, {name}, {'compiled' if compiled else 'eager'}"] = generate_arm("", model, **options)
    results = {}
    with counting("Measuring", len(prompts) * (repetitions + 1) * len(arms)) as step:
        for title, ids in prompts.items():
            spent, first, texts = ({name: [] for name in arms} for _ in range(3))
            for _ in range(repetitions + 1):
                for name, arm in arms.items():
                    for kept, tokens in ((first, 1), (spent, max_new_tokens)):
                        begin = CLOCKS[clock]()
                        texts[name] = arm.run([ids], tokens).tokens[0]
                        kept[name].append(CLOCKS[clock]() - begin)
                    step(name)
            results[title] = report(title, len(ids), spent, first, texts)
    if out is not None:
        settings = {"torch": torch.__version__, "threads": torch.get_num_threads(), "clock": clock, "tokens": max_new_tokens, "k": k}
        out.write_text(json.dumps(settings | {"prompts": results}, indent=1) + "\n")


def report(title: str, length: int, spent: dict, first: dict, texts: dict) -> dict:
    table = Table("", "s per call", "ratio", "ms per token", "ratio", "first token that differs from plain with these weights", title=f"{title}: {length} tokens")
    whole = {name: statistics.median(own[1:]) for name, own in spent.items()}
    steps = {name: (whole[name] - statistics.median(first[name][1:])) / (len(texts[name]) - 1) for name in spent}
    base, differ = "plain generate, dense", {}
    for name in spent:
        own = next(other for other in spent if other.startswith("plain generate") and other.split(", ")[1] in name)
        differ[name] = first_difference(texts[own], texts[name])
        table.add_row(name, f"{whole[name]:.2f}", f"{whole[base] / whole[name]:.2f}x", f"{1000 * steps[name]:.1f}",
                      f"{steps[base] / steps[name]:.2f}x", "none" if differ[name] is None else str(differ[name]))
    console.print(table)
    return {"prompt": length, "seconds": whole, "per_token": steps, "differs_at": differ}


if __name__ == "__main__":
    typer.run(main)
