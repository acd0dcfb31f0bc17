"""What K "auto" costs and brings in a batch, by simulation: the schedule itself, prompt lookup's evidence and acceptance drawn at random, a
clock with noise. Nothing is generated.

    python benchmarks/batch_schedule.py

Speed over plain decoding, in rounds: a plain round costs 1, a drafted token c per row of the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import typer
from rich.console import Console
from rich.table import Table

from hf_specdec.drafts import PromptLookupDraft
from hf_specdec.schedule import AutoSchedule

STRENGTHS = (-1, 1, 2, 3, 4, 6, 8)
PRIOR = PromptLookupDraft().prior
# name -> acceptance of the first and of a later token by strength of the match, and how often each strength comes
TEXTS: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "chat": (lambda strength: (0.1, 0.4) if strength < 3 else (0.3, 0.5), (25, 55, 12, 5, 2, 1, 0)),
    "mixed": (PRIOR, (20, 30, 15, 10, 10, 8, 7)),
    "copying": (lambda strength: (0.9, 0.95), (5, 10, 10, 15, 20, 20, 20)),
}
BATCHES = {2: 0.03, 5: 0.032, 8: 0.04, 16: 0.05}  # rows -> c


def speed(text: str, rows: int, c: float, tokens: int, seed: int) -> float:
    """Speed over plain decoding of one simulated call."""
    rates, frequencies = TEXTS[text]
    rng, schedule = random.Random(seed), AutoSchedule(10, None, True, PRIOR)
    left, spent, rounds = [tokens] * rows, 0.0, 0
    while any(left):
        active = [row for row in range(rows) if left[row]]
        evidence = rng.choices(STRENGTHS, frequencies, k=len(active))
        asked = schedule.next_k(evidence, [left[row] for row in active])
        accepted = []
        for strength, k in zip(evidence, asked):
            first, later = rates(strength)
            own = 0
            while own < k and rng.random() < (later if own else first):
                own += 1
            accepted.append(own)
        cost = 1 + c * max(asked) * len(active)
        schedule.observe(asked, accepted, cost * rng.uniform(0.93, 1.1) if rounds else None)
        spent, rounds = spent + cost, rounds + 1
        for row, own in zip(active, accepted):
            left[row] -= min(own + 1, left[row])
    return tokens / spent


def main(tokens: int = 64, runs: int = 40):
    """Print the mean speed over plain decoding for every kind of text and batch."""
    table = Table("text", *(f"{rows} rows" for rows in BATCHES), title=f"{tokens} tokens, {runs} runs")
    for text in TEXTS:
        table.add_row(text, *(f"{sum(speed(text, rows, c, tokens, seed) for seed in range(runs)) / runs:.3f}x" for rows, c in BATCHES.items()))
    Console(highlight=False, width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
