"""The target's states at the last tokens of every row, for drafts that go on from them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..proposal import Verdict
from .base import Context
from .features import rows_at, tapped


class LastStates:
    """The target's states at the last committed tokens of every row that its own passes have read.

    layers: whose states; window: of how many tokens. There are none under stock assisted decoding, which shows none.
    """

    def __init__(self, context: Context, target: PreTrainedModel, layers: tuple[int, ...], window: int = 1):
        self.context, self.window = context, window
        self.recent: list[torch.Tensor | None] = [None] * len(context.rows)  # of every row [n, F], n <= window
        self.known = [0] * len(context.rows)  # of every row, places whose states were there
        self.tap = None if context.stock else tapped(target, layers, context)

    def observe(self) -> None:
        """The states of what was committed before; those of root and candidates wait for the verdict."""
        if self.tap is None:
            return
        *before, (states, starts) = self.tap.take(len(self.context.rows))
        for part, begin in before:
            for b, (row, start) in enumerate(zip(self.context.rows, begin)):
                self._remember(b, start, part[b, : len(row) - 1 - start])
        self.judged = states, [len(row) - 1 - start for row, start in zip(self.context.rows, starts)]

    def commit(self, verdict: Verdict) -> None:
        """The states of the root and of what was accepted after it."""
        states, roots = self.judged
        for b, (path, root) in enumerate(zip(verdict.paths(), roots)):
            nodes, first = [root + node for node, taken in enumerate(path) if taken], max(root - self.window, 0)
            start = len(self.context.rows[b]) - 1 - root + first
            self._remember(b, start, torch.cat([states[b, first:root], rows_at(states[b], nodes)]))

    def _remember(self, b: int, start: int, states: torch.Tensor) -> None:
        """The states of row b from place `start` on."""
        self._forget(b, start)
        old, gap = self.recent[b], start > self.known[b]
        self.recent[b] = (states if old is None or gap else torch.cat([old, states]))[-self.window:]
        self.known[b] = start + len(states)

    def _forget(self, b: int, start: int) -> None:
        """What is known of row b from place `start` on."""
        if self.known[b] > start:
            old = self.recent[b]
            left = () if old is None else old[: max(len(old) - (self.known[b] - start), 0)]
            self.recent[b], self.known[b] = left if len(left) else None, start

    def ready(self) -> list[bool]:
        """A row whose last tokens the target has not read has to wait: one counts from its last state."""
        return [states is not None and known == len(row) - 1 for states, known, row in zip(self.recent, self.known, self.context.rows)]

    def last(self) -> tuple[torch.Tensor, list[int]]:
        """[B, window, F], the last states before the roots, behind zeros; and how many of each row's are there."""
        there = [0 if states is None else len(states) for states in self.recent]
        like = next(states for states in self.recent if states is not None)
        last = like.new_zeros((len(there), self.window, like.shape[1]))
        for b, states in enumerate(self.recent):
            if there[b]:
                last[b, -there[b]:] = states
        return last, there

    def rewind(self, lengths: list[int]) -> None:
        """Only the first lengths[b] tokens of row b stand."""
        for b, length in enumerate(lengths):
            self._forget(b, length)

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        self.recent, self.known = [self.recent[row] for row in rows], [self.known[row] for row in rows]
