"""Laws of nucleus sampling (top-p; Holtzman et al. 2020, section 3.1), found among the few tokens that can be in them: sorting the vocabulary is most
of what such a law costs on a CPU, and one node after another is asked for one number only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite

import numpy as np
import torch
from transformers import TopPLogitsWarper

from .law import Law

NEAR = 1e-5  # a sum of probabilities so near to what top-p leaves out may be on either side of it, as it was rounded


@dataclass(frozen=True)
class Cut:
    """What is left of one node's scores.

    tokens: int64 [m], by score, the least likely first. probs: float32 [m]. floor: the lowest score left. top: the highest.
    mass: sum over what is left of exp(score - top). tied: whether a token was left out that has the lowest score, too.
    """

    tokens: np.ndarray
    probs: np.ndarray
    floor: float
    top: float
    mass: float
    tied: bool


def cut(scores: np.ndarray, top_p: float, least: int) -> Cut | None:
    """The fewest of the likeliest tokens, `least` at least, that have top_p of the probability together; scores float32 [V]. None where the sums
    come so near to top_p that rounding decides."""
    top, gone = float(scores.max()), 1 - top_p
    if not isfinite(top):
        return None
    mass = np.exp(scores - np.float32(top))
    whole = float(mass.sum())
    likely = np.flatnonzero(mass > gone / (2 * len(scores)) * whole)  # the others have half of what is left out at most
    order = likely[np.argsort(scores[likely], kind="stable")]
    own = mass[order]
    above = np.cumsum(own[::-1], dtype=np.float64)[::-1]
    below = (whole - above + own) / whole
    first = min(int(np.searchsorted(below, gone, side="right")), len(order) - least)
    if first < 0 or np.abs(below - gone).min() < NEAR:
        return None
    floor = float(scores[order[first]])
    tied = first > 0 and float(scores[order[first - 1]]) == floor
    return Cut(order[first:], own[first:] / np.float32(above[first]), floor, top, float(above[first]), tied)


class Nucleus(Law):
    """Laws after top-p. They are those of transformers' warper: where rounding decides, or some of several tokens with the same score are left
    and others are not, which only the warper's own sort tells, it is asked for that node.

    before: float32 [B, n, V] on a CPU, what the warper is given. free: any of tokens with the same score will do, as for a draft, whose law is
    whatever it was drawn from.
    """

    def __init__(self, before: torch.Tensor, warper: TopPLogitsWarper, free: bool = False):
        self.before, self.warper, self.free = before, warper, free
        self.cuts: dict[tuple[int, int], Cut | None] = {}
        self.warped: dict[tuple[int, int], torch.Tensor] = {}

    @staticmethod
    def fits(warper, scores: torch.Tensor) -> bool:
        """Whether this is top-p on a CPU, as transformers has it."""
        return type(warper) is TopPLogitsWarper and warper.filter_value == -inf and scores.device.type == "cpu" and scores.dtype == torch.float32

    @cached_property
    def scores(self) -> torch.Tensor:
        rows, nodes, _ = self.before.shape
        return torch.stack([torch.stack([self._row(b, i) for i in range(nodes)]) for b in range(rows)])

    @property
    def ranking(self) -> torch.Tensor:
        return self.scores

    def prob_of_next(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.prob_of(tokens, torch.arange(tokens.shape[1]).expand(len(tokens), -1))

    def prob_of(self, tokens: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        pairs = zip(tokens.tolist(), nodes.tolist())
        return torch.tensor([[self._prob(b, i, token) for token, i in zip(*pair)] for b, pair in enumerate(pairs)], dtype=torch.float32).view(tokens.shape)

    def probs_at(self, node: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._probs(b, i) for b, i in enumerate(node.tolist())])

    def _cut(self, b: int, i: int) -> Cut | None:
        if (b, i) not in self.cuts:
            self.cuts[b, i] = cut(self.before[b, i].numpy(), self.warper.top_p, self.warper.min_tokens_to_keep)
        return self.cuts[b, i]

    def _warped(self, b: int, i: int) -> torch.Tensor:
        """The warper's own scores [V]."""
        if (b, i) not in self.warped:
            self.warped[b, i] = self.warper(None, self.before[b, i : i + 1])[0]
        return self.warped[b, i]

    def _known(self, b: int, i: int) -> Cut | None:
        """What is left at the node, where it is known to the token."""
        found = self._cut(b, i)
        return None if found is None or found.tied and not self.free else found

    def _prob(self, b: int, i: int, token: int) -> float:
        found, score = self._cut(b, i), float(self.before[b, i, token])
        if found is None or found.tied and score == found.floor:
            return float(self._probs(b, i)[token])
        return float(np.exp(np.float32(score - found.top))) / found.mass if score >= found.floor else 0.0

    def _probs(self, b: int, i: int) -> torch.Tensor:
        found = self._known(b, i)
        if found is None:
            return self._warped(b, i).softmax(-1)
        probs = torch.zeros(self.before.shape[-1])
        probs.numpy()[found.tokens] = found.probs
        return probs

    def _row(self, b: int, i: int) -> torch.Tensor:
        found = self._known(b, i)
        if found is None:
            return self._warped(b, i)
        left = torch.full_like(self.before[b, i], -inf)
        left.numpy()[found.tokens] = self.before[b, i].numpy()[found.tokens]
        return left
