"""Laws on a CPU, each found when it is asked for: a chain is judged as far as its first rejected token, for one number a node, and of the tokens that
top-k and top-p leave few are ever looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
import torch
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .law import INFINITE, Law
from .nucleus import Cut, cut, largest, likely

ORDER = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
HOT = 1e6  # a division by more may underflow, which makes scores equal that are not near each other, and top-k leaves them all


@dataclass(frozen=True)
class Place:
    """The law at one node: p = mass / whole.

    tokens: int64 [m], ascending, the others have no probability; None: all, m = V. scores: float [m], before top-p. mass: float [m].
    left: the indices into `scores` that top-p and min-p leave; None without them. floor: the lowest score left. tied: whether a token was left out
    that has this score, too.
    """

    tokens: np.ndarray | None
    scores: np.ndarray
    mass: np.ndarray
    whole: np.floating
    left: np.ndarray | None = None
    floor: float = -inf
    tied: bool = False


class LazyLaw(Law):
    """Laws after transformers' temperature, top-k, top-p and min-p, in this order, each where there is one. What is left is what its warpers leave: where
    rounding decides, or some of several tokens with the same score are left by top-p and others are not, which only the warper's own sort tells, it is
    asked for that node.

    logits: float [B, n, V] on a CPU, what the first of `warpers` is given, in 16 bit, too. free: any of tokens with the same score will do, as for a
    draft, whose law is whatever it was drawn from.
    """

    on_host = True

    def __init__(self, logits: torch.Tensor, warpers: Sequence[LogitsProcessor], free: bool = False):
        self.logits, self.warpers, self.free, self.gumbel = logits, list(warpers), free, None
        self.dtype = torch.float32 if logits.dtype in INFINITE else logits.dtype
        temperature, top_k, self.top_p, self.min_p = (next((own for own in self.warpers if isinstance(own, kind)), None) for kind in ORDER)
        self.before = [own for own in (temperature, top_k) if own is not None]
        self.k = None if top_k is None or temperature is not None and temperature.temperature > HOT else top_k.top_k
        self.places: dict[tuple[int, int], Place | None] = {}
        self.warped: dict[tuple[int, int], torch.Tensor] = {}

    @staticmethod
    def takes(processors: Sequence[LogitsProcessor]) -> int:
        """How many of the last processors such a law stands for."""
        count, kinds = 0, list(ORDER)
        for processor in reversed(processors):
            if type(processor) not in kinds or getattr(processor, "filter_value", -inf) != -inf:
                break
            kinds, count = kinds[: kinds.index(type(processor))], count + 1
        return count

    @cached_property
    def scores(self) -> torch.Tensor:
        rows, nodes, vocab = self.logits.shape
        if self.top_p is None and self.min_p is None:
            return _through(self.before, _wide(self.logits).reshape(-1, vocab)).view(rows, nodes, vocab)
        return torch.stack([torch.stack([self._row(b, i) for i in range(nodes)]) for b in range(rows)])

    def prob_of_next(self, tokens: torch.Tensor) -> torch.Tensor:
        probs = [[self.prob(b, i, token) for i, token in enumerate(row)] for b, row in enumerate(tokens.tolist())]
        return torch.tensor(probs, dtype=self.dtype, device="cpu").view(tokens.shape)

    def prob_of(self, tokens: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        pairs = zip(tokens.tolist(), nodes.tolist())
        probs = [[self.prob(b, i, token) for token, i in zip(*pair)] for b, pair in enumerate(pairs)]
        return torch.tensor(probs, dtype=torch.float32, device="cpu").view(tokens.shape)

    def probs_at(self, node: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.from_numpy(self.probs(b, i)) for b, i in enumerate(node.tolist())])

    def prob(self, b: int, i: int, token: int) -> float:
        """p(token) at node i of row b."""
        place = self._place(b, i)
        if place is None:
            return float(self.probs(b, i)[token])
        if place.tokens is not None:
            at = int(np.searchsorted(place.tokens, token))
            if at == len(place.tokens) or place.tokens[at] != token:
                return 0.0
            token = at
        if place.tied and not self.free and place.scores[token] == place.floor:
            return float(self.probs(b, i)[token if place.tokens is None else place.tokens[token]])
        return float(place.mass[token] / place.whole)

    def probs(self, b: int, i: int) -> np.ndarray:
        """float [V]: the law at node i of row b, an array of its own."""
        place = self._known(b, i)
        if place is None:
            return self._warped(b, i).softmax(-1).numpy()
        return self._spread(place, place.mass / place.whole, 0.0)

    def _place(self, b: int, i: int) -> Place | None:
        """What is known of the node without the warpers' own way through the vocabulary."""
        if (b, i) not in self.places:
            self.places[b, i] = self._found(_wide(self.logits[b, i]))
        return self.places[b, i]

    def _found(self, row: torch.Tensor) -> Place | None:
        tokens = largest(row.numpy(), self.k) if self.k is not None else None
        scores = _through(self.before, (row if tokens is None else torch.from_numpy(row.numpy()[tokens]))[None])[0].numpy()
        own = Cut.all(scores) if self.top_p is None else cut(scores, self.top_p.top_p, self.top_p.min_tokens_to_keep)
        own = own if own is None or self.min_p is None else likely(own, self.min_p.min_p, self.min_p.min_tokens_to_keep)
        if own is None:
            return None
        if own.tokens is None:
            return Place(tokens, scores, own.mass, own.whole)
        mass = np.zeros_like(scores)
        mass[own.tokens] = own.mass
        return Place(tokens, scores, mass, own.whole, own.tokens, own.floor, own.tied)

    def _known(self, b: int, i: int) -> Place | None:
        """The node's place, where what is left of it is known to the token."""
        place = self._place(b, i)
        return None if place is None or place.tied and not self.free else place

    def _warped(self, b: int, i: int) -> torch.Tensor:
        """The warpers' own scores [V]."""
        if (b, i) not in self.warped:
            self.warped[b, i] = _through(self.warpers, _wide(self.logits[b, i : i + 1]))[0]
        return self.warped[b, i]

    def _row(self, b: int, i: int) -> torch.Tensor:
        place = self._known(b, i)
        if place is None:
            return self._warped(b, i)
        left = np.full_like(place.scores, -inf)
        left[place.left] = place.scores[place.left]
        return torch.from_numpy(self._spread(place, left, -inf))

    def _spread(self, place: Place, values: np.ndarray, other: float) -> np.ndarray:
        """[V]: a place's values [m], and `other` at tokens that it does not have."""
        if place.tokens is None:
            return values
        wide = np.full(self.logits.shape[-1], other, dtype=values.dtype)
        wide[place.tokens] = values
        return wide


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """In float32 where they have 16 bits, as in transformers' own loops."""
    return logits.float() if logits.dtype in INFINITE else logits


def _through(warpers: Sequence[LogitsProcessor], scores: torch.Tensor) -> torch.Tensor:
    for warper in warpers:
        scores = warper(None, scores)
    return scores
