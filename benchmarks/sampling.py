"""What sampling costs: plain generate, stock prompt lookup and ours under usual settings, interleaved in one process.

    python benchmarks/sampling.py --out sampling.json

Batch 1, the packaged prompts, prompt lookup with K = 7 on both sides, whole calls with their prompt pass. Per setting: tokens per second of each,
the milliseconds of a round of ours that pass outside the forwards, and beside them the check: the scores that the call returned for every
committed token against those which transformers' own processors make of a plain forward over the same text. `other tokens` counts places
where another set of tokens is left; the largest difference of probabilities is that of the two forwards.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from transformers import (LogitsProcessorList, MinNewTokensLengthLogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper,
                          TopPLogitsWarper)

import hf_specdec
from hf_specdec import mx
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.terminal import counting

SETTINGS = {
    "greedy": dict(do_sample=False),
    "greedy, min_new_tokens": dict(do_sample=False, min_new_tokens=64),
    "temperature 0.7": dict(do_sample=True, temperature=0.7, top_k=0),
    "... top-k 50": dict(do_sample=True, temperature=0.7, top_k=50),
    "... top-p 0.9": dict(do_sample=True, temperature=0.7, top_k=0, top_p=0.9),
    "... top-k 50, top-p 0.9": dict(do_sample=True, temperature=0.7, top_k=50, top_p=0.9),
    "... min-p 0.05": dict(do_sample=True, temperature=0.7, top_k=0, min_p=0.05),
}
ARMS = {"plain": {}, "stock": dict(prompt_lookup_num_tokens=7), "ours": dict(speculative=True, num_assistant_tokens=7)}


def run(model, ids: torch.Tensor, options: dict, tokens: int, seed: int) -> tuple[float, int, object]:
    torch.manual_seed(seed)
    begin = perf_counter()
    done = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, return_dict_in_generate=True, pad_token_id=0, **options)
    return perf_counter() - begin, done.sequences.shape[1] - ids.shape[1], done


@torch.inference_mode()
def check(model, ids: torch.Tensor, options: dict, tokens: int) -> tuple[int, float]:
    """Places where another set of tokens is left than by transformers' processors, and the largest difference of probabilities."""
    done = run(model, ids, ARMS["ours"] | options | dict(output_scores=True, output_logits=True), tokens, 0)[2]
    text, sets, error = done.sequences, 0, 0.0
    processors = stock_processors(model, ids.shape[1], options)
    own = model(text).logits[:, ids.shape[1] - 1 : -1].float()
    for i, (scores, logits) in enumerate(zip(done.scores, done.logits)):
        prefix = text[:, : ids.shape[1] + i]
        sets += int((processors(prefix, logits.clone()).isfinite() != scores.isfinite()).any())
        error = max(error, float((logits.softmax(-1) - own[:, i].softmax(-1)).abs().max()))
    return sets, error


def stock_processors(model, prompt: int, options: dict) -> LogitsProcessorList:
    """transformers' own processors of such a call, in its order."""
    made = LogitsProcessorList()
    if "min_new_tokens" in options:
        made.append(MinNewTokensLengthLogitsProcessor(prompt, options["min_new_tokens"], model.generation_config.eos_token_id))
    if options["do_sample"]:
        made.append(TemperatureLogitsWarper(options["temperature"]))
    if options.get("top_k"):
        made.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        made.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        made.append(MinPLogitsWarper(options["min_p"]))
    return made


def measure(model, prompts: list[torch.Tensor], tokens: int, repetitions: int) -> dict:
    table = {}
    with counting("sampling", len(SETTINGS) * len(prompts) * (repetitions + 1)) as bar:
        for name, options in SETTINGS.items():
            seconds, made, outside = {arm: 0.0 for arm in ARMS}, dict.fromkeys(ARMS, 0), []
            for number, ids in enumerate(prompts):
                for turn in range(repetitions + 1):
                    for arm, more in ARMS.items():
                        spent, new, done = run(model, ids, more | options, tokens, 100 * number + turn)
                        if turn:  # the first warms up
                            seconds[arm] += spent
                            made[arm] += new
                            if arm == "ours" and done.speculation.target_calls > 1:
                                took = done.speculation.seconds
                                outside.append(1e3 * (took["draft"] + took["verify"] + took["rest"] - took["forward"]) / (done.speculation.target_calls - 1))
                    bar()
            checks = [check(model, ids, options, tokens) for ids in prompts]
            table[name] = {arm: made[arm] / seconds[arm] for arm in ARMS} | {
                "outside_ms": statistics.median(outside), "other_sets": sum(c[0] for c in checks), "error": max(c[1] for c in checks)}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--format", default="bf16", help="of mx.compress; none: torch's own products")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=2, help="of each category")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model, tokenizer = load_target(dtype=given.dtype)
    if given.format != "none":
        mx.compress(model, given.format, lm_head=given.format, measure=False)
        model.set_attn_implementation("hf_specdec_rows")
    hf_specdec.enable(model)
    prompts = [torch.tensor([prompt.ids(tokenizer)]) for prompt in load_prompts(limit=given.prompts)]
    table = measure(model, prompts, given.max_new_tokens, given.repetitions)
    show(table)
    if given.out:
        given.out.write_text(json.dumps(table, indent=1), encoding="utf-8")


def show(table: dict) -> None:
    shown = Table("setting", "plain, tokens/s", "stock lookup", "ours", "of plain", "outside the forwards, ms a round", "other tokens", "largest difference")
    for name, row in table.items():
        shown.add_row(name, *(f"{row[arm]:.1f}" for arm in ARMS), f"{row['ours'] / row['plain']:.2f}", f"{row['outside_ms']:.2f}", str(row["other_sets"]), f"{row['error']:.1e}")
    Console(width=160).print(shown)


if __name__ == "__main__":
    main()
