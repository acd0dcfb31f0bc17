"""What K "auto" costs and brings in a batch, by simulation: the schedule itself, prompt lookup's evidence and acceptance drawn at random, a
clock with noise. Nothing is generated.

    python benchmarks/batch_schedule.py
    python benchmarks/batch_schedule.py --tokens 64
    python benchmarks/batch_schedule.py --slow --tokens 64 --runs 200      # one row, and first rounds that the clock shows as slower than they are

Speed over plain decoding, in rounds: a plain round costs 1, a drafted token c per row of the batch, but no more than a plain round: a pass over k
tokens more per row is no dearer than k passes.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import typer
from rich.console import Console
from rich.table import Table

from hf_specdec.drafts import PromptLookupDraft
from hf_specdec.schedule import AutoSchedule

STRENGTHS = (-1, 1, 2, 3, 4, 6, 10)
PRIOR = PromptLookupDraft().prior
Rates, Kind = Callable[[int], tuple[float, float]], tuple[Callable, tuple[int, ...]]
# acceptance of the first and of a later token by strength of the match, and how often each strength comes
CHAT: Kind = (lambda strength: (0.1, 0.4) if strength < 3 else (0.3, 0.5), (25, 55, 12, 5, 2, 1, 0))
MIXED: Kind = (PRIOR, (20, 30, 15, 10, 10, 8, 7))
COPYING: Kind = (lambda strength: (0.9, 0.95), (5, 10, 10, 15, 20, 20, 20))
MISLED: Kind = (lambda strength: (0.05, 0.3), (15, 25, 20, 15, 10, 10, 5))  # long matches that lead nowhere
TEXTS = {  # by row, in turns
    "chat": [CHAT], "misled": [MISLED], "one copies": [COPYING] + [CHAT] * 15, "half copies": [COPYING, CHAT], "mixed": [MIXED], "copying": [COPYING],
}
BATCHES = (1, 2, 4, 8, 16)
COSTS = (0.01, 0.03, 0.06, 0.12)


def speed(text: str, rows: int, c: float, tokens: int, seed: int, make: Callable = AutoSchedule) -> float:
    """Speed over plain decoding of one simulated call."""
    kinds = [TEXTS[text][row % len(TEXTS[text])] for row in range(rows)]
    rng, schedule = random.Random(seed), make(16, 0.0, True, PRIOR)
    left, spent, rounds = [tokens] * rows, 0.0, 0
    while any(left):
        active = [row for row in range(rows) if left[row]]
        evidence = [rng.choices(STRENGTHS, kinds[row][1])[0] for row in active]
        asked = schedule.next_k(evidence, [left[row] for row in active])
        proposed = [min(k, strength * strength + 1) if strength >= 0 else 0 for strength, k in zip(evidence, asked)]
        accepted = []
        for row, strength, k in zip(active, evidence, proposed):
            first, later = kinds[row][0](strength)
            own = 0
            while own < k and rng.random() < (later if own else first):
                own += 1
            accepted.append(own)
        cost = 1 + min(c * len(active), 1.0) * max(proposed)
        schedule.observe(proposed, accepted, cost * rng.uniform(0.93, 1.1) if rounds else None)
        spent, rounds = spent + cost, rounds + 1
        for row, own in zip(active, accepted):
            left[row] -= min(own + 1, left[row])
    return tokens / spent


SLOW = {"what they took": (), "5 times as much of the first": (5,), "3 times as much of the first and third": (3, 1, 3),
        "3 times as much of the first two (the second is a plain one)": (3, 3)}
ROWS = {"acceptance 0.7": (0.7, 0.05), "acceptance 0.02": (0.02, 0.05), "acceptance 0.3, a token costs 0.3 of a step": (0.3, 0.3)}


def after_slow_rounds(slow: tuple[float, ...], alpha: float, c: float, tokens: int, seed: int) -> float:
    """Speed over plain decoding of one row whose rounds cost 1 + c K and of whose first timed ones the clock shows `slow` times as much; later, thrice
    as much of one in twenty."""
    rng, schedule, left, spent, clock = random.Random(seed), AutoSchedule(16, None), tokens, 0.0, iter(slow)
    schedule.next_k([0], [left])
    schedule.observe([0], [0], None)
    while left > 0:
        k, taken = schedule.next_k([0], [left])[0], 0
        while taken < k and rng.random() < alpha:
            taken += 1
        shown = (1 + c * k) * rng.lognormvariate(0, 0.03)
        factor = next(clock, 0)
        shown *= factor or (3 if rng.random() < 0.05 else 1)
        schedule.observe([k], [taken], shown)
        spent, left = spent + 1 + c * k, left - taken - 1
    return tokens / spent


def main(tokens: int = 48, runs: int = 40, slow: bool = False):
    """Print the mean speed over plain decoding for every kind of text, batch and cost, the least of them, and the slowest single call."""
    if slow:
        table = Table("the clock shows of the first timed rounds", *ROWS, title=f"{tokens} tokens, {runs} runs")
        for name, factors in SLOW.items():
            means = [sum(after_slow_rounds(factors, alpha, c, tokens, seed) for seed in range(runs)) / runs for alpha, c in ROWS.values()]
            table.add_row(name, *(f"{mean:.2f}x" for mean in means))
        Console(highlight=False, width=150).print(table)
        return
    means: dict[tuple, float] = {}
    singles: dict[tuple, float] = {}
    for c in COSTS:
        table = Table("text", *(f"{rows} row{'s' * (rows > 1)}" for rows in BATCHES), title=f"c = {c}, {tokens} tokens, {runs} runs")
        for text in TEXTS:
            for rows in BATCHES:
                own = [speed(text, rows, c, tokens, seed) for seed in range(runs)]
                means[text, rows, c], singles[text, rows, c] = sum(own) / runs, min(own)
            table.add_row(text, *(f"{means[text, rows, c]:.3f}x" for rows in BATCHES))
        Console(highlight=False, width=100).print(table)
    for name, values in (("least mean", means), ("slowest call", singles)):
        text, rows, c = min(values, key=values.get)
        print(f"{name}: {values[text, rows, c]:.3f}x ({text}, {rows} rows, c = {c})")


if __name__ == "__main__":
    typer.run(main)
