"""What the tokens of a text look at, and how much: `output_attentions` of `generate()`.

A pass over several tokens puts out the weights of drafted tokens, too. Of every pass those before the next one's first place are kept: what was rejected is fed no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .kv_cache import SlotPlan
from .steps import Step


@dataclass
class Piece:
    """Of one row and pass: weights [H, n, places] of the tokens from place `start` on, for every layer; None of one that hands out none. beyond: the layers that look at
    something else than the text, whose columns stay as they are."""

    start: int
    layers: list[torch.Tensor | None]
    beyond: set[int]

    @property
    def end(self) -> int:
        return self.start + next(own.shape[1] for own in self.layers if own is not None)

    def until(self, end: int) -> Piece:
        """Those before place `end`; the others' memory is free then."""
        if self.end <= end:
            return self
        kept = [None if own is None else own[:, : end - self.start, : None if i in self.beyond else end].clone() for i, own in enumerate(self.layers)]
        return Piece(self.start, kept, self.beyond)

    def between(self, first: int, end: int) -> Piece:
        """Those from place `first` up to `end`."""
        first, end = max(self.start, first), min(self.end, end)
        return Piece(first, [None if own is None else own[:, first - self.start : end - self.start] for own in self.layers], self.beyond)


class Attentions:
    """plan: of the target's cache. windows: per layer, how many columns plain generate shows a token behind the
    prompt at most; 0 for all, None for one that looks at something else than the text. Without windows, all of them do.

    pieces: by row, what is known of it, in the order of its places; the last may hold tokens that are rejected.
    """

    def __init__(self, plan: SlotPlan, rows: int, windows: Sequence[int | None] | None = ()):
        self.plan, self.rows, self.windows = plan, list(range(rows)), windows
        self.pieces: list[list[Piece]] = [[] for _ in range(rows)]
        self.count = 0

    def update(self, weights: Sequence[torch.Tensor | None], starts: list[int]) -> None:
        """Keep what the planned block put out, per layer [B, H, Q, visible], or None; its first token is at place starts[b] of row b, below 0 where there is padding
        before."""
        self.count = len(weights)
        beyond = {layer for layer in range(self.count) if self.windows is None or layer < len(self.windows) and self.windows[layer] is None}
        for b, (row, start) in enumerate(zip(self.rows, starts)):
            pieces = [own.until(start) for own in self.pieces[row] if own.start < start]
            first = start if self.plan.padded else 0 if self.plan.columns is None else start - self.plan.cached  # the place that the first column stands for
            if any(own is not None for own in weights):
                own = [None if part is None else part[b, :, max(-start, 0) :, 0 if i in beyond else max(-first, 0) :] for i, part in enumerate(weights)]
                pieces.append(Piece(max(start, 0), own, beyond))
            self.pieces[row] = pieces

    def gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """What is at places source[b, i] (int64 [B, n]) goes to target[b, i], as a token and as one that is looked at: an accepted tree path goes into place."""
        for row, old, new in zip(self.rows, source, target.expand_as(source)):
            piece = self.pieces[row][-1] if self.pieces[row] else Piece(0, [], set())
            for i, own in enumerate(piece.layers):
                if own is not None:
                    at, to = old.to(own.device), new.to(own.device)
                    moved = own[:, at - piece.start]
                    if i not in piece.beyond:
                        seen = moved[..., at]
                        moved[..., at] = 0
                        moved[..., to] = seen
                    own[:, to - piece.start] = moved

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        self.rows = [self.rows[b] for b in rows]

    def packed(self, steps: Iterable[Step]) -> tuple[tuple[torch.Tensor | None, ...], ...]:
        """As transformers has it: per new token, per layer what the tokens looked at, [B, H, width, columns]; the rest is as `HiddenStates.packed` has it."""
        out = []
        for step in steps:
            found = [[piece.between(first, end) for piece in own if piece.start < end and piece.end > first] for own, (first, end) in zip(self.pieces, step.spans)]
            out.append(tuple(self._step(layer, step, found) for layer in range(self.count)))
        return tuple(out)

    def _step(self, layer: int, step: Step, found: list[list[Piece]]) -> torch.Tensor | None:
        like = next((own.layers[layer] for pieces in found for own in pieces), None)
        if like is None:
            return None
        beyond = next(layer in piece.beyond for pieces in found for piece in pieces)
        out = like.new_zeros(len(found), like.shape[0], step.width, like.shape[2] if beyond else step.total)
        for b, pieces in enumerate(found):
            for piece in pieces:
                queries, keys = step.read(b, piece.start, piece.end), slice(None) if beyond else step.seen(b, piece.end)
                if isinstance(queries, list) and isinstance(keys, list):
                    queries = [[query] for query in queries]
                out[b][:, queries, keys] = piece.layers[layer][..., : None if beyond else piece.end]
        window = self.windows[layer] if not beyond and layer < len(self.windows) else 0
        shown = step.width + min(step.total - step.width, window - 1) if window else out.shape[3]
        return out if shown == out.shape[3] else out[..., -shown:].clone()
