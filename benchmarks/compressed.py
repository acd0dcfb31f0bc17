"""The target with fewer bits as its own draft (`mx.draft_of`), beside plain generate() as stock and in tiles, prompt lookup, and a mixture of both drafts, in turns.

    python benchmarks/compressed.py --dtype float32 --compile                 SmolLM2-135M-Instruct on shipped prompts
    python benchmarks/compressed.py --shape 1b --dtype bfloat16 --rates 0.8 0.9   a Llama shape with random weights; acceptance is simulated, costs are not

Greedy, batch 1, whole calls with their prompt pass; medians of every prompt, summed by kind, as speed-ups over stock generate(). Beside them stands the check: how many of
the texts are plain generate()'s of the model in tiles.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import hf_specdec
from hf_specdec import mx
from hf_specdec.bench.arms import Nothing, twin
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.simulated import SimulatedDraft
from hf_specdec.bench.terminal import counting
from hf_specdec.drafts import CompressedDraft, MixtureDraft, SuffixAutomatonDraft

KINDS = ("code_edit", "summary", "chat")
PROMPT = 64  # tokens, of a shape


class SimulatedCopy(SimulatedDraft, CompressedDraft):
    """A compressed copy that really runs, on the target's cache, and whose tokens are then right by a coin."""

    def __init__(self, target, model, oracle: list[int], rate: float):
        CompressedDraft.__init__(self, target, model)
        self.oracle, self.rate, self.coin = oracle, rate, random.Random(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a folder or a hub id")
    parser.add_argument("--shape", choices=("1b",), help="instead of a model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--format", default="mxfp6_e2m3")
    parser.add_argument("--compile", action="store_true", help="passes of ours are compiled")
    parser.add_argument("--k", nargs="+", type=int, default=[4], help="besides \"auto\"")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.8, 0.9], help="of a shape")
    parser.add_argument("--limit", type=int, default=3, help="prompts of a kind")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, prompts = of_shape(options) if options.shape else of_model(options)
    tiles = hf_specdec.enable(mx.to_tiles(twin(model)))
    seconds, right, per_pass = measure(arms(model, tiles, prompts, options), prompts, options)
    report(seconds, right, per_pass, options)
    if options.out:
        options.out.write_text(json.dumps({"options": vars(options) | {"out": None}, "seconds": seconds, "same text": right, "tokens per pass": per_pass}, indent=1), encoding="utf-8")


def of_model(options) -> tuple:
    model, tokenizer = load_target(options.model, options.dtype)
    return model, [(prompt.category, prompt.ids(tokenizer)) for kind in KINDS for prompt in load_prompts(kind, options.limit)]


def of_shape(options) -> tuple:
    from mx_models import random_llama  # the script beside this one

    model = random_llama(options.shape).to(getattr(torch, options.dtype)).eval()
    model.generation_config.eos_token_id = None
    return model, [(f"acceptance {rate:g}, SIMULATED", list(range(10, 10 + PROMPT))) for rate in options.rates]


def arms(model, tiles, prompts: list, options) -> dict:
    """Name -> what runs it on a prompt; the first is stock generate(), the second what texts are compared with."""
    draft = mx.draft_of(tiles, options.format)
    way, oracles = {"compile": options.compile}, {}

    def run(target, n: int, **more):
        ids = torch.tensor([prompts[n][1]])
        return target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=options.max_new_tokens, return_dict_in_generate=True, **more)

    def copy_of(n: int):
        if not options.shape:
            return draft
        if n not in oracles:
            oracles[n] = run(tiles, n).sequences[0, PROMPT:].tolist()
        return SimulatedCopy(tiles, draft.model, oracles[n], options.rates[n])

    made = {"stock": lambda n: run(model, n), "tiles": lambda n: run(tiles, n)}
    if options.compile:
        made["tiles, compiled"] = lambda n: run(tiles, n, speculative=way, assistant_model=Nothing())
    if not options.shape:
        made["prompt lookup"] = lambda n: run(tiles, n, speculative=way)
    made["compressed"] = lambda n: run(tiles, n, speculative=way, assistant_model=copy_of(n))
    for k in options.k:
        made[f"compressed, K = {k}"] = lambda n, k=k: run(tiles, n, speculative=way, assistant_model=copy_of(n), num_assistant_tokens=k)
    if not options.shape:
        both = MixtureDraft([SuffixAutomatonDraft(), draft], mode="choose")
        made["lookup or compressed"] = lambda n: run(tiles, n, speculative=way, assistant_model=both)
    return made


def measure(made: dict, prompts: list, options) -> tuple[dict, dict, dict]:
    """By arm and kind: seconds (medians, summed), texts that are the second arm's ([n, of]), and tokens per pass (the last time)."""
    seconds, right, tokens = ({name: {} for name in made} for _ in range(3))
    with counting("Runs", len(prompts) * (options.repetitions + 1) * len(made)) as step:
        for n, (kind, _) in enumerate(prompts):
            times = {name: [] for name in made}
            for repetition in range(options.repetitions + 1):
                texts = {}
                for name, run in made.items():
                    begin = time.perf_counter()
                    out = run(n)
                    times[name].append(time.perf_counter() - begin)
                    texts[name] = out.sequences.tolist()
                    if repetition == options.repetitions and getattr(out, "speculation", None):
                        tokens[name].setdefault(kind, []).append(out.speculation.block_efficiency)
                    step()
                for name, text in texts.items():
                    count = right[name].setdefault(kind, [0, 0])
                    count[0], count[1] = count[0] + (text == texts["tiles"]), count[1] + 1
            for name, own in times.items():
                seconds[name][kind] = seconds[name].get(kind, 0.0) + statistics.median(own[1:])
    return seconds, right, {name: {kind: statistics.mean(own) for kind, own in kinds.items()} for name, kinds in tokens.items()}


def report(seconds: dict, right: dict, per_pass: dict, options) -> None:
    kinds = list(seconds["stock"])
    what = options.shape or options.model
    table = Table(title=f"{what}, {options.dtype}, {options.format}{', compiled' if options.compile else ''}: speed over stock generate()", caption="tokens per pass; texts that are plain generate()'s in tiles")
    for column in ("", *kinds):
        table.add_column(column)
    for name, own in seconds.items():
        cells = []
        for kind in kinds:
            more = f"{per_pass[name][kind]:.2f}; " if kind in per_pass[name] else ""
            cells.append(f"{seconds['stock'][kind] / own[kind]:.2f}x ({more}{right[name][kind][0]} of {right[name][kind][1]})")
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
