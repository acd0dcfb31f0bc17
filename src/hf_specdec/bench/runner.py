"""Runs the contestants, interleaved in one process on the same prompts, and reduces what was measured to plain data."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from .. import __version__
from ..theory import speedup
from .arms import PLAIN, PLAIN_COMPILED, Answer, Arm
from .forks import Judge
from .meter import Cost, measured
from .prompts import Prompt, by_category


@dataclass
class Measurement:
    """One arm on one batch of prompts in one repetition."""

    cost: Cost
    answer: Answer

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.answer.tokens))

    def of_the_prompt_pass(self, arm: Arm) -> int | None:
        """Tokens that the prompt pass brought: one per row if decoding is plain, ours by its trace, else not known."""
        if self.answer.trace is not None:
            return sum(entry.committed for entry in self.answer.trace.rounds[0])
        return len(self.answer.tokens) if arm.name in (PLAIN, PLAIN_COMPILED) else None


@dataclass
class Cell:
    """All measurements of one arm in one category: runs[repetition][batch]."""

    arm: Arm
    runs: list[list[Measurement]] = field(default_factory=list)

    def speeds(self) -> list[float]:
        """Tokens per second of every repetition."""
        return [sum(m.new_tokens for m in run) / sum(m.cost.seconds for m in run) for run in self.runs]

    def all(self) -> list[Measurement]:
        return [m for run in self.runs for m in run]

    def decoding_speed(self) -> float | None:
        """Tokens per second after the prompt pass, without the tokens it brought; None where these are not known."""
        known = [m for m in self.all() if m.cost.target.seconds and m.of_the_prompt_pass(self.arm) is not None]
        seconds = sum(m.cost.seconds - m.cost.target.seconds[0] for m in known)
        tokens = sum(m.new_tokens - m.of_the_prompt_pass(self.arm) for m in known)
        return tokens / seconds if seconds > 0 else None


def plan(prompts: list[Prompt], arms: list[Arm], batch: int, repetitions: int) -> int:
    """How many calls `run_benchmark` is going to measure."""
    batches = sum(-(-len(group) // batch) for group in by_category(prompts).values())
    return len(_able(arms, batch)) * batches * repetitions


def _able(arms: list[Arm], batch: int) -> list[Arm]:
    return [arm for arm in arms if arm.max_batch is None or arm.max_batch >= batch]


def run_benchmark(
    model,
    tokenizer,
    prompts: list[Prompt],
    arms: list[Arm],
    *,
    max_new_tokens: int = 100,
    repetitions: int = 3,
    batch: int = 1,
    clock: str = "wall",
    step: Callable[..., None] = lambda *_: None,
) -> dict[str, Any]:
    """Measure every arm on every category of `prompts`; the first arm has to be plain greedy generation.

    The arms take turns on each batch, in an order that rotates from repetition to repetition; one batch is run beforehand to
    warm up. Arms whose `max_batch` is below `batch` are left out by name. step(note): called after every measured call.
    """
    skipped = [arm.name for arm in arms if arm not in _able(arms, batch)]
    arms = _able(arms, batch)
    groups = {name: _batches(tokenizer, group, batch) for name, group in by_category(prompts).items()}
    warm = next(iter(groups.values()))[0]
    for arm in arms:
        arm.run(warm, 8)
    table = {category: [Cell(arm) for arm in arms] for category in groups}
    for category, cells in table.items():
        for repetition in range(repetitions):
            _repetition(model, category, cells, groups[category], repetition, max_new_tokens, clock, step)
    judge = Judge(model)  # may copy the model: only now, so that no measured memory contains it
    results = [_reduce(name, cell, cells[0], groups[name], judge) for name, cells in table.items() for cell in cells]
    settings = {
        "max_new_tokens": max_new_tokens,
        "repetitions": repetitions,
        "batch": batch,
        "clock": clock,
        "skipped": skipped,
        "prompts": {name: sum(map(len, batches)) for name, batches in groups.items()},
    }
    return {"environment": environment(model), "settings": settings, "results": results}


def _batches(tokenizer, prompts: list[Prompt], size: int) -> list[list[list[int]]]:
    ids = [prompt.ids(tokenizer) for prompt in prompts]
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def _repetition(model, category: str, cells: list[Cell], batches, repetition: int, max_new_tokens: int, clock: str, step):
    for cell in cells:
        cell.runs.append([])
    for number, batch in enumerate(batches):
        turn = (repetition + number) % len(cells)
        for cell in cells[turn:] + cells[:turn]:
            with measured(cell.arm.target or model, cell.arm.draft, clock, hooks=not cell.arm.compiled) as cost:
                answer = cell.arm.run(batch, max_new_tokens)
            if cell.arm.compiled and answer.trace is not None and clock == "wall":  # the loop's clock
                cost.read(answer.trace)
            cell.runs[-1].append(Measurement(cost, answer))
            step(f"{category}: {cell.arm.name}")


def _reduce(category: str, cell: Cell, plain: Cell, batches, judge: Judge) -> dict[str, Any]:
    """The row of the report for one arm in one category."""
    speeds, base = cell.speeds(), plain.speeds()
    ratios = [own / other for own, other in zip(speeds, base)]
    equal, forks = _compare(cell, plain, batches, judge)
    row = {
        "category": category,
        "arm": cell.arm.name,
        "tokens_per_second": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "speed_up": statistics.median(ratios),
        "speed_up_range": [min(ratios), max(ratios)],
        "decoding_speed_up": _ratio(cell.decoding_speed(), plain.decoding_speed()),
        "new_tokens": sum(m.new_tokens for m in cell.runs[0]),
        "outside_forwards": _mean(m.cost.outside for m in cell.all()),
        "peak_memory": max((m.cost.peak_memory for m in cell.all() if m.cost.peak_memory), default=None),
        "equal": equal,
        "outputs": len(forks) + equal,
        "forks": forks,
    }
    return row | _speculation(cell, plain)


def _speculation(cell: Cell, plain: Cell) -> dict[str, Any]:
    """Block efficiency, acceptance and predicted speed-up after the prompt pass.

    Where our trace is at hand, alpha is accepted / judged drafted tokens (a round is judged up to its first rejection), c
    the cost of drafting one token over a plain step of the target, width_cost that of a target pass over a plain step.
    `predicted` is Leviathan et al. 2023, Theorem 3.8, which takes a wide pass to cost no more than a narrow one;
    `predicted_width` has the measured cost in it. Elsewhere only what the forwards show is known.
    """
    measurements = cell.all()
    traces = [m.answer.trace for m in measurements if m.answer.trace is not None]
    if not traces:
        forwards = sum(len(m.cost.target.seconds) for m in measurements)
        rows = sum(sum(map(len, m.answer.tokens)) / len(m.answer.tokens) for m in measurements)
        speculative = cell.arm.name not in (PLAIN, PLAIN_COMPILED) and forwards
        return {"block_efficiency": rows / forwards if speculative else None}
    rounds = [entry for trace in traces for entries in trace.rounds for entry in entries]
    accepted, proposed = sum(r.accepted for r in rounds), sum(r.proposed for r in rounds)
    judged = accepted + sum(r.accepted < min(r.proposed, r.committed) for r in rounds)  # a text that ended in its draft has rejected nothing
    plain_step = _mean(m.cost.target.mean() for m in plain.all())
    width_cost = _ratio(_mean(m.cost.target.mean() for m in measurements), plain_step)
    drafted = sum(max((entry.proposed for entry in entries), default=0) for trace in traces for entries in trace.rounds[1:])  # of which the seconds are
    c = sum(trace.seconds["draft"] for trace in traces) / drafted / plain_step if drafted and plain_step else 0.0
    k = proposed / len(rounds) if rounds else 0.0
    alpha = accepted / judged if judged else 0.0
    return {
        "block_efficiency": sum(r.committed for r in rounds) / len(rounds) if rounds else None,
        "acceptance_rate": accepted / proposed if proposed else None,
        "alpha": alpha if judged else None,
        "mean_k": k,
        "c": c,
        "width_cost": width_cost,
        "predicted": predicted(alpha, k, c, lambda width: 1.0),
        "predicted_width": None if width_cost is None else predicted(alpha, k, c, lambda width: width_cost),
    }


def predicted(alpha: float, k: float, c: float, width_cost: Callable[[int], float]) -> float:
    """Theorem 3.8 of Leviathan et al. 2023, with the cost of a pass of any width, at a mean K, which need not be whole: interpolated between its neighbours."""
    low, part = int(k), k - int(k)
    shares = {low: 1 - part, low + 1: part} if part else {low: 1.0}
    return sum(share * speedup(alpha, n, c, width_cost) for n, share in shares.items())


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _compare(cell: Cell, plain: Cell, batches, judge: Judge) -> tuple[int, list[dict]]:
    """Outputs of the first repetition against plain generate: how many are equal, and every fork explained."""
    forks, equal = [], 0
    for number, (prompts, own, other) in enumerate(zip(batches, cell.runs[0], plain.runs[0])):
        for row, (prompt, ours, theirs) in enumerate(zip(prompts, own.answer.tokens, other.answer.tokens)):
            fork = judge.fork(prompt, theirs, ours)
            equal += fork is None
            if fork is not None:
                forks.append({"batch": number, "row": row, **fork.to_dict()})
    return equal, forks


def environment(model) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "model": model.config.name_or_path.rstrip("/").rsplit("/", 1)[-1] or type(model).__name__,
        "parameters": _parameters(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "attention": getattr(model.config, "_attn_implementation", None),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_specdec": __version__,
    }


def _parameters(model) -> int:
    """All weights, shared ones once; of an MX layer those that its bytes stand for."""
    from ..mx.linear import MXMatrix

    layers = [module for module in model.modules() if isinstance(module, MXMatrix)]
    stored = {id(tensor) for layer in layers for tensor in (layer.weight, layer.weight_scale)}
    return sum(p.numel() for p in model.parameters() if id(p) not in stored) + sum(layer.out_features * layer.in_features for layer in layers)


def _mean(values) -> float | None:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else None
