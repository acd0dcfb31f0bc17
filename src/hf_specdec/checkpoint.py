"""What layers that carry states have read, after a pass: what is put back, row by row, when tokens are rejected."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

State = tuple[dict, dict]  # of one layer, by number: inputs of convolutions [B, C, n] and recurrent states [B, ...]; None where there is none


@dataclass
class Checkpoint:
    """The states of all layers after lengths[b] tokens of row b; of each row the last `reach` can be taken back."""

    lengths: list[int]
    reach: int
    states: list[State]

    def cut(self, lengths: list[int]) -> None:
        """Take back what convolutions have read from position lengths[b] on."""
        back = [own - length for own, length in zip(self.lengths, lengths)]
        most = max(back)
        self.states = [({i: _without_last(part, back, most) for i, part in inputs.items()}, recurrent) for inputs, recurrent in self.states]
        self.lengths, self.reach = lengths, self.reach - most

    def rows_of(self, other: "Checkpoint | None", rows: list[bool]) -> "Checkpoint":
        """This one with the states of `other` in these rows; None: those of before the first token."""
        if not any(rows) or all(rows) and other is not None:
            return other if any(rows) else self
        lengths = [theirs if there else own for own, theirs, there in zip(self.lengths, other.lengths if other else [0] * len(rows), rows)]
        states = [tuple(_mixed(mine, theirs, rows) for mine, theirs in zip(own, pair))
                  for own, pair in zip(self.states, other.states if other else [({}, {})] * len(self.states))]
        return Checkpoint(lengths, 0, states)

    def keep(self, rows: list[int]) -> "Checkpoint":
        """These rows alone."""
        parts = [tuple({i: None if part is None else part[rows] for i, part in kind.items()} for kind in pair) for pair in self.states]
        return Checkpoint([self.lengths[row] for row in rows], self.reach, parts)


def _without_last(part: torch.Tensor | None, back: list[int], most: int) -> torch.Tensor | None:
    """part [B, C, n] without the last back[b] places of row b, and without its first most - back[b] ones."""
    if part is None or not most:
        return part
    width = part.shape[-1] - most
    return torch.stack([own[..., most - n : most - n + width] for own, n in zip(part, back)])


def _mixed(mine: dict, theirs: dict, rows: list[bool]) -> dict:
    """States of one kind: theirs in `rows`, mine in the others. What a convolution has read may be shorter at the beginning of a text, before which are zeros."""
    mixed = {}
    for i, own in mine.items():
        other = theirs.get(i)
        if own is not None:
            there = torch.tensor(rows, device=own.device)
            other = torch.zeros_like(own) if other is None else other
            if own.shape != other.shape:
                n = max(own.shape[-1], other.shape[-1])
                own, other = (pad(part, (n - part.shape[-1], 0)) for part in (own, other))
            own[there] = other[there]  # nobody else reads it
        mixed[i] = own
    return mixed
