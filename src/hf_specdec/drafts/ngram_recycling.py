"""Token recycling by context: the target's own next-best guesses, kept under the last few tokens and not under the last one alone.

After Luo et al. 2024 (arXiv 2408.08696), whose matrix has one line per token. Here the longest of three contexts that is known
counts, and the prompt is read, too: what follows each of its tokens there, and, if wanted, what the target would have said. Point masses.
"""

from __future__ import annotations

import numpy as np
import torch

from ..hints import check_int
from ..proposal import Proposal
from .base import Context, Guess
from .growth import Grower, GrownDraft, likeliest

ORDERS = 3
UNKNOWN = -1
# how often the guess of that rank was right, by tokens of context: SmolLM2-135M-Instruct, greedy answers
RATES = {1: (0.26, 0.10, 0.063, 0.036, 0.033, 0.021, 0.015, 0.015), 2: (0.50, 0.113, 0.058, 0.056, 0.039, 0.025, 0.025, 0.025),
         3: (0.79, 0.119, 0.068, 0.061, 0.048, 0.048, 0.048, 0.048)}


class Contexts:
    """Successors of the contexts of 1 to 3 tokens: a dictionary of places in one int32 array. At most `limit` contexts; then the
    oldest makes room for the newest. A context is its tokens as the digits of a number."""

    SHIFT = 21

    def __init__(self, successors: int, limit: int):
        self.successors, self.limit = successors, limit
        self.slots: dict[int, int] = {}
        self.table = np.full((1024, successors), UNKNOWN, np.int32)

    def __len__(self) -> int:
        return len(self.slots)

    def find(self, path: tuple[int, ...]) -> tuple[int, list[int]]:
        """(n, successors) of the longest known context that ends `path`; (0, []) if there is none."""
        keys = list(self._keys(path))
        for n in range(len(keys), 0, -1):
            slot = self.slots.get(keys[n - 1])
            if slot is not None:
                return n, self.table[slot].tolist()
        return 0, []

    def _keys(self, path) -> list[int]:
        key, keys = 0, []
        for n, token in enumerate(reversed(path[-ORDERS:])):
            key |= (token + 1) << (self.SHIFT * n)
            keys.append(key)
        return keys

    def put(self, paths: list[tuple[int, ...]], successors: np.ndarray) -> None:
        """successors int32 [n, S] of the last tokens of every path; of equal contexts the last one counts."""
        places: dict[int, int] = {}
        for line, path in enumerate(paths):
            for key in self._keys(path):
                places[self._slot(key)] = line
        self.table[list(places)] = successors[list(places.values())]

    def _slot(self, key: int) -> int:
        slot = self.slots.get(key)
        if slot is None:
            slot = len(self.slots) if len(self.slots) < self.limit else self.slots.pop(next(iter(self.slots)))
            self.slots[key] = slot
            if slot == len(self.table):
                self.table = np.concatenate([self.table, np.full_like(self.table, UNKNOWN)])
        return slot


class NGramRecyclingDraft(GrownDraft):
    """Proposes a tree of K tokens, the likeliest first, of what the target last thought likeliest after the same three tokens, or two,
    or one. It learns from what follows in the prompt and from all logits of every pass, and measures during the call how often guesses are
    right, by length of context and rank.

    branches: most tokens tried after each one; 1 proposes a chain.
    remember: keep what was learned for the next call, up to `limit` contexts (about 200 bytes each).
    read_prompt: learn from the target's logits over the prompt, too: a few tokens in a hundred more, for a prompt pass that computes the logits of
        all its tokens: the head is a fiftieth of the weights of a Llama of 7B, and a fifth of SmolLM2-135M's.

    The rows of a batch learn from each other, so what is drawn for a row depends on its neighbours (its law does not).
    """

    name = "ngram_recycling"
    trusted = True
    learns_in_stock = True
    cost_ratio = 0.0
    SUCCESSORS = 8

    def __init__(self, branches: int = 4, remember: bool = False, limit: int = 2**20, read_prompt: bool = False):
        super().__init__(branches, self.SUCCESSORS)
        check_int("limit", limit, 1, 2**26)
        self.remember, self.limit, self.reads_prompt = bool(remember), limit, bool(read_prompt)
        self.contexts = Contexts(self.SUCCESSORS, limit)

    def start(self, context: Context) -> None:
        super().start(context)
        if not self.remember:
            self.contexts, self.grower = Contexts(self.SUCCESSORS, self.limit), Grower()
        for row in context.rows:
            follows = np.full((max(len(row) - 1, 0), self.SUCCESSORS), UNKNOWN, np.int32)
            follows[:, 0] = row[1:]
            self.contexts.put([tuple(row[max(end - ORDERS, 0) : end]) for end in range(1, len(row))], follows)

    # --- what is proposed -------------------------------------------------------------------------------------------

    def strengths(self, context: Context) -> list[int]:
        """Per row: tokens of context that are known, 1 to 3, or -1."""
        return [self.contexts.find(tuple(row[-ORDERS:]))[0] or -1 for row in context.rows]

    def place(self, b: int) -> tuple[int, ...]:
        return tuple(self.context.rows[b][-ORDERS:])

    def guesses(self, place: tuple[int, ...]) -> list[Guess]:
        order, successors = self.contexts.find(place)
        return [(token, (order, rank), RATES[order][rank]) for rank, token in enumerate(successors) if token != UNKNOWN]

    def step(self, place: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*place[1 - ORDERS :], token)

    # --- what is learned --------------------------------------------------------------------------------------------

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        """The successors of the root and of every drafted token; of equal contexts in one pass, that nearest to the root counts."""
        best = self._best(logits)
        for b, (row, drafted, size) in enumerate(zip(self.context.rows, proposal.listed(), proposal.sizes)):
            paths = [tuple(row[-ORDERS:])]
            for parent, token in zip(proposal.tree.parents[:size], drafted):
                paths.append(self.step(paths[parent], token))
            self.contexts.put(paths[::-1], best[b, : size + 1][::-1])

    def read(self, firsts: list[int], logits: torch.Tensor) -> None:
        """Over the prompt: first what follows there, then what the target would have said."""
        best = self._best(logits)
        for b, (row, first) in enumerate(zip(self.context.rows, firsts)):
            n = min(len(row) - 1 - first, best.shape[1])
            if n > 0:
                follows, said = np.array(row[first + 1 : first + 1 + n], np.int32)[:, None], best[b, :n]
                last = np.argsort(said == follows, axis=1, kind="stable")[:, :-1]  # without it, or without the least likely
                lines = np.concatenate([follows, np.take_along_axis(said, last, 1)], axis=1)
                self.contexts.put([tuple(row[max(first + i + 1 - ORDERS, 0) : first + i + 1]) for i in range(n)], lines)

    def _best(self, logits: torch.Tensor) -> np.ndarray:
        """int32 [B, n, SUCCESSORS], the likeliest first."""
        vocab = min(self.context.vocab_size, logits.shape[-1])
        best = likeliest(logits[..., :vocab], min(self.SUCCESSORS, vocab)).int().cpu().numpy()
        return np.pad(best, ((0, 0), (0, 0), (0, self.SUCCESSORS - best.shape[-1])), constant_values=UNKNOWN)

    def prior(self, strength: int) -> tuple[float, float]:
        return {1: 0.3, 2: 0.45}.get(strength, 0.55), 0.55

    # --- the life of a call -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        if not self.remember:
            self.contexts, self.grower = Contexts(self.SUCCESSORS, self.limit), Grower()
        super().finish()
