"""How many tokens a target forward commits with each draft that needs no training and no second model: counts, no timings, so that
it may run on a busy machine.

    python benchmarks/drafts.py --prompts spec_bench.jsonl --limit 2 --k 7

Greedy, batch 1, K fixed. A prompt file has one JSON object per line: {"question_id": 1, "category": "writing", "turns": ["..."]}
(that of Spec-Bench), of which the first turn is used. Every draft's text is compared with the first draft's: in float32 all are the
same, in 16 bit near-ties can fork.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import hf_specdec
from hf_specdec.bench.arms import generate_arm
from hf_specdec.bench.embedded import EMBEDDED, load_target
from hf_specdec.bench.prompts import by_category, load_prompts
from hf_specdec.drafts import Draft, PromptLookupDraft, RecyclingDraft, SuffixAutomatonDraft

# made once for all prompts; only the last one keeps anything from one to the next
DRAFTS: dict[str, Callable[[], Draft]] = {
    "prompt_lookup": PromptLookupDraft,
    "suffix_automaton": SuffixAutomatonDraft,
    "suffix_automaton, 3 branches": lambda: SuffixAutomatonDraft(branches=3),
    "recycling": RecyclingDraft,
    "recycling, 4 branches": lambda: RecyclingDraft(branches=4),
    "recycling, remembered": lambda: RecyclingDraft(remember=True),
}
COUNTS = ("committed", "forwards", "proposed", "accepted")


def measure(target, tokenizer, prompts, k: int, max_new_tokens: int, names: list[str], after: Callable[[dict], None] = lambda result: None) -> dict:
    """{"results": {draft: {category: counts}}, "same_text": {draft: prompts}, ...}; `after` is called with it after every prompt."""
    made = {name: DRAFTS[name]() for name in names}
    arms = {name: generate_arm(name, target, speculative=True, assistant_model=draft, num_assistant_tokens=k) for name, draft in made.items()}
    result = {"k": k, "max_new_tokens": max_new_tokens, "dtype": str(target.dtype).removeprefix("torch."), "prompts": 0,
              "results": {name: {} for name in names}, "same_text": dict.fromkeys(names, 0)}
    for category, group in by_category(prompts).items():
        for prompt in group:
            texts = {}
            for name, arm in arms.items():
                answer = arm.run([prompt.ids(tokenizer)], max_new_tokens)
                texts[name], trace = answer.tokens, answer.trace
                counts = result["results"][name].setdefault(category, dict.fromkeys(COUNTS, 0))
                for field, n in zip(COUNTS, (sum(trace.new_tokens), len(trace.rounds), trace.proposed, trace.accepted)):
                    counts[field] += n
                result["same_text"][name] += texts[name] == texts[names[0]]
            result["prompts"] += 1
            after(result)
    return result


def efficiency(counts: list[dict]) -> float:
    """Block efficiency: tokens committed per forward."""
    return sum(own["committed"] for own in counts) / sum(own["forwards"] for own in counts)


def table(result: dict) -> Table:
    names = list(result["results"])
    categories = list(result["results"][names[0]])
    made = Table("category", *names, title=f"Tokens per target forward, K = {result['k']}, {result['prompts']} prompts, {result['dtype']}")
    for category in categories:
        made.add_row(category, *(f"{efficiency([result['results'][name][category]]):.2f}" for name in names))
    made.add_row("all", *(f"{efficiency(list(result['results'][name].values())):.2f}" for name in names))
    drafted = [[sum(own[field] for own in result["results"][name].values()) for field in ("accepted", "proposed")] for name in names]
    made.add_row("accepted / proposed", *(f"{hits / max(n, 1):.2f}" for hits, n in drafted))
    made.add_row("same text as the first", *(f"{result['same_text'][name]} of {result['prompts']}" for name in names))
    return made


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=EMBEDDED, help="smollm2, a hub id or a folder")
    parser.add_argument("--prompts", default="shipped", help="a .jsonl file, or the set that comes with the package")
    parser.add_argument("--limit", type=int, default=2, help="prompts per category")
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--drafts", nargs="+", default=list(DRAFTS), choices=list(DRAFTS))
    parser.add_argument("--out", type=Path, help="also write the counts as JSON, after every prompt")
    given = parser.parse_args(arguments)
    target, tokenizer = load_target(given.target, given.dtype)

    def after(result: dict) -> None:
        print(f"{result['prompts']} prompts", file=sys.stderr, flush=True)
        if given.out:
            given.out.write_text(json.dumps(result, indent=2) + "\n")

    with torch.inference_mode():
        result = measure(hf_specdec.enable(target), tokenizer, load_prompts(given.prompts, given.limit), given.k, given.max_new_tokens,
                         given.drafts, after)
    Console().print(table(result))


if __name__ == "__main__":
    main()
