"""Prompt lookup: the continuation of the last place where the row's own text went as it goes now.

Saxena 2023 (prompt lookup decoding), Yang et al. 2023 (LLMA). The proposal is a point mass, so q is one-hot.
"""

from __future__ import annotations

from ..hints import check_int
from ..proposal import Proposal
from .base import Context, Draft


class _Index:
    """Where every n-gram of one row ends; grows with the row and is never rebuilt."""

    def __init__(self, orders: tuple[int, ...]):
        self.orders, self.length = orders, 0
        self.ends: list[dict] = [{} for _ in orders]

    def match(self, row: list[int], longest: int, candidates: int) -> tuple[int, int]:
        """(n, end): the longest suffix of `row`, at most `longest` tokens, that also ends at position `end` < len(row); the most
        recent of equally long ones. (0, 0) if there is none."""
        for order, ends in zip(self.orders, self.ends):
            for end in range(max(self.length, order), len(row)):
                ends.setdefault(tuple(row[end - order : end]), []).append(end)
        self.length = len(row)
        best = (0, 0)
        for order, ends in zip(self.orders, self.ends):
            for end in reversed(ends.get(tuple(row[-order:]), [])[-candidates:]):
                n = order
                while n < longest and n < end and row[end - 1 - n] == row[-1 - n]:
                    n += 1
                best = max(best, (n, end))
            if best[0]:
                break
        return best


class PromptLookupDraft(Draft):
    """Looks for the longest earlier match of the last tokens in prompt and output, and in what an encoder has read in that vocabulary.

    The draft grows with the match, at most n * n + 1 tokens for a match of n: a one-token match is worth a try, not a full
    block. An empty proposal costs nothing, and a short one is not padded. `min_match`: shortest match that counts.
    """

    name = "prompt_lookup"
    trusted = True
    cost_ratio = 0.0
    LONGEST, CANDIDATES = 32, 16

    def __init__(self, min_match: int = 1):
        check_int("min_match", min_match, 1, 2**31)
        self.orders = tuple(sorted({max(3, min_match), max(2, min_match), min_match}, reverse=True))

    def start(self, context: Context) -> None:
        self.indices = [_Index(self.orders) for _ in context.rows]
        self.matches: list[tuple[int, int]] = []

    def evidence(self, context: Context) -> list[int]:
        """Per row: -1 without a match, else its length, grouped (1, 2, 3, 4-5, 6-9, 10 and more)."""
        self.matches = [index.match(row, self.LONGEST, self.CANDIDATES) for index, row in zip(self.indices, context.texts)]
        return [_group(n) for n, _ in self.matches]

    def propose(self, context: Context, k: list[int]) -> Proposal:
        rows = [self._continuation(row, n, end, own) for row, (n, end), own in zip(context.texts, self.matches, k)]
        return Proposal.from_lists(rows, context.device, self.name, context.vocab_size)

    def _continuation(self, row: list[int], n: int, end: int, k: int) -> list[int]:
        """What followed the match; where it runs into the present, the text is taken to go on repeating itself."""
        k = min(k, n * n + 1)
        if k <= 0:
            return []
        period = row[end:]
        return (period * (k // len(period) + 1))[:k]

    def prior(self, strength: int) -> tuple[float, float]:
        """Rates measured on SmolLM2-135M-Instruct's greedy answers to chat, code and summary prompts."""
        return {1: (0.26, 0.6), 2: (0.56, 0.75), 3: (0.66, 0.8), 4: (0.74, 0.85), 6: (0.82, 0.9)}.get(strength, (0.93, 0.95))

    def keep(self, rows: list[int]) -> None:
        self.indices = [self.indices[row] for row in rows]

    def finish(self) -> None:
        self.indices, self.matches = [], []
        super().finish()


def _group(n: int) -> int:
    return -1 if n == 0 else n if n < 4 else 4 if n < 6 else 6 if n < 10 else 10
