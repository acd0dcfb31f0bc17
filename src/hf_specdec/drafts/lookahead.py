"""Lookahead decoding: a Jacobi iteration rides along in every verification pass, and n-grams of its trajectory are the draft.
Fu et al. 2024 (arXiv 2402.02057), after Santilli et al. 2023 (Jacobi decoding)."""

from __future__ import annotations

from collections import deque

import torch

from ..hints import check_int
from ..law import likeliest
from ..proposal import Proposal
from .base import Context, Draft
from .growth import Branches, Grown, together


class _Row:
    """iterates: the last ones, each position -> token; pool: token -> the n-grams that went on from it, the latest first."""

    def __init__(self, ngram: int):
        self.iterates: deque[dict[int, int]] = deque(maxlen=ngram - 1)
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        self.window: list[int] = []  # of the last proposal


class LookaheadDraft(Draft):
    """No model, no text, and no forward of its own: the guesses for the next positions (the window) are a branch of the tree that the
    target judges, and what it says after each of them is the next iterate. Tokens that successive iterates had at successive
    positions are kept as n-grams; those that begin with the last token are proposed. All proposals are point masses.

    Cost: about half of the K nodes of every pass are the window, which is seldom accepted itself. Where a wider pass costs time, this
    draft is slower than recycling, which learns from the nodes that it proposes anyway.

    window: positions guessed. ngram: length of the n-grams. candidates: n-grams kept per token.
    The rows of a batch share one shape of tree, so what is drawn for a row depends on its neighbours (its law does not). Stock
    assisted decoding shows a draft no logits of a window, so there it has only its first guess to give.
    """

    name = "lookahead"
    trusted = may_branch = True
    cost_ratio = 0.0

    def __init__(self, window: int = 8, ngram: int = 4, candidates: int = 8):
        for name, value, least, most in (("window", window, 1, 64), ("ngram", ngram, 2, 16), ("candidates", candidates, 1, 64)):
            check_int(name, value, least, most)
        self.window, self.ngram, self.candidates = window, ngram, candidates
        self.rows: list[_Row] = []

    def start(self, context: Context) -> None:
        self.context = context
        self.rows = [_Row(self.ngram) for _ in context.rows]

    def propose(self, context: Context, k: list[int]) -> Proposal:
        trees = [self._tree(state, row, size, context) for state, row, size in zip(self.rows, context.rows, k)]
        return together([Branches(tree.nodes) for tree in trees], context.vocab_size, context.device, self.name)

    def _tree(self, state: _Row, row: list[int], size: int, context: Context) -> Grown:
        """The n-grams that go on from the last token, then the window; what they share is there once."""
        grown, room = Grown(), size - min(self.window, (size + 1) // 2)
        paths = state.pool.get(row[-1], [])
        if context.stock:
            paths, room = paths[:1], size if paths else 0
        for path in paths:
            node = 0
            for token in path:
                if token not in grown.children[node] and len(grown.nodes) >= room:
                    break
                node = grown.children[node].get(token) or grown.add(node, token, [])
        state.window = []
        if context.stock and paths:
            return grown
        node = 0
        for token in self._guessed(state, row):
            if token not in grown.children[node] and len(grown.nodes) >= size:
                break
            node = grown.children[node].get(token) or grown.add(node, token, [])
            state.window.append(token)
        return grown

    def _guessed(self, state: _Row, row: list[int]) -> list[int]:
        """The window: the last iterate where it reaches, else some token of the row, always the same one for a position."""
        most, last = self.context.vocab_size - 1, state.iterates[-1] if state.iterates else {}
        return [last.get(position, min(row[7 * position % len(row)], most)) for position in range(len(row), len(row) + self.window)]

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        """What the target says after the root and after every node of the window is the next iterate."""
        words = likeliest(logits[..., : self.context.vocab_size]).tolist()
        for b, (state, row, said) in enumerate(zip(self.rows, self.context.rows, words)):
            iterate = {len(row) + i: said[node] for i, node in enumerate(_walk(proposal, b, state.window))}
            self._collect(state, iterate)
            state.iterates.append(iterate)

    def _collect(self, state: _Row, iterate: dict[int, int]) -> None:
        """The n-grams that end in the new iterate, their tokens from one iterate each."""
        history, n = [*state.iterates, iterate], self.ngram
        if len(history) < n:
            return
        for last in iterate:
            gram = tuple(own.get(last - n + 1 + i) for i, own in enumerate(history[-n:]))
            if None not in gram:
                known = state.pool.setdefault(gram[0], [])
                if gram[1:] in known:
                    known.remove(gram[1:])
                known.insert(0, gram[1:])
                del known[self.candidates :]

    def prior(self, strength: int) -> tuple[float, float]:
        return 0.2, 0.4

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]

    def rewind(self, context: Context, lengths: list[int]) -> None:
        """Guesses and n-grams are no less true than before."""

    def finish(self) -> None:
        self.rows, self.context = [], None
        super().finish()


def _walk(proposal: Proposal, b: int, tokens: list[int]) -> list[int]:
    """The root and the nodes of row b that spell `tokens`, as far as they are there."""
    below = {(parent, token): node for node, (parent, token) in
             reversed(list(enumerate(zip(proposal.tree.parents[: proposal.sizes[b]], proposal.listed()[b]), start=1)))}
    path = [0]
    for token in tokens:
        if (path[-1], token) not in below:
            break
        path.append(below[path[-1], token])
    return path
