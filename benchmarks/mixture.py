"""A mixture of lookup and a draft model against each of them alone, prompt by prompt: tokens per millisecond.

    OMP_NUM_THREADS=1 python benchmarks/mixture.py --out mixture.json

Greedy, batch 1, K "auto", the packaged prompts, whole calls with their prompt pass, the arms in turns. On a CPU with one thread the time is
processor time, and what K "auto" and the mixture measure is, too. The draft model's acceptance is SIMULATED, its cost is not: the shipped
drafter runs, and what it says is replaced by the target's own next token at --rate of all places of the text, drawn anew in every
repetition, else by another token: so many places decide little, and a few repetitions average over what they were. Outputs are compared
with plain generate's. --weights tiles: bfloat16 tiles of hf_specdec.mx with row-invariant attention, so that a wider pass gives the same
bits; float32 gives the same text anyway, in torch's own layout or, --weights fp32, in tiles.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from time import perf_counter, process_time

import torch
from rich.console import Console
from rich.table import Table

import hf_specdec
from hf_specdec import loop, mx
from hf_specdec.bench.arms import PLAIN, generate_arm
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.drafts import Draft, MixtureDraft, ModelDraft, PromptLookupDraft, SuffixAutomatonDraft, earning
from hf_specdec.proposal import Proposal
from hf_specdec.training import load_drafter

LOOKUPS = {kind.name: kind for kind in (PromptLookupDraft, SuffixAutomatonDraft)}
ARMS = ("lookup", "model", "choose", "merge")


class SimulatedDraft(ModelDraft):
    """`model` runs; its tokens are then replaced by those of `said`, what is said at every position of the text."""

    name = "simulated"

    def __init__(self, model, said: dict[int, int]):
        super().__init__(model)
        self.said = said

    def propose(self, context, k):
        size = super().propose(context, k).sizes[0]
        if not size:
            return Proposal.from_lists([[]], context.device, self.name)
        at = len(context.rows[0])
        tokens = torch.tensor([[self.said.get(place, 0) for place in range(at, at + size)]], device=context.device)
        self.drafted = Proposal.chain(tokens, None, [size], self.name)
        return self.drafted


def said(prompt: list[int], answer: list[int], rate: float, seed: int, vocabulary: int) -> dict[int, int]:
    coin = random.Random(seed)
    return {len(prompt) + i: token if coin.random() < rate else (token + 1) % vocabulary for i, token in enumerate(answer)}


def drafts_of(drafter, lookup: type[Draft]) -> dict[str, Draft]:
    drafts = {"lookup": lookup(), "model": SimulatedDraft(drafter, {})}
    return drafts | {mode: MixtureDraft([lookup(), SimulatedDraft(drafter, {})], mode) for mode in ("choose", "merge")}


def say(drafts: dict[str, Draft], words: dict[int, int]) -> None:
    """From now on the simulated drafts say `words`."""
    for draft in drafts.values():
        for part in draft.parts if isinstance(draft, MixtureDraft) else [draft]:
            if isinstance(part, SimulatedDraft):
                part.said = words


def measure(target, drafter, prompts, tokenizer, rate: float, max_new_tokens: int, repetitions: int, clock, after, lookup=PromptLookupDraft) -> dict:
    """{prompt id: {arm: tokens per millisecond over all repetitions, ...}}. All prompts, then all again: the mixtures are one object each,
    and remember the calls before."""
    records, drafts = {}, drafts_of(drafter, lookup)
    arms = {PLAIN: generate_arm(PLAIN, target)}
    arms |= {name: generate_arm(name, target, speculative=True, assistant_model=draft) for name, draft in drafts.items()}
    answers = [arms[PLAIN].run([prompt.ids(tokenizer)], max_new_tokens).tokens for prompt in prompts]
    spent, same = {}, {}
    for turn in range(repetitions):
        for number, (prompt, answer) in enumerate(zip(prompts, answers)):
            ids = prompt.ids(tokenizer)
            say(drafts, said(ids, answer[0], rate, 1000 * turn + number, target.config.vocab_size))
            for name in list(arms) if turn % 2 == 0 else list(arms)[::-1]:
                begin = clock()
                found = arms[name].run([ids], max_new_tokens)
                spent.setdefault((prompt.id, name), []).append(clock() - begin)
                same[prompt.id, name] = same.get((prompt.id, name), True) and found.tokens == answer
            records[prompt.id] = {"category": prompt.category, "same_text": {name: same[prompt.id, name] for name in arms},
                                  "tokens_per_ms": {name: len(answer[0]) / statistics.fmean(spent[prompt.id, name]) / 1000 for name in arms}}
            after(records)
    return records


def table(records: dict, title: str) -> Table:
    made = Table("prompt", f"{PLAIN}, tokens/s", *ARMS, "choose / best", "merge / best", "same text", title=title)
    for name, record in records.items():
        speed = record["tokens_per_ms"]
        ratios = [f"{speed[arm] / speed[PLAIN]:.2f}x" for arm in ARMS]
        made.add_row(name, f"{1000 * speed[PLAIN]:.1f}", *ratios, *(f"{against_best(record, mode):.2f}" for mode in ARMS[2:]),
                     f"{sum(record['same_text'].values())} of {len(record['same_text'])}")
    for category in dict.fromkeys(record["category"] for record in records.values()):
        own = [record for record in records.values() if record["category"] == category]
        mean = {arm: statistics.fmean(record["tokens_per_ms"][arm] / record["tokens_per_ms"][PLAIN] for record in own) for arm in ARMS}
        made.add_row(f"{category}, mean", "", *(f"{value:.2f}x" for value in mean.values()),
                     *(f"{statistics.fmean(against_best(record, mode) for record in own):.2f}" for mode in ARMS[2:]), "")
    return made


def against_best(record: dict, mode: str) -> float:
    return record["tokens_per_ms"][mode] / max(record["tokens_per_ms"][arm] for arm in ("lookup", "model"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", default="shipped", help="a .jsonl file, or the set that comes with the package")
    parser.add_argument("--limit", type=int, help="prompts per category")
    parser.add_argument("--target", default="smollm2", help="smollm2, a hub id or a folder")
    parser.add_argument("--drafter", default="smollm2_drafter", help="the draft model whose cost is paid")
    parser.add_argument("--weights", default="tiles", choices=("tiles", "float32", "fp32"))
    parser.add_argument("--lookup", default="prompt_lookup", choices=LOOKUPS, help="the draft that copies")
    parser.add_argument("--rate", type=float, default=0.8, help="of all places, at how many the draft model is right")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, help="keep the records as JSON")
    given = parser.parse_args(arguments)
    target, tokenizer = load_target(given.target, "bfloat16" if given.weights == "tiles" else "float32")
    drafter = load_drafter(given.drafter, target)
    if given.weights == "tiles":
        target = mx.row_invariant(target)
    elif given.weights == "fp32":
        target = mx.to_tiles(target)
    clock = perf_counter
    if target.device.type == "cpu" and torch.get_num_threads() == 1:
        clock = loop.perf_counter = earning.perf_counter = process_time

    def after(records: dict) -> None:
        print(f"{len(records)} prompts", file=sys.stderr, flush=True)
        if given.out:
            settings = {name: str(value) for name, value in vars(given).items()}
            given.out.write_text(json.dumps({"settings": settings, "records": records}, indent=1) + "\n", encoding="utf-8")

    with torch.inference_mode():
        records = measure(hf_specdec.enable(target), drafter, load_prompts(given.prompts, given.limit), tokenizer, given.rate, given.max_new_tokens,
                          given.repetitions, clock, after, LOOKUPS[given.lookup])
    Console(width=150).print(table(records, f"{len(records)} prompts, {given.weights}, draft model's acceptance SIMULATED at {given.rate}"))


if __name__ == "__main__":
    main()
