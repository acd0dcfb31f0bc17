"""What the time of a round is made of, by name.

    python benchmarks/round_profile.py
    python benchmarks/round_profile.py --format bf16 --compile --draft lookup

Every part of a round is timed by itself: what a part calls that has a name of its own is not counted twice. "no name" is what is left
of a round. The prompt pass is left out. Processor time is the clock that other processes disturb least.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import hf_specdec
from hf_specdec import enable, mx
from hf_specdec.acceptance.sampling import HostVerdict
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench.meter import CLOCKS
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.cached_model import CachedModel
from hf_specdec.distributions import Sampler
from hf_specdec.drafts import Draft, EarlyExitDraft, PromptLookupDraft, RecyclingDraft
from hf_specdec.kv_cache import SlotPlan
from hf_specdec.loop import SpeculativeLoop
from hf_specdec.noise import Noise
from hf_specdec.proposal import Proposal, Verdict
from hf_specdec.schedule import AutoSchedule, FixedSchedule
from hf_specdec.sequences import Sequences
from hf_specdec.trace import SpeculationTrace

NO_NAME = "no name"
DRAFTS = {
    "lookup": lambda target: PromptLookupDraft(),
    "recycling": lambda target: RecyclingDraft(),
    "layers": lambda target: EarlyExitDraft(target, max(target.config.num_hidden_layers // 6, 1)),
}
console = Console(highlight=False)


class Stopwatch:
    """Seconds by name, each part's own. `rounds` counts those after the first, whose times alone are kept."""

    def __init__(self, clock):
        self.clock, self.stack, self.own, self.rounds = clock, [], {}, 0
        self.last = clock()

    def switch(self) -> None:
        now = self.clock()
        if self.stack and self.rounds:
            self.own[self.stack[-1]] = self.own.get(self.stack[-1], 0.0) + now - self.last
        self.last = now

    @contextmanager
    def watch(self, owner: type | ModuleType, method: str, name):
        """Time `owner.method` under `name`, a text or a function of the object; or a function of a module."""
        original, had = getattr(owner, method), method in vars(owner)

        def timed(this, *args, **kwargs):
            self.switch()
            self.stack.append(name if isinstance(name, str) else name(this))
            try:
                return original(this, *args, **kwargs)
            finally:
                self.switch()
                self.stack.pop()
                self.rounds += method == "round"

        setattr(owner, method, timed)
        try:
            yield
        finally:
            setattr(owner, method, original) if had else delattr(owner, method)


def whose(part: str):
    return lambda cached: f"{'target' if cached.role == 'target' else 'draft'} {part}"


def watched(rule: type, draft: type) -> list[tuple]:
    """(class or module, method or function, name) of the parts."""
    return [
        (SpeculativeLoop, "round", NO_NAME),
        (SpeculativeLoop, "_emit", "emit: numbers to the host, trace"),
        (SpeculationTrace, "clock", "clocks"),
        (Verdict, "token", "draw"),
        (HostVerdict, "token", "draw"),
        (SpeculativeLoop, "_part_with", "rows that end"),
        (Noise, "uniform", "random numbers"),
        (Sequences, "append", "commit to the rows, stopping"),
        (Sequences, "room", "room left"),
        (Sequences, "_stream", "streaming"),
        (CachedModel, "room", "room left"),
        (CachedModel, "score", whose("token tensors")),
        (CachedModel, "extend", whose("token tensors")),
        (CachedModel, "_logits", whose("forward")),
        (CachedModel, "_positions_and_masks", whose("positions and masks")),
        (CachedModel, "commit", whose("cache bookkeeping")),
        (CachedModel, "crop", whose("cache bookkeeping")),
        (SlotPlan, "lay", "cache: where the block goes"),
        (Sampler, "__call__", "processors and laws"),
        (rule, "verdict", "verdict"),
        *((draft, method, "draft, outside its forwards") for method in ("evidence", "propose", "observe", "commit")),
        *((schedule, method, "choice of K") for schedule in (AutoSchedule, FixedSchedule) for method in ("next_k", "observe")),
        (Proposal, "within", "checks of the proposal"),
    ]


def profile(model, draft: Draft, prompts: list[list[int]], options: dict, clock) -> tuple[Stopwatch, int]:
    from hf_specdec.acceptance.greedy import GreedyMatching
    from hf_specdec.acceptance.sampling import SpeculativeSampling

    watch, rule = Stopwatch(clock), SpeculativeSampling if options.get("do_sample") else GreedyMatching
    tokens = 0
    for tokens_of_prompt in prompts:
        ids = torch.tensor([tokens_of_prompt])
        with ExitStack() as stack:
            watch.rounds, done = 0, watch.own.get("rounds", 0)
            for owner, method, name in watched(rule, type(draft)):
                stack.enter_context(watch.watch(owner, method, name))
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=draft, pad_token_id=0, **options)
            watch.own["rounds"] = done + watch.rounds - 1
            tokens += out.shape[1] - ids.shape[1]
    return watch, tokens


def main(
    target: str = "smollm2",
    draft: Annotated[list[str], typer.Option(help=f"Of {sorted(DRAFTS)}; may be given several times.")] = ["lookup", "layers"],
    k: int = 5,
    format: Annotated[str | None, typer.Option(help="bf16 or an MX format; none: the model's own layers.")] = None,
    compile: bool = False,
    sample: bool = False,
    stream: bool = False,
    limit: int = 3,
    max_new_tokens: int = 48,
    threads: int = 1,
    clock: str = "cpu",
    out: Path | None = None,
):
    """Print milliseconds per round and shares, part by part; exit code 1 if less than 95 % of the time has a name."""
    torch.set_num_threads(threads)
    model, tokenizer = load_target(target, "bfloat16", "cpu")
    if format == "bf16":
        mx.row_invariant(model)
    elif format:
        mx.compress(model, format, measure=False, lm_head=format)
    enable(model)
    now = CLOCKS[clock]
    prompts = [prompt.ids(tokenizer) for prompt in load_prompts("shipped", limit)]
    options = {"max_new_tokens": max_new_tokens, "num_assistant_tokens": k, "do_sample": sample, "speculative": {"seed": 0, "compile": compile}}
    options |= {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1} if sample else {}
    options |= {"streamer": lambda row, tokens, drafted: None} if stream else {}
    results, poor = {}, False
    for name in draft:
        made = DRAFTS[name](model)
        profile(model, made, prompts if compile else prompts[:1], options, now)  # warms up
        watch, tokens = profile(model, made, prompts, options, now)
        rounds = watch.own.pop("rounds")
        total = sum(watch.own.values())
        results[name] = {"rounds": rounds, "tokens": tokens, "ms": {part: 1000 * s / rounds for part, s in watch.own.items()}}
        table = Table("", "ms per round", "share", title=f"{name}: {rounds} rounds, {tokens} tokens, {1000 * total / rounds:.2f} ms per round")
        for part, seconds in sorted(watch.own.items(), key=lambda item: -item[1]):
            table.add_row(part, f"{1000 * seconds / rounds:.3f}", f"{100 * seconds / total:.2f} %")
        console.print(table)
        named = 1 - watch.own.get(NO_NAME, 0.0) / total
        forwards = sum(seconds for part, seconds in watch.own.items() if part.endswith("forward")) / total
        console.print(f"named: {100 * named:.1f} %; outside the forwards: {100 * (1 - forwards):.1f} %")
        poor |= named < 0.95
    if out is not None:
        out.write_text(json.dumps({"versions": [hf_specdec.__version__, torch.__version__], **results}, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(1 if poor else 0)


if __name__ == "__main__":
    typer.run(main)
