"""The few tokens that top-k, top-p (nucleus sampling; Holtzman et al. 2020, section 3.1) and min-p leave of a vocabulary, found without sorting it, which is most
of what such a law costs on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isnan

import numpy as np
import torch

NEAR = 1e-5  # a sum of probabilities so near to what top-p leaves out may be on either side of it, as it was rounded
HALVINGS, DEPTH = 12, 24.0  # of the search for the lowest score left, found to 0.006, and how far below the highest it goes: each takes time to compile
LARGE = 1e38  # scores below minus this are masks, not scores, and what is subtracted from them may overflow
COLUMNS = 512  # of the table whose columns' largest entries tell where the k-th largest lies, at least


@dataclass(frozen=True)
class Cut:
    """What is left of one node's scores.

    tokens: int64 [m], None: all. mass: float [m], exp(score - top), top the highest score. whole: their sum. ties: int64 [t], the tokens with the lowest
    score left, where some of them are left out; None where none is.
    """

    tokens: np.ndarray | None
    mass: np.ndarray
    whole: np.floating
    ties: np.ndarray | None = None

    @classmethod
    def all(cls, scores: np.ndarray) -> Cut | None:
        """Everything, scores float [V]; None where there is no law."""
        top = scores.max()
        if not isfinite(top):
            return None
        mass = scores - top
        np.exp(mass, out=mass)
        return cls(None, mass, mass.sum())


def cut(scores: np.ndarray, top_p: float, least: int) -> Cut | None:
    """Top-p: the fewest of the likeliest tokens, `least` at least, that have top_p of the probability together; scores float [V]. None where the sums
    come so near to top_p that rounding decides."""
    every, gone = Cut.all(scores), 1 - top_p
    if every is None:
        return None
    mass, whole = every.mass, float(every.whole)
    for share in (1e-3, 1e-5, gone / (2 * len(scores))):  # of the last, the others have half of what is left out at most
        near = np.flatnonzero(mass > share * whole)
        if len(near) >= least and mass[near].sum() > (top_p + 2 * NEAR) * whole:
            break
    order = near[np.argsort(scores[near], kind="stable")]
    own = mass[order]
    above = np.cumsum(own[::-1], dtype=np.float64)[::-1]
    below = (whole - above + own) / whole
    first = min(int(np.searchsorted(below, gone, side="right")), len(order) - least)
    if first < 0 or np.abs(below - gone).min() < NEAR:
        return None
    lowest = scores[order[first]]
    tied = first > 0 and scores[order[first - 1]] == lowest
    return Cut(order[first:], own[first:], scores.dtype.type(above[first]), near[scores[near] == lowest] if tied else None)


def likely(left: Cut, min_p: float, least: int) -> Cut | None:
    """Min-p: of what is left, the tokens with min_p of the likeliest one's probability. None where rounding decides, and where they are fewer than `least`."""
    kept = np.flatnonzero(left.mass >= min_p * (1 - NEAR))
    mass = left.mass[kept]
    if len(kept) < least or len(kept) and mass.min() < min_p * (1 + NEAR):
        return None
    return Cut(kept if left.tokens is None else left.tokens[kept], mass, mass.sum(), left.ties if len(kept) == len(left.mass) else None)


def within(scores: np.ndarray, depth: float) -> np.ndarray | None:
    """int64 [m], ascending: the tokens at most `depth` below the highest of scores [V], and some that division might round to that; None for masks and
    numbers that are none."""
    top = float(scores.max())
    return np.flatnonzero(scores >= top - depth - (abs(top) + depth) * 2.0**-20) if abs(top) < LARGE else None


def largest(scores: np.ndarray, k: int) -> np.ndarray | None:
    """int64 [m], ascending: the tokens with the k largest of scores [V] and all that come near to the last of these, so that none is missed which a
    division rounds to the same score. None where that is no short way."""
    columns = max(COLUMNS, 4 * k)
    table = scores[: len(scores) // columns * columns].reshape(-1, columns)
    if len(table) < 4:
        return None
    highest, rest = table.max(0), scores[table.size :]
    floor = float(np.partition(highest, columns - k)[columns - k])  # k columns have a score so high
    if not abs(floor) < LARGE or isnan(highest.max()) or len(rest) and isnan(rest.max()):
        return None
    return np.flatnonzero(scores >= floor - abs(floor) * 2.0**-20 - 1e-30)


class Bisection:
    """Top-p inside a compiled draft: the lowest score left is searched by halving, with no sort of the vocabulary. All tokens with scores as high are
    left, and some that are lower by less than DEPTH / 2**HALVINGS; a draft's law is whatever it was drawn from. top_p: float or a tensor []."""

    def __init__(self, top_p: float | torch.Tensor):
        self.top_p = top_p

    def __call__(self, input_ids: None, scores: torch.Tensor) -> torch.Tensor:
        """Scores [B, V] with minus infinity for what is not left."""
        below = scores - scores.amax(-1, keepdim=True)
        mass = below.exp()
        goal = self.top_p * mass.sum(-1, keepdim=True)
        low, high = torch.full_like(goal, -DEPTH), torch.zeros_like(goal)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            enough = torch.where(below >= middle, mass, 0.0).sum(-1, keepdim=True) >= goal
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        return scores.masked_fill(below < low, -torch.inf)
