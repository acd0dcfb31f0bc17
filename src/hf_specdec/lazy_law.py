"""Laws on a CPU, each found when it is asked for: a chain is judged as far as its first rejected token, for one number a node, and of the tokens that
top-k and top-p leave few are ever looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, log

import numpy as np
import torch
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .law import INFINITE, Law, drawn, wide
from .nucleus import NEAR, Cut, cut, largest, likely, within

ORDER = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
HOT = 1e6  # a division by more may underflow, which makes scores equal that are not near each other, and top-k leaves them all


@dataclass(frozen=True)
class Place:
    """The law at one node: p = mass / whole.

    tokens: int64 [m], ascending, the others have no probability; None: all, m = V. scores, mass: float [m]. ties: int64 [t], the tokens with the lowest
    score left, where some of them are left out: some are, which of them the warper knows; None where none is.
    """

    tokens: np.ndarray | None
    scores: np.ndarray
    mass: np.ndarray
    whole: np.floating
    ties: np.ndarray | None = None

    def at(self, token: int) -> int | None:
        """The token's index; None where it has no probability."""
        if self.tokens is None:
            return token
        at = int(np.searchsorted(self.tokens, token))
        return at if at < len(self.tokens) and self.tokens[at] == token else None


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
        heat = 1.0 if temperature is None else temperature.temperature
        self.k = None if top_k is None or heat > HOT else top_k.top_k
        alone = top_k is None and self.top_p is None and self.min_p is not None and self.min_p.min_p > 0 and heat <= HOT
        self.depth = heat * (2 * NEAR - log(self.min_p.min_p)) if alone else None  # how far below the highest logit min-p leaves tokens
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
            return _through(self.before, wide(self.logits).reshape(-1, vocab)).view(rows, nodes, vocab)
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
        if place is None or self.tied(b, i, token):
            return float(self.probs(b, i)[token])
        at = place.at(token)
        return 0.0 if at is None else float(place.mass[at] / place.whole)

    def tied(self, b: int, i: int, token: int) -> bool:
        """Whether only the warper tells if the token is left at node i of row b."""
        place = self._place(b, i)
        return place is not None and place.ties is not None and not self.free and token in place.ties

    def probs(self, b: int, i: int) -> np.ndarray:
        """float [V]: the law at node i of row b, an array of its own."""
        place = self._known(b, i)
        if place is None:
            return self._warped(b, i).softmax(-1).numpy()
        return self._spread(place, place.mass / place.whole, 0.0)

    def _place(self, b: int, i: int) -> Place | None:
        """What is known of the node without the warpers' own way through the vocabulary."""
        if (b, i) not in self.places:
            self.places[b, i] = self._found(wide(self.logits[b, i]))
        return self.places[b, i]

    def _found(self, row: torch.Tensor) -> Place | None:
        tokens = None
        if self.k is not None:
            tokens = largest(row.numpy(), self.k)
        elif self.depth is not None:
            tokens = within(row.numpy(), self.depth)
        few = tokens is not None and self.k is not None
        before = self.before[:-1] if few else self.before
        scores = _through(before, (row if tokens is None else torch.from_numpy(row.numpy()[tokens]))[None])[0].numpy()
        if few:
            kept = scores >= np.partition(scores, -self.k)[-self.k]
            tokens, scores = tokens[kept], scores[kept]
        own = Cut.all(scores) if self.top_p is None else cut(scores, self.top_p.top_p, self.top_p.min_tokens_to_keep)
        own = own if own is None or self.min_p is None else likely(own, self.min_p.min_p, self.min_p.min_tokens_to_keep)
        if own is None:
            return None
        if own.tokens is None:
            return Place(tokens, scores, own.mass, own.whole)
        order = np.argsort(own.tokens)
        left, ties = own.tokens[order], own.ties
        if tokens is None:
            return Place(left, scores[left], own.mass[order], own.whole, ties)
        return Place(tokens[left], scores[left], own.mass[order], own.whole, None if ties is None else tokens[ties])

    def _known(self, b: int, i: int) -> Place | None:
        """The node's place, where what is left of it is known to the token."""
        place = self._place(b, i)
        return None if place is None or place.ties is not None and not self.free else place

    def _settled(self, b: int, i: int) -> np.ndarray:
        """The tokens of the node's place, those of the lowest score being the ones that the warper leaves, in their order."""
        place = self.places[b, i]
        if place.ties is None:
            return place.tokens
        tokens = place.tokens.copy()
        tokens[np.isin(tokens, place.ties)] = place.ties[(self._warped(b, i).numpy() > -inf)[place.ties]]
        return tokens

    def _warped(self, b: int, i: int) -> torch.Tensor:
        """The warpers' own scores [V]."""
        if (b, i) not in self.warped:
            self.warped[b, i] = _through(self.warpers, wide(self.logits[b, i : i + 1]))[0]
        return self.warped[b, i]

    def _row(self, b: int, i: int) -> torch.Tensor:
        place = self._known(b, i)
        if place is None:
            return self._warped(b, i)
        return torch.from_numpy(self._spread(place, place.scores, -inf))

    def _spread(self, place: Place, values: np.ndarray, other: float) -> np.ndarray:
        """[V]: a place's values [m], and `other` at tokens that it does not have."""
        if place.tokens is None:
            return values
        every = np.full(self.logits.shape[-1], other, dtype=values.dtype)
        every[place.tokens] = values
        return every


class Left:
    """What a verdict has left of the law at node i of row b: weights of the few tokens that have any. exact: which of several tokens with the same score are
    left matters now, and not only when one of them is drawn."""

    def __init__(self, law: LazyLaw, b: int, i: int, exact: bool = False):
        self.law, self.node, self.sure = law, (b, i), exact or law.free
        self.place = law._known(b, i) if exact else law._place(b, i)
        self.weights = torch.from_numpy(law.probs(b, i) if self.place is None else self.place.mass / self.place.whole)

    def _at(self, token: int) -> int | None:
        return token if self.place is None else self.place.at(token)

    def prob(self, token: int) -> float:
        """What is left of p(token), as a share."""
        at = self._at(token)
        return 0.0 if at is None else float(self.weights[at] / self.weights.sum())

    def without(self, token: int, q: torch.Tensor | None, residual: Callable) -> Left:
        """The same after the token has been rejected, which was drawn from q [V]; None: not drawn."""
        at, few = self._at(token), None if self.place is None else self.place.tokens
        if q is not None or at is not None:
            q = q if q is None or few is None else q[torch.from_numpy(few)]
            self.weights = residual(self.weights, q, torch.tensor(at or 0, device="cpu"))
        return self

    def dense(self) -> torch.Tensor:
        """float [V]."""
        if self.place is None or self.place.tokens is None:
            return self.weights
        tokens = self.place.tokens if self.sure else self.law._settled(*self.node)
        return self.weights.new_zeros(self.law.logits.shape[-1]).index_put_((torch.from_numpy(tokens),), self.weights)

    def draw(self, uniform: float) -> int:
        """A token by its weight; -1 where none has any."""
        at = drawn(self.weights.numpy(), uniform, -1)
        if at < 0 or self.place is None or self.place.tokens is None:
            return at
        token = int(self.place.tokens[at])
        return token if self.sure or not self.law.tied(*self.node, token) else int(self.law._settled(*self.node)[at])


def _through(warpers: Sequence[LogitsProcessor], scores: torch.Tensor) -> torch.Tensor:
    for warper in warpers:
        scores = warper(None, scores)
    return scores
