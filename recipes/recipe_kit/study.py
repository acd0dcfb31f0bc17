"""`Study`: a recipe about acceptance. Rows of (draft, temperature, lenience), each run beside plain decoding at that temperature, with
alpha beside the paper's and the speed-up beside the one that theory predicts."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import hf_specdec
from hf_specdec.bench.arms import Answer, answered
from hf_specdec.bench.meter import measured
from hf_specdec.theory import expected_tokens

from .running import FirstPass, timed_forward
from .store import Store
from .summary import decoding, drafting, interpolated, judged_in

PLAIN = {False: "plain T=0", True: "plain T=1"}
PAPER = "Leviathan et al. 2023"


@dataclass(frozen=True)
class Row:
    """One line of the table. draft: a name in `Material.drafts`. sample: temperature 1, else greedy. k: tokens drafted per round.
    lenience: l of A.5. paper: the alpha that the paper has for it, if any; paper_k, paper_c, paper_speed_up: its gamma, c and measured speed-up."""

    draft: str
    sample: bool
    k: int
    lenience: float = 1.0
    paper: float | None = None
    paper_k: int | None = None
    paper_c: float | None = None
    paper_speed_up: float | None = None

    @property
    def key(self) -> str:
        return f"{self.draft}, T={int(self.sample)}, l={self.lenience:g}, K={self.k}"


@dataclass
class Material:
    """What a study runs on. drafts: name -> function (the target's own greedy tokens, seed) -> a Draft or model for one call.
    models: name -> draft model, where there is one. prompts: name -> token ids. notes: lines for the report."""

    target: Any
    drafts: dict[str, Callable[[list[int], int], Any]]
    models: dict[str, Any]
    prompts: dict[str, list[int]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Study:
    """rows, material, settings, names: functions of the options. material(options, names) builds or loads, and checks the memory
    before. settings: what goes into the JSON beside the common ones. label: scale -> what the figures stand on. k: tokens drafted per
    round by default; None: as the rows say. k_of: of which rows, where not of all. dtypes: scale -> the default where it is not float32. variant: options -> a part of the file's
    name. no_shape: why there is no shape scale, where there is none."""

    name: str
    title: str
    paper: str
    label: dict[str, str]
    new_tokens: dict[str, int]
    rows: Callable[[argparse.Namespace], list[Row]]
    names: Callable[[argparse.Namespace], list[str]]
    material: Callable[[argparse.Namespace, list[str]], Material]
    arguments: Callable[[argparse.ArgumentParser], None]
    check: Callable[[argparse.Namespace], None]
    settings: Callable[[argparse.Namespace], dict[str, Any]]
    remarks: tuple[str, ...] = ()
    k: int | None = 5
    k_of: str = ""
    dtypes: dict[str, str] = field(default_factory=dict)
    variant: Callable[[argparse.Namespace], str] = lambda options: ""
    no_shape: str = ""

    @property
    def scales(self) -> list[str]:
        return list(self.label)


class StudyRunner:
    """Fills a `Store`, prompt by prompt: both plain runs, then the rows, forwards and backwards by turns."""

    def __init__(self, study: Study, options, names: list[str], store: Store, step: Callable[[str], None]):
        self.study, self.options, self.names, self.store, self.step = study, options, names, store, step
        self.rows = study.rows(options)

    def missing(self) -> list[tuple[int, str, Row | bool]]:
        """(repetition, prompt, row, or False and True for the plain runs without and with sampling)."""
        todo: list[tuple[int, str, Row | bool]] = []
        for repetition in range(self.options.repetitions):
            for number, name in enumerate(self.names):
                turn = self.rows if (repetition + number) % 2 == 0 else self.rows[::-1]
                both = sorted({False} | {row.sample for row in self.rows})  # greedy always: what a simulated draft proposes from
                todo += [(repetition, name, one) for one in [*both, *turn] if self.store.find(repetition, name, key_of(one)) is None]
        return todo

    def run(self) -> None:
        """All that is missing; models are built only if something is."""
        todo = self.missing()
        if not todo and self.store.data["costs"]:
            return
        material = self.study.material(self.options, self.names)
        self.store.data["notes"] = material.notes
        hf_specdec.enable(material.target)
        first = next(iter(material.prompts.values()))[:4]
        for one in [False, *self.rows]:  # warm up: kernels are built and pages touched before anything is timed
            self._generate(one, material, first, 3, [0] * 64, 0)
        if not self.store.data["costs"]:
            self._costs(material)
        for repetition, name, one in todo:
            self._measure(repetition, name, one, material)

    def _measure(self, repetition: int, name: str, one: Row | bool, material: Material) -> None:
        seed = repetition * len(self.names) + self.names.index(name)
        greedy = self.store.find(repetition, name, PLAIN[False])
        prompt = material.prompts[name]
        with measured(material.target) as cost, FirstPass(material.target) as first:
            answer = self._generate(one, material, prompt, self.options.new_tokens, greedy["tokens"] if greedy else [], seed)
        trace = answer.trace
        rounds = [[e.proposed, e.accepted, e.committed] for entries in trace.rounds for e in entries] if trace else []
        self.store.add({
            "repetition": repetition, "prompt": name, "run": key_of(one), "seconds": cost.seconds, "prompt_seconds": first.seconds,
            "prompt_new_tokens": rounds[0][2] if rounds else 1, "draft_seconds": trace.seconds["draft"] if trace else 0.0,
            "lossless": trace.lossless if trace else True, "rounds": rounds, "tokens": answer.tokens[0],
        })  # fmt: skip
        self.step(f"{name}: {key_of(one)}")

    def _generate(self, one: Row | bool, material: Material, prompt: list[int], new: int, greedy: list[int], seed: int) -> Answer:
        extra = {}
        if isinstance(one, Row):
            speculative = {"num_assistant_tokens": one.k, "lenience": one.lenience, "seed": seed}
            extra = {"speculative": speculative, "assistant_model": material.drafts[one.draft](greedy, seed)}
        sample = one.sample if isinstance(one, Row) else one
        chosen = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
        torch.manual_seed(seed)
        return answered(material.target, [prompt], new, **chosen, **extra)

    def _costs(self, material: Material) -> None:
        """Medians of the seconds of single forwards, by turns: the target over one token and over K + 1, the drafts over one."""
        widths = sorted({1} | {row.k + 1 for row in self.rows})
        runs = {f"target {width}": timed_forward(material.target, width) for width in widths}
        runs |= {name: timed_forward(model, 1) for name, model in material.models.items()}
        seconds: dict[str, list[float]] = {key: [] for key in runs}
        end = time.monotonic() + 20
        while len(seconds["target 1"]) < 3 or (len(seconds["target 1"]) < self.options.cost_repetitions and time.monotonic() < end):
            for key, forward in random.sample(list(runs.items()), len(runs)):  # no order, which a busy machine's time slices could fall in with
                seconds[key].append(forward())
        self.store.data["costs"] = {key: statistics.median(values) for key, values in seconds.items()}
        self.store.save()


def key_of(one: Row | bool) -> str:
    return one.key if isinstance(one, Row) else PLAIN[one]


# --- from runs to figures -----------------------------------------------------------------------------------------------


def summarise(rows: list[Row], data: dict[str, Any]) -> list[dict[str, Any]]:
    return [_figures(row, data) for row in rows]


def _figures(row: Row, data: dict[str, Any]) -> dict[str, Any]:
    runs, plain = ([run for run in data["runs"] if run["run"] == key] for key in (row.key, PLAIN[row.sample]))
    rounds = [entry for run in runs for entry in run["rounds"]]
    proposed, accepted, committed = (sum(entry[i] for entry in rounds) for i in range(3))
    judged, mean_k = judged_in(rounds), proposed / len(rounds)
    alpha = accepted / judged if judged else 0.0
    costs, one = data["costs"], data["costs"]["target 1"]
    step = costs[row.draft] if row.draft in costs else drafting(runs)
    speeds = [decoding(some) for some in (runs, plain)]
    known = {(run["repetition"], run["prompt"]): run["tokens"] for run in plain}
    return {
        "draft": row.draft, "temperature": int(row.sample), "lenience": row.lenience, "k": row.k, "paper_alpha": row.paper,
        "paper_k": row.paper_k, "paper_c": row.paper_c, "paper_speed_up": row.paper_speed_up,
        "alpha": alpha if judged else None, "judged": judged, "acceptance_is": data["acceptance"]["kind"],
        "block_efficiency": committed / len(rounds), "expected": expected_tokens(alpha, row.k), "mean_k": mean_k,
        "c": step / one, "width_cost": costs[f"target {row.k + 1}"] / one,
        "speed_up": speeds[0] / speeds[1] if all(speeds) else None,
        "predicted": interpolated(alpha, mean_k, step / one, costs[f"target {row.k + 1}"] / one, row.k),
        "lossless": all(run["lossless"] for run in runs), "outputs": len(runs),
        "equal_to_plain": None if row.sample else sum(known[run["repetition"], run["prompt"]] == run["tokens"] for run in runs),
    }  # fmt: skip
