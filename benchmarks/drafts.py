"""What the drafts that need no training and no second model bring: tokens that a target forward commits with each of them, by category,
and in the same run the time of a call against that of plain generate.

    python benchmarks/drafts.py --prompts spec_bench.jsonl --limit 2 --out drafts.json

Greedy, batch 1. Chains have K = --k tokens, trees --nodes; "auto" lets the schedule choose. The counts do not depend on how busy the
machine is; wall times do, and on a CPU with one thread (OMP_NUM_THREADS=1) the ratio to plain generate is of processor time. A prompt file has one JSON object per line: {"question_id": 1, "category": "writing", "turns": ["..."]} (that
of Spec-Bench), of which the first turn is used. Every draft's text is compared with plain generate's: in float32 all are the same, in
16 bit near-ties can fork, unless --row-invariant gives a token the same bits at every width of its pass. The eight categories of MT-Bench are one task, as in Spec-Bench; of each task --limit prompts are taken, evenly
spread, in turns. With --out, a run that was stopped goes on where it was, and other drafts can be added; what a draft remembers from prompt to
prompt is lost then. Prompts on which a draft has not been run are left out of its column.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from itertools import zip_longest
from pathlib import Path
from time import perf_counter, process_time

import torch
from rich.console import Console
from rich.table import Table

import hf_specdec
from hf_specdec import mx
from hf_specdec.bench.arms import PLAIN, generate_arm
from hf_specdec.bench.embedded import EMBEDDED, load_target
from hf_specdec.bench.prompts import Prompt, by_category, load_prompts
from hf_specdec.draft_stop import CHOICES as STOPS
from hf_specdec.drafts import (CascadeDraft, Draft, EarlyExitDraft, HorizontalCascadeDraft, LookaheadDraft, MixtureDraft, ModelDraft, ModelTreeDraft,
                               NGramDraft, NGramRecyclingDraft, PromptLookupDraft, RecyclingDraft, RetrievalDraft, SuffixAutomatonDraft, TranslatedDraft)
from hf_specdec.drafts.early_exit import search
from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.drafts.feature_tree import FeatureTreeDraft
from hf_specdec.training import load_drafter
from hf_specdec.tree_shapes import DynamicTree

CHAIN, TREE, AUTO = "chain", "tree", "auto"
WAYS = ("chain", "or lookup", "tree", "mixture")
OTHERS = ("model", "model_tree", "cascade", "horizontal_cascade", "translated", "early_exit", "retrieval", "ngram")
# made once for all prompts; only those that remember keep anything from one to the next
DRAFTS: dict[str, tuple[str, Callable[[], Draft]]] = {
    "prompt_lookup": (CHAIN, PromptLookupDraft),
    "suffix_automaton": (CHAIN, SuffixAutomatonDraft),
    "suffix_automaton, 3 branches": (TREE, lambda: SuffixAutomatonDraft(branches=3)),
    "recycling": (CHAIN, RecyclingDraft),
    "recycling, 4 branches": (TREE, lambda: RecyclingDraft(branches=4)),
    "recycling, 4 branches, remembered": (TREE, lambda: RecyclingDraft(branches=4, remember=True)),
    "ngram_recycling": (TREE, NGramRecyclingDraft),
    "lookahead": (TREE, LookaheadDraft),
    "mixture": (TREE, MixtureDraft),
    "mixture, remembered": (TREE, lambda: MixtureDraft([SuffixAutomatonDraft(), NGramRecyclingDraft(remember=True, read_prompt=True)])),
    "mixture, K auto": (AUTO, MixtureDraft),
}
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
COUNTS = ("committed", "forwards", "proposed", "accepted", "judged")


class Watched:
    """Adds up the time in a draft's `observe` and `read`, which the trace counts among verification and the rest."""

    def __init__(self, draft: Draft):
        self.draft, self.seconds = draft, 0.0
        draft.observe, draft.read = self.timed(draft.observe), self.timed(draft.read)

    def timed(self, method):
        @wraps(method)
        def watched(*arguments):
            begin = perf_counter()
            method(*arguments)
            self.seconds += perf_counter() - begin

        return watched


def trained(names: list[str], ways: list[str], target) -> dict[str, tuple[str, Callable[[], Draft]]]:
    """Shipped drafters, or folders of them: alone, as a tree where they read the target's hidden states, and with prompt lookup, by turns."""
    found = {}
    for name in names:
        drafter = load_drafter(name, target)
        alone = CHAIN, (lambda own=drafter: own) if isinstance(drafter, Draft) else lambda own=drafter: ModelDraft(own)
        made = {"chain": (name, alone)}
        if isinstance(drafter, FeatureDraft):
            def tree(model=drafter.model) -> Draft:
                return FeatureTreeDraft(model, target, DynamicTree(nodes=60, width=10, branches=6))

            made["tree"] = f"{name}, tree", (CHAIN, tree)  # K is its depth
            made["mixture"] = f"{name} in the mixture", (TREE, lambda tree=tree: MixtureDraft(
                [SuffixAutomatonDraft(), NGramRecyclingDraft(read_prompt=True), tree()], tokens=6))
        made["or lookup"] = f"{name} or lookup", (CHAIN, lambda make=alone[1]: MixtureDraft([PromptLookupDraft(), make()], mode="choose"))
        found |= dict(made[way] for way in ways if way in made)
    return found


def copies(formats: list[str], ways: list[str], target) -> dict[str, tuple[str, Callable[[], Draft]]]:
    """The target's own weights in an MX format as its draft, which needs no training either: alone, with prompt lookup by turns, and in one tree
    with the drafts of the mixture."""
    found = {}
    for format in formats:
        copied = mx.compress(copy.deepcopy(target), format)
        made = {"chain": (f"{format} copy", (CHAIN, lambda own=copied: ModelDraft(own))),
                "or lookup": (f"{format} copy or lookup", (CHAIN, lambda own=copied: MixtureDraft([PromptLookupDraft(), ModelDraft(own)], mode="choose"))),
                "mixture": (f"{format} copy in the mixture", (TREE, lambda own=copied: MixtureDraft(
                    [SuffixAutomatonDraft(), NGramRecyclingDraft(), ModelDraft(own)], tokens=7)))}
        found |= dict(made[way] for way in ways if way in made)
    return found


def others(names: list[str], target, tokenizer, texts: list[Path], layers: int | None) -> dict[str, tuple[str, Callable[[], Draft]]]:
    """Drafts that are made of something: the shipped independent drafter (which reads the same tokens as the target, so that "translated" shows what
    the way through text costs), some of the target's layers, and a datastore and a table of `texts`."""
    small = load_drafter("smollm2_drafter", target)
    made = {
        "model": (CHAIN, lambda: ModelDraft(small)),
        "model_tree": (CHAIN, lambda: ModelTreeDraft(small, DynamicTree(nodes=24, width=6, branches=4))),
        "cascade": (CHAIN, lambda: CascadeDraft(small, SuffixAutomatonDraft())),
        "horizontal_cascade": (CHAIN, lambda: HorizontalCascadeDraft(ModelDraft(small), PromptLookupDraft())),
        "translated": (CHAIN, lambda: TranslatedDraft(small, tokenizer, tokenizer)),
        "early_exit": (CHAIN, lambda: EarlyExitDraft(target, layers or found_layers(target, tokenizer))),
        "retrieval": (TREE, lambda: RetrievalDraft.from_texts(texts, tokenizer)),
        "ngram": (CHAIN, lambda: NGramDraft.from_texts(texts, tokenizer)),
    }
    return {name: made[name] for name in names}


def found_layers(target, tokenizer) -> list[int]:
    """The best subset on the shipped chat prompts and their answers."""
    asked = [tokenizer(prompt.text).input_ids[-64:] for prompt in load_prompts("chat")[:2]]
    answered = [target.generate(torch.tensor([row]), do_sample=False, max_new_tokens=32, pad_token_id=0)[0].tolist() for row in asked]
    found = search(target, answered)
    print(f"early exit: {found}", file=sys.stderr)
    return list(found.layers)


def chosen(prompts: list[Prompt], limit: int, wanted: list[str]) -> list[Prompt]:
    """`limit` prompts of each task, evenly spread (0: all); the tasks take turns. wanted: names of tasks, or none for all."""
    tasks = by_category(replace(prompt, category="MT-Bench" if prompt.category in MT_BENCH else prompt.category) for prompt in prompts)
    if unknown := set(wanted) - set(tasks):
        raise SystemExit(f"--tasks: {sorted(unknown)[0]!r} is none of {sorted(tasks)}.")
    spread = [[task[i * len(task) // n] for i in range(n)] for name, task in tasks.items() if name in (wanted or tasks)
              for n in [min(limit or len(task), len(task))]]
    return [prompt for turn in zip_longest(*spread) for prompt in turn if prompt is not None]


def judged(trace) -> int:
    """Drafted tokens on which a chain's verdict was given: those accepted and the first that was not."""
    return sum(min(entry.accepted + 1, entry.proposed) for entries in trace.rounds for entry in entries)


def measure(target, tokenizer, prompts, k: int, nodes: int, max_new_tokens: int, made: dict, records: dict,
            after: Callable[[], None] = lambda: None, stop: str = "constant") -> None:
    """Fill records[prompt id][draft] with counts and seconds, and records[prompt id]["plain generate"] with seconds; `after` is called
    after every prompt. What is there already is not run again."""
    plain = generate_arm(PLAIN, target)
    names, drafts = list(made), {name: Watched(make()) for name, (_, make) in made.items()}
    ks = {CHAIN: k, TREE: nodes, AUTO: "auto"}
    arms = {name: generate_arm(name, target, speculative={"draft_stop": stop}, assistant_model=watched.draft, num_assistant_tokens=ks[made[name][0]])
            for name, watched in drafts.items()}
    for prompt in prompts:
        record = records.setdefault(prompt.id, {"category": prompt.category})
        missing = [name for name in names if name not in record]
        if missing:
            ids = [prompt.ids(tokenizer)]
            plain_seconds, text = _timed(plain, ids, max_new_tokens)
            record[PLAIN] = plain_seconds
            for name in missing:
                drafts[name].seconds = 0.0
                seconds, answer = _timed(arms[name], ids, max_new_tokens)
                trace, loop = answer.trace, answer.trace.seconds
                record[name] = dict(zip(COUNTS, (sum(trace.new_tokens), len(trace.rounds), trace.proposed, trace.accepted, judged(trace))))
                record[name] |= seconds | {f"plain_{clock}": value for clock, value in plain_seconds.items()}
                record[name] |= {"same_text": answer.tokens == text.tokens, "draft_seconds": loop["draft"] + drafts[name].seconds}
        after()


def _timed(arm, ids, max_new_tokens: int):
    begin, used = perf_counter(), process_time()
    answer = arm.run(ids, max_new_tokens)
    return {"seconds": perf_counter() - begin, "processor_seconds": process_time() - used}, answer


def efficiency(entries: Iterable[dict]) -> str:
    """Block efficiency: tokens committed per forward."""
    entries = list(entries)
    return _ratio(_sum(entries, "committed"), _sum(entries, "forwards"))


def table(records: dict, names: list[str], title: str) -> Table:
    of = {name: [(record["category"], record[name]) for record in records.values() if name in record] for name in names}
    made = Table("tokens per forward", *names, title=title)
    for category in dict.fromkeys(record["category"] for record in records.values()):
        made.add_row(category, *(efficiency(own for other, own in of[name] if other == category) for name in names))
    entries = {name: [own for _, own in of[name]] for name in names}

    def row(label: str, value: Callable[[list[dict]], str]) -> None:
        made.add_row(label, *(value(entries[name]) for name in names))

    row("all", efficiency)
    row("accepted / proposed", lambda own: _ratio(_sum(own, "accepted"), _sum(own, "proposed")))
    row("accepted / judged (chains)", lambda own: _ratio(_sum(own, "accepted"), _sum(own, "judged")))
    clock = "seconds" if torch.cuda.is_available() or torch.get_num_threads() > 1 else "processor_seconds"
    row("speed against plain generate", lambda own: _ratio(_sum(own, f"plain_{clock}"), _sum(own, clock)) + "x")
    row("draft's share of the time", lambda own: f"{_sum(own, 'draft_seconds') / max(_sum(own, 'seconds'), 1e-9):.1%}")
    row("same text as plain generate", lambda own: f"{_sum(own, 'same_text')} of {len(own)}")
    return made


def _ratio(whole, part) -> str:
    return f"{whole / part:.2f}" if part else "-"


def _sum(entries: list[dict], field: str):
    return sum(own[field] for own in entries)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=EMBEDDED, help="smollm2, a hub id or a folder")
    parser.add_argument("--prompts", default="shipped", help="a .jsonl file, or the set that comes with the package")
    parser.add_argument("--limit", type=int, default=2, help="prompts per task; 0 for all")
    parser.add_argument("--k", type=int, default=7, help="tokens of a chain")
    parser.add_argument("--nodes", type=int, default=48, help="tokens of a tree")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--drafts", nargs="*", default=list(DRAFTS), choices=list(DRAFTS))
    parser.add_argument("--drafters", nargs="*", default=[], help="trained drafters, too: a shipped one's name, or a folder")
    parser.add_argument("--copies", nargs="*", default=[], choices=list(mx.FORMATS), help="the target's own weights in these formats as its draft, too")
    parser.add_argument("--others", nargs="*", default=[], choices=OTHERS, help="drafts made of the shipped drafter, of the target's layers, of --texts")
    parser.add_argument("--texts", nargs="*", type=Path, default=[], help="text files for retrieval's datastore")
    parser.add_argument("--layers", type=int, help="of early exit: the first ones; else the best subset that is found")
    parser.add_argument("--tasks", nargs="*", default=[], help="of these alone")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS, help="how trained drafters and copies are used")
    parser.add_argument("--draft-stop", default="constant", choices=STOPS, help="when a draft model's chain ends before K")
    parser.add_argument("--row-invariant", action="store_true", help="bfloat16 tiles and row-invariant attention, on a CPU (mx.row_invariant)")
    parser.add_argument("--out", type=Path, help="keep the records as JSON, after every prompt, and go on from them")
    given = parser.parse_args(arguments)
    settings = {name: getattr(given, name) for name in ("target", "k", "nodes", "max_new_tokens", "dtype", "row_invariant", "draft_stop")}
    result = {"settings": settings, "records": {}}
    if given.out and given.out.exists():
        result = json.loads(given.out.read_text(encoding="utf-8"))
        if result["settings"] != settings:
            parser.error(f"{given.out} was made with {result['settings']}; choose another file, or the same settings.")
    target, tokenizer = load_target(given.target, given.dtype, "cpu" if given.row_invariant else None)
    if given.row_invariant:
        mx.row_invariant(target)
    prompts = chosen(load_prompts(given.prompts), given.limit, given.tasks)

    def after() -> None:
        print(f"{len(result['records'])} prompts", file=sys.stderr, flush=True)
        if given.out:
            partial = given.out.with_name(given.out.name + ".part")
            partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            os.replace(partial, given.out)

    made = {name: DRAFTS[name] for name in given.drafts} | trained(given.drafters, given.ways, target)
    made |= copies(given.copies, given.ways, load_target(given.target, given.dtype, "cpu" if given.row_invariant else None)[0]) if given.copies else {}
    made |= others(given.others, target, tokenizer, given.texts, given.layers) if given.others else {}
    with torch.inference_mode():
        measure(hf_specdec.enable(target), tokenizer, prompts, given.k, given.nodes, given.max_new_tokens, made, result["records"], after,
                given.draft_stop)
    shown = {prompt.id: result["records"][prompt.id] for prompt in prompts}
    numbers = given.dtype + (", row-invariant" if given.row_invariant else "")
    Console().print(table(shown, list(made), f"{len(shown)} prompts, chains of {given.k}, trees of {given.nodes}, {numbers}"))


if __name__ == "__main__":
    main()
