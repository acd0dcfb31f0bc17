"""Token recycling: the target's own next-best guesses, kept from every pass it makes, are the draft of the next ones.

Luo et al. 2024 (arXiv 2408.08696). Every pass yields logits after drafted tokens, too, accepted or not; the likeliest successors of
each token are remembered, and a fixed tree is filled from them. Proposals are point masses.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush

import numpy as np
import torch

from ..hints import check_int
from ..proposal import Proposal
from ..tree import Tree
from ..uploads import upload
from .base import Context, Draft

UNKNOWN = -1
RATES = (0.31, 0.1, 0.055, 0.045, 0.03, 0.02, 0.015, 0.015)  # how often that successor came next, SmolLM2-135M-Instruct, greedy answers


class RecyclingDraft(Draft):
    """Proposes, after a token, what the target last thought likeliest after it, wherever that was: no model, no text, V * successors
    numbers of 4 bytes. Of tokens that stand in the prompt only, whose logits nobody has computed, what follows them there is known.

    branches:   1 proposes a chain. More propose a fixed tree of K tokens, best first, with at most that many after each token; it
                pays where a pass over more tokens costs little more.
    successors: how many are kept of each token, at least `branches`.
    remember:   keep what was learned for the next call. Otherwise every call starts with nothing, and every row of a call that
                samples has a matrix of its own, so that its text does not depend on its neighbours.
    """

    name = "recycling"
    trusted = True
    learns_in_stock = True
    cost_ratio = 0.0

    def __init__(self, branches: int = 1, successors: int = 8, remember: bool = False):
        for name, value, least, most in (("branches", branches, 1, len(RATES)), ("successors", successors, branches, 64)):
            check_int(name, value, least, most)
        self.branches, self.successors, self.remember, self.may_branch = branches, successors, bool(remember), branches > 1
        self.kept: np.ndarray | None = None  # what is remembered from call to call
        self.matrices: list[np.ndarray] = []  # of every row, int32 [V, successors]; rows may share one
        self.context: Context | None = None

    def start(self, context: Context) -> None:
        self.context, self.matrices = context, []

    def evidence(self, context: Context) -> list[int]:
        """Per row: -1 where nothing is known of its last token, else 0."""
        return [0 if self._known(b, row[-1]) else -1 for b, row in enumerate(context.rows)]

    def _known(self, b: int, token: int) -> bool:
        return bool(self.matrices) and token < len(self.matrices[b]) and self.matrices[b][token, 0] != UNKNOWN

    def propose(self, context: Context, k: list[int]) -> Proposal:
        tree = best_first(max(k, default=0), 1 if context.chains else self.branches)
        rows = [self._filled(b, row[-1], tree.truncate(own)) if own and self.matrices else [] for b, (row, own) in enumerate(zip(context.rows, k))]
        sizes = [max((i for i, token in enumerate(row, start=1) if token != UNKNOWN), default=0) for row in rows]
        n = max(sizes, default=0)
        tokens = [[max(token, 0) for token in row[:n]] + [0] * (n - len(row)) for row in rows]  # within a size, 0 is a guess like any other
        placed = upload(tokens, context.device, torch.long).reshape(len(k), n)
        return Proposal(tree.truncate(n), placed, None, sizes, self.name, on_host=tokens)

    def _filled(self, b: int, root: int, tree: Tree) -> list[int]:
        """The tokens of the nodes: the successor, of the node's rank, of its parent's token."""
        matrix, tokens = self.matrices[b], [root if root < len(self.matrices[b]) else UNKNOWN]
        for parent, rank in zip(tree.parents, tree.ranks):
            token = tokens[parent]
            tokens.append(int(matrix[token, rank]) if token != UNKNOWN and rank < matrix.shape[1] else UNKNOWN)
        return tokens[1:]

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        """The successors of the root and of every drafted token; of equal tokens in one pass, that nearest to the root counts."""
        vocab = min(self.context.vocab_size, logits.shape[-1])
        self.matrices = self.matrices or self._new(self.context.texts, vocab)
        best = logits[..., :vocab].topk(self.matrices[0].shape[1]).indices.int().cpu().numpy()
        for b, (row, drafted, size) in enumerate(zip(self.context.rows, proposal.listed(), proposal.sizes)):
            nodes = {token: node for node, token in reversed(list(enumerate([row[-1], *drafted[:size]]))) if token < vocab}
            self.matrices[b][list(nodes)] = best[b, list(nodes.values())]

    def _new(self, rows: list[list[int]], vocab: int) -> list[np.ndarray]:
        """The matrices of the rows, with the pairs of their prompts (the last of each token) where nothing is known."""
        shape, shared = (vocab, min(self.successors, vocab)), self.remember or not self.context.sampler.do_sample
        blank = [np.full(shape, UNKNOWN, np.int32) for _ in range(1 if shared else len(rows))]
        if self.remember:
            self.kept = blank[0] if self.kept is None or self.kept.shape != shape else self.kept
            blank = [self.kept]
        matrices = blank * len(rows) if shared else blank
        for matrix, row in zip(matrices, rows):
            for token, after in zip(row[-2::-1], row[:0:-1]):
                if token < vocab and after < vocab and matrix[token, 0] == UNKNOWN:
                    matrix[token, 0] = after
        return matrices

    def prior(self, strength: int) -> tuple[float, float]:
        """Rates measured on SmolLM2-135M-Instruct's greedy answers to Spec-Bench's prompts."""
        return 0.27, 0.5

    def keep(self, rows: list[int]) -> None:
        self.matrices = [self.matrices[row] for row in rows] if self.matrices else []  # none before the first pass

    def rewind(self, context: Context, lengths: list[int]) -> None:
        """What the matrices have learned stays true."""

    def finish(self) -> None:
        self.matrices, self.context = [], None
        super().finish()


@lru_cache(maxsize=256)
def best_first(nodes: int, branches: int) -> Tree:
    """The tree of the likeliest `nodes` paths if a successor of rank r comes next with probability RATES[r]. That of fewer nodes
    is its beginning, and branches=1 makes a chain."""
    parents: list[int] = []
    ahead = [(-RATES[0], 0, 0)]  # (-probability, parent, rank)
    while len(parents) < nodes:
        probability, parent, rank = heappop(ahead)
        parents.append(parent)
        heappush(ahead, (probability * RATES[0], len(parents), 0))
        if rank + 1 < min(branches, len(RATES)):
            heappush(ahead, (probability / RATES[rank] * RATES[rank + 1], parent, rank + 1))
    return Tree(tuple(parents))
