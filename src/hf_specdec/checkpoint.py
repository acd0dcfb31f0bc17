"""What layers that carry states have read, after a pass: what is put back, row by row, when tokens are rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch.nn.functional import pad

from .recurrences import after
from .uploads import upload

ON_HOST = ("cpu",)  # kinds of devices where the numbers, not the calls, are what takes time
State = tuple[dict, dict]  # of one layer, by number: inputs of convolutions [B, C, n] and recurrent states [B, ...]; None where there is none


@dataclass
class Checkpoint:
    """The states of all layers after lengths[b] tokens of row b; of each row the last `reach` can be taken back.

    block: where recurrent states can be: the position of each row at which the last pass began, and per layer what makes its state after so many tokens of
    the pass (None: it has none). open: those after all of it have not been made.
    """

    lengths: list[int]
    reach: int
    states: list[State]
    block: tuple[list[int], list[Callable | None]] | None = None
    open: bool = False

    def cut(self, lengths: list[int]) -> None:
        """Take back what has been read from position lengths[b] on."""
        back = [own - length for own, length in zip(self.lengths, lengths)]
        most = max(back)
        if not most and not self.open:
            return
        self.states = [({i: _without_last(part, back, most) for i, part in inputs.items()}, recurrent) for inputs, recurrent in self.states]
        if self.block is not None:
            starts, after = self.block
            read = [length - start for length, start in zip(lengths, starts)]
            self.states = [(inputs, recurrent if state is None else recurrent | {0: state.to(recurrent[0].dtype)})
                           for state, (inputs, recurrent) in zip(states_after(after, read), self.states)]
        self.lengths, self.reach, self.open = lengths, self.reach - most, False

    def rows_of(self, other: Checkpoint | None, rows: list[bool]) -> Checkpoint:
        """This one with the states of `other` in these rows; None: those of before the first token."""
        if not any(rows) or all(rows) and other is not None:
            return other if any(rows) else self
        lengths = [theirs if there else own for own, theirs, there in zip(self.lengths, other.lengths if other else [0] * len(rows), rows)]
        index = _on_each([b for b, there in enumerate(rows) if there])
        states = [tuple(_mixed(mine, theirs, index) for mine, theirs in zip(own, pair))
                  for own, pair in zip(self.states, other.states if other else [({}, {})] * len(self.states))]
        return Checkpoint(lengths, 0, states)

    def keep(self, rows: list[int]) -> Checkpoint:
        """These rows alone."""
        index = _on_each(rows)
        parts = [tuple({i: None if part is None else part.index_select(0, index(part.device)) for i, part in kind.items()} for kind in pair) for pair in self.states]
        return Checkpoint([self.lengths[row] for row in rows], self.reach if self.block is None else 0, parts)


def _on_each(rows: list[int]) -> Callable[[torch.device], torch.Tensor]:
    """The numbers of rows, int64 [n], on a device that is asked for, copied there once."""
    return cache(lambda device: upload(rows, device))


def _without_last(part: torch.Tensor | None, back: list[int], most: int) -> torch.Tensor | None:
    """part [B, C, n] without the last back[b] places of row b, and without its first most - back[b] ones."""
    width = 0 if part is None else part.shape[-1] - most
    if part is None or min(back) == most:
        return part if part is None else part[..., :width]
    return torch.stack([own[..., most - n : most - n + width] for own, n in zip(part, back)])


def _mixed(mine: dict, theirs: dict, index: Callable[[torch.device], torch.Tensor]) -> dict:
    """States of one kind: theirs in the rows `index`, mine in the others. What a convolution has read may be shorter at the beginning of a text, before which are zeros."""
    mixed = {}
    for i, own in mine.items():
        other = theirs.get(i)
        if own is not None:
            rows = index(own.device)
            other = torch.zeros_like(own) if other is None else other
            if own.shape != other.shape:
                n = max(own.shape[-1], other.shape[-1])
                own, other = (pad(part, (n - part.shape[-1], 0)) for part in (own, other))
            own.index_copy_(0, rows, other.index_select(0, rows))  # nobody else reads it
        mixed[i] = own
    return mixed


# --- recurrent states after fewer tokens ------------------------------------------------------------------------------------

def states_after(makes: list[Callable | None], n: list[int]) -> list[torch.Tensor | None]:
    """What each of `makes` makes of n. On a GPU layers that are alike are read in one call, as heads of one layer."""
    made: list[torch.Tensor | None] = [None] * len(makes)
    alike: dict[tuple, list[int]] = {}
    for i, make in enumerate(makes):
        alike.setdefault(_kind(make) if any(n) and isinstance(make, partial) else (i,), []).append(i)
    for group in alike.values():
        own = [makes[i] for i in group]
        states = [make and make(n) for make in own] if len(own) == 1 else _as_one(own)(n).chunk(len(own), dim=1)
        for i, state in zip(group, states):
            made[i] = state
    return made


def _kind(make: partial) -> tuple:
    """What a call of `recurrences.after` has in common with another that might be made in the same one."""
    form, several, args, options, before = make.args
    if before.device.type in ON_HOST:
        return (id(make),)
    parts = [(part.shape, part.dtype, part.device) if isinstance(part, torch.Tensor) else part for part in (*args, *options.values(), before)]
    return form, several, *options, repr(parts)


def _as_one(alike: list[partial]) -> partial:
    """Layers that are alike as one that has the heads of all."""
    forms, severals, args, options, before = zip(*(make.args for make in alike))

    def joined(parts: tuple):
        return torch.cat(parts, dim=2 if parts[0].ndim > 2 else 0) if isinstance(parts[0], torch.Tensor) else parts[0]

    more = {name: joined(tuple(own[name] for own in options)) for name in options[0]}
    return partial(after, forms[0], severals[0], tuple(map(joined, zip(*args))), more, torch.cat(before, dim=1))
