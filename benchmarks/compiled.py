"""What compile=True wins: plain generate of the dense model, stock prompt lookup, and this package eager and compiled, with K = 0, with
prompt lookup, with the shipped drafter, and with these two by turns.

    python benchmarks/compiled.py --threads 2 --clock wall
    python benchmarks/compiled.py --threads 2 --clock wall --prompts spec_bench.jsonl --limit 2 --longest 900 --way layers --way model --repetitions 1

SmolLM2-135M-Instruct in bfloat16 on a CPU; `format` is that of our Linear layers and head ("bf16": the same weights, in tiles), and our
attention is `hf_specdec_rows`. The contestants take turns. "per token" leaves out the prompt pass, which is not compiled. The last table
adds the prompts up.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_specdec import enable, mx, warmup
from hf_specdec.bench.arms import Nothing, generate_arm
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench.forks import first_difference
from hf_specdec.bench.meter import CLOCKS
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.terminal import counting
from hf_specdec.drafts import MixtureDraft, ModelDraft, PromptLookupDraft
from hf_specdec.training import load_drafter

console = Console(highlight=False, width=130)


def main(
    target: str = "smollm2",
    format: Annotated[list[str], typer.Option(help="bf16 or an MX format; may be given several times.")] = ["bf16", "mxfp6_e2m3"],
    k: int = 7,
    prompt: Annotated[list[str], typer.Option(help="Of the shipped prompts.")] = ["code_edit/1", "chat/1"],
    prompts: Annotated[str | None, typer.Option(help="Instead of these: a file of prompts.")] = None,
    limit: Annotated[int, typer.Option(help="Of each category of that file.")] = 2,
    longest: Annotated[int, typer.Option(help="Leave out prompts of more tokens.")] = 900,
    way: Annotated[list[str], typer.Option(help="eager, layers or model; may be given several times.")] = ["eager", "layers", "model"],
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
    wanted = [each for each in load_prompts(prompts or "shipped", limit if prompts else None) if prompts or each.id in prompt]
    prompts = {f"{each.category} {each.id}": each.ids(tokenizer) for each in wanted}
    prompts = {title: ids for title, ids in prompts.items() if len(ids) <= longest}
    arms = {"plain generate, dense": generate_arm("", dense),
            f"stock lookup, K={k}, dense": generate_arm("", dense, prompt_lookup_num_tokens=k)}
    if not way or not set(way) <= {"eager", "layers", "model"}:
        raise typer.BadParameter("choose eager, layers or model.", param_hint="--way")
    for name in format:
        model = mx.compress(copy.deepcopy(dense), name, measure=False, lm_head=name)
        model.set_attn_implementation("hf_specdec_rows")
        most = max(map(len, prompts.values())) + max_new_tokens
        drafts = {"K=0": (Nothing(), k), f"lookup, K={k}": (PromptLookupDraft(), k)}
        with suppress(ValueError):  # the shipped drafters are for SmolLM2 alone
            independent, feature = ModelDraft(load_drafter("smollm2_drafter", model)), load_drafter("smollm2_feature_drafter", model)
            drafts |= {"drafter, K=2": (independent, 2), "feature drafter, K=2": (feature, 2)}
            drafts["lookup or feature drafter, K=3"] = (MixtureDraft([PromptLookupDraft(), feature], mode="choose"), 3)
        for how in way:
            if how != "eager":
                begin = time.process_time()
                made = sum(warmup(enable(model), draft, {"num_assistant_tokens": drafted, "compile": how}, most) for draft, drafted in drafts.values())
                console.print(f"{name}, {how}: {made} passes compiled in {time.process_time() - begin:.0f} s of processor time")
        if "eager" in way:
            arms[f"plain generate, {name}"] = generate_arm("", model)
        for title, (draft, drafted) in drafts.items():
            for how in way:
                options = {"speculative": {"seed": 0, "compile": how != "eager" and how}, "num_assistant_tokens": drafted, "assistant_model": draft}
                arms[f"{title}, {name}, {how}"] = generate_arm("", model, **options)
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
    in_all(results)
    if out is not None:
        settings = {"torch": torch.__version__, "threads": torch.get_num_threads(), "clock": clock, "tokens": max_new_tokens, "k": k}
        out.write_text(json.dumps(settings | {"prompts": results}, indent=1) + "\n", encoding="utf-8")


def in_all(results: dict) -> None:
    """Seconds of whole calls, and after the first token, over all prompts; ratios to plain generate and to stock lookup."""
    table = Table("", "calls, s", "over plain", "over stock lookup", "decoding, s", "over plain", "over stock lookup",
                  title=f"{len(results)} prompts, {sum(each['prompt'] for each in results.values())} tokens")
    names = list(next(iter(results.values()))["seconds"])
    sums = {name: [sum(each["seconds"][name] for each in results.values()),
                   sum(each["decoding"][name] for each in results.values())] for name in names}
    for name in names:
        cells = [[f"{own:.1f}", f"{sums[names[0]][i] / own:.2f}x", f"{sums[names[1]][i] / own:.2f}x"] for i, own in enumerate(sums[name])]
        table.add_row(name, *cells[0], *cells[1])
    console.print(table)


def report(title: str, length: int, spent: dict, first: dict, texts: dict) -> dict:
    table = Table("", "s per call", "ratio", "ms per token", "ratio", "first token that differs from plain (else K=0) with these weights", title=f"{title}: {length} tokens")
    whole = {name: statistics.median(own[1:]) for name, own in spent.items()}
    steps = {name: (whole[name] - statistics.median(first[name][1:])) / (len(texts[name]) - 1) for name in spent}
    base, differ = "plain generate, dense", {}
    for name in spent:
        parts = name.split(", ")
        weights = parts[-2] if parts[-1] in ("eager", "layers", "model") else parts[-1]
        own = next(other for other in spent if weights in other.split(", ") and other.startswith(("plain", "K=0")))
        differ[name] = first_difference(texts[own], texts[name])
        table.add_row(name, f"{whole[name]:.2f}", f"{whole[base] / whole[name]:.2f}x", f"{1000 * steps[name]:.1f}",
                      f"{steps[base] / steps[name]:.2f}x", "none" if differ[name] is None else str(differ[name]))
    console.print(table)
    decoding = {name: each * (len(texts[name]) - 1) for name, each in steps.items()}
    return {"prompt": length, "seconds": whole, "decoding": decoding, "per_token": steps, "differs_at": differ}


if __name__ == "__main__":
    typer.run(main)
