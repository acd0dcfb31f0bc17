"""The four runs of a recipe, side by side, and the cost of single forwards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import hf_specdec
from hf_specdec.bench.arms import Answer, generate_arm
from hf_specdec.bench.forks import Judge, first_difference
from hf_specdec.bench.meter import measured, synchronize
from hf_specdec.bench.simulated import SimulatedDraft, SimulatedTable
from hf_specdec.compat import CACHE
from hf_specdec.drafts.model import ModelDraft

from . import memory
from .models import Pair, compressed, make_pair, weight_bytes
from .recipe import BASELINE, BOTH, MX, PLAIN_OF, RUNS, SPECULATION, Recipe
from .store import Store

CONTEXT = 32  # tokens in the cache while single forwards are timed


class Runner:
    """Fills a `Store`. options: what the command line gives. step(note): called after every run."""

    def __init__(self, recipe: Recipe, options, names: list[str], store: Store, step: Callable[[str], None]):
        self.recipe, self.options, self.names, self.store, self.step = recipe, options, names, store, step

    def missing(self, arms: tuple[str, ...] = RUNS) -> list[tuple[int, str, str]]:
        """(repetition, prompt, run) still to be done, in turns: a plain run before the speculative one that needs its output."""
        todo = []
        for repetition in range(self.options.repetitions):
            for number, name in enumerate(self.names):
                turn = list(arms) if (repetition + number) % 2 == 0 else [*reversed(arms[: len(arms) // 2]), *reversed(arms[len(arms) // 2 :])]
                todo += [(repetition, name, arm) for arm in turn if self.store.find(repetition, name, arm) is None]
        return todo

    def run(self) -> None:
        """Everything that is missing. Models are loaded only if something is."""
        stages = [(BASELINE, SPECULATION), (MX, BOTH)] if self.options.phases else [RUNS]
        if not any(map(self._unfinished, stages)):
            return
        pair = make_pair(self.recipe, self.options, self.names)
        for stage in stages:
            if self._unfinished(stage):
                self._stage(stage, pair)

    def _unfinished(self, stage: tuple[str, ...]) -> bool:
        return bool(self.missing(stage)) or not self._costs_known(stage) or bool(self._unexplained(stage))

    def _costs_known(self, stage: tuple[str, ...]) -> bool:
        return all(arm in self.store.data["costs"] for arm in stage if arm not in PLAIN_OF)

    def _unexplained(self, stage: tuple[str, ...]) -> list[tuple[str, str, int]]:
        """(run, prompt, place) of outputs of the first repetition that part from the plain ones and are not in the JSON yet."""
        known, found = {(fork["run"], fork["prompt"]) for fork in self.store.data["forks"]}, []
        for arm, name in ((arm, name) for arm in stage if arm in PLAIN_OF for name in self.names):
            place = first_difference(*(self.store.find(0, name, which)["tokens"] for which in (PLAIN_OF[arm], arm)))
            found += [(arm, name, place)] if place is not None and (arm, name) not in known else []
        return found

    def _stage(self, stage: tuple[str, ...], pair: Pair) -> None:
        targets = {BASELINE: pair.target} if BASELINE in stage else {}
        if MX in stage:
            targets[MX] = compressed(pair.target, BASELINE not in stage, self.options.activations)
        for target in targets.values():
            hf_specdec.enable(target)
        for arm in stage:  # warm up: kernels are built and pages touched before anything is timed
            self._generate(arm, targets, pair.draft, next(iter(pair.prompts.values()))[:4], 3, [], 0)
        todo = self.missing(stage)
        if not self._costs_known(stage):
            self._costs(targets, pair)
        for repetition, name, arm in todo:
            self._measure(repetition, name, arm, targets, pair)
        if todo:
            self._costs(targets, pair)  # once more: what a shared machine gives drifts while the runs go on
        self._forks(targets, pair, stage)

    # --- one run ----------------------------------------------------------------------------------------------------

    def _measure(self, repetition: int, name: str, arm: str, targets: dict[str, Any], pair: Pair) -> None:
        prompt, plain = pair.prompts[name], PLAIN_OF.get(arm)
        oracle = self.store.find(repetition, name, plain)["tokens"] if plain else []
        target, seed = targets[plain or arm], repetition * len(self.names) + self.names.index(name)
        with measured(target) as cost, FirstPass(target) as first:
            answer = self._generate(arm, targets, pair.draft, prompt, self.options.new_tokens, oracle, seed)
        trace, tokens = answer.trace, answer.tokens[0]
        rounds = [[e.proposed, e.accepted, e.committed] for entries in trace.rounds for e in entries] if trace else []
        self.store.add({
            "repetition": repetition, "prompt": name, "run": arm, "prompt_tokens": len(prompt), "seconds": cost.seconds,
            "prompt_seconds": first.seconds, "prompt_new_tokens": rounds[0][2] if rounds else 1,
            "target_forwards": len(cost.target.widths), "draft_forwards": trace.draft_calls if trace else 0,
            "draft_seconds": trace.seconds["draft"] if trace else 0.0, "peak_memory": cost.peak_memory, "rounds": rounds,
            "tokens": tokens,
        })  # fmt: skip
        self.step(f"{name}: {arm}")

    def _generate(self, arm: str, targets, draft, prompt: list[int], new: int, oracle: list[int], seed: int) -> Answer:
        target, extra = targets[PLAIN_OF.get(arm, arm)], {}
        if arm in PLAIN_OF:
            extra = {"speculative": True, "num_assistant_tokens": self.options.k, "assistant_model": self._draft(draft, oracle, seed)}
        return generate_arm(arm, target, **extra).run([prompt], new)

    def _draft(self, draft, oracle: list[int], seed: int):
        if self.options.acceptance is not None:
            return simulated(draft, self.options.acceptance, oracle, seed)
        return None if draft is None else ModelDraft(draft)  # None: prompt lookup

    # --- single forwards, forks -------------------------------------------------------------------------------------

    def _costs(self, targets: dict[str, Any], pair: Pair) -> None:
        """Medians of the seconds of a forward of one token and of K + 1 tokens, by turns, over all calls; weights in bytes."""
        runs = {(arm, width): target for arm, target in targets.items() for width in ("one", "wide")}
        runs |= {(arm, "draft"): pair.draft for arm in targets if pair.draft is not None}
        tokens = {"one": 1, "wide": self.options.k + 1, "draft": 1}
        forwards = {key: timed_forward(model, tokens[key[1]]) for key, model in runs.items()}
        costs = self.store.data["costs"]
        seconds = {(arm, what): list(costs.get(arm, {}).get("seconds", {}).get(what, [])) for arm, what in runs}
        for _ in range(self.options.cost_repetitions):
            for key, forward in forwards.items():
                seconds[key].append(forward())
        for arm, target in targets.items():
            known = {what: times for (of, what), times in seconds.items() if of == arm}
            sizes = {"weight_bytes": weight_bytes(target), "parameters": self._parameters(targets)}
            sizes |= {"draft_bytes": weight_bytes(pair.draft)} if pair.draft is not None else {}
            costs[arm] = {what: statistics.median(times) for what, times in known.items()} | sizes | {"seconds": known}
        self.store.save()

    def _parameters(self, targets: dict[str, Any]) -> int | None:
        known = self.store.data["costs"].get(BASELINE, {}).get("parameters")
        return sum(p.numel() for p in targets[BASELINE].parameters()) if BASELINE in targets else known

    def _forks(self, targets: dict[str, Any], pair: Pair, stage: tuple[str, ...]) -> None:
        """Where a speculative output parts from the plain one: explained in float32 if the memory for that is there."""
        judges: dict[str, Judge] = {}
        for arm, name, place in self._unexplained(stage):
            plain = PLAIN_OF[arm]
            wide = 6.5 * sum(p.numel() for p in targets[plain].parameters())
            if plain not in judges and wide < (memory.free_bytes(targets[plain].device) or 0):
                judges[plain] = Judge(targets[plain])
            tokens = [self.store.find(0, name, which)["tokens"] for which in (plain, arm)]
            known = judges[plain].fork(pair.prompts[name], *tokens).to_dict() if plain in judges else {"position": place, "near_tie": None}
            self.store.data["forks"].append({"run": arm, "prompt": name, **known})
            self.store.save()


def simulated(model, rate: float, oracle: list[int], seed: int) -> SimulatedDraft | SimulatedTable:
    """A draft whose acceptance is SIMULATED: `model` runs, or without one its tokens come from nowhere, free of cost."""
    return SimulatedTable(oracle, rate, seed) if model is None else SimulatedDraft(model, oracle, rate, seed)


class FirstPass:
    """Seconds until the first forward of the model has ended, awaited also on a GPU."""

    seconds = float("nan")

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.begin = time.perf_counter()
        self.hook = self.model.register_forward_hook(self._ended)
        return self

    def __exit__(self, *_):
        self.hook.remove()

    def _ended(self, *_):
        if self.seconds != self.seconds:
            synchronize(self.model)
            self.seconds = time.perf_counter() - self.begin


def timed_forward(model, width: int) -> Callable[[], float]:
    """A function that times one forward of `width` tokens on top of a filled cache."""
    text = torch.arange(CONTEXT + width, device=model.device) % model.config.vocab_size
    inputs, name = {}, "input_ids"
    if model.config.is_encoder_decoder:  # the decoder alone, over a source as long as what is cached of its own text
        inputs, name = {"encoder_outputs": model.get_encoder()(text[:CONTEXT][None], return_dict=True)}, "decoder_input_ids"
    with torch.no_grad():
        cache = model(**{name: text[:CONTEXT][None]}, **inputs, use_cache=True)[CACHE]
    tokens = {name: text[CONTEXT:][None]}

    @torch.no_grad()
    def forward() -> float:
        synchronize(model)
        begin = time.perf_counter()
        model(**tokens, **inputs, **{CACHE: cache}, use_cache=True)
        synchronize(model)
        seconds = time.perf_counter() - begin
        cache.crop(-width)
        return seconds

    forward()
    return forward
