"""Hidden states and attentions of beams: of every step, what plain beam search's pass over the running beams puts out.

They are those of the pass that has scored a beam: of its last token, or of its whole prompt at first. Nothing of them is kept for the next pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .kv_cache import SlotPlan
from .steps import Step, steps
from .tree import Tree
from .uploads import upload


class Pass(NamedTuple):
    """starts: by row, the slot of the first place. keys: by row, the slot that the first column of weights stands for. parts: by name, what every layer has put out."""

    starts: list[int]
    keys: list[int]
    width: int
    parts: dict[str, Sequence[torch.Tensor | None] | None]


class Place(NamedTuple):
    """A beam: its row in the passes, and the slots from `first` on of what is wanted of it, up to `end`; path: the slots of all of its tokens, None for all up to `end`."""

    row: int
    first: int
    end: int
    path: list[int] | None


class BeamStates:
    """What is told of every pass in the place of a `PerToken`.

    asked: what a pass is told, so that it hands them out. columns, prompt: as of a `Step`, one row for every beam. windows: as of `Attentions`. role: what the names of
    what a decoder puts out begin with. first: as of `HiddenStates`.
    """

    def __init__(self, asked: dict[str, bool], plan: SlotPlan, columns: list[list[int]], prompt: int, most: int, windows: Sequence[int | None] | None, role: str,
                 first: bool = False):
        if windows is None and "output_attentions" in asked:
            raise ValueError("output_attentions=True: no layer of the target is attention. Drop it.")
        self.asked, self.plan, self.windows, self.role, self.first = asked, plan, windows or (), role, first
        self.steps = steps(columns, prompt, 0, [most] * len(columns), whole=False)
        self.names = [f"{role}{name.removeprefix('output_')}" for name in asked] + ["cross_attentions"] * (bool(role) and "output_attentions" in asked)
        self.passes: list[Pass] = []

    def begin(self) -> None:
        """Other passes follow, over other rows."""
        self.passes = []

    def update(self, outputs: Any, starts: list[int]) -> None:
        """What the planned block put out, which begins at slot starts[r] of row r."""
        plan = self.plan
        keys = [start if plan.padded else 0 if plan.columns is None else start - plan.cached for start in starts]
        self.passes.append(Pass(list(starts), keys, plan.width, {name: getattr(outputs, name, None) for name in self.names}))

    def gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Nothing is kept."""

    def keep(self, rows: list[int]) -> None:
        """Nothing is kept."""

    def step(self, places: list[tuple[int, int]], tree: Tree, lengths: list[int]) -> dict[str, tuple | None]:
        """By name, per layer, of the beams that `places` has as (row, node) of a `tree` behind rows of so many tokens; None where a model hands out none."""
        step = next(self.steps)
        found = [self._place(row, node, tree, lengths[row], last - first) for (row, node), (first, last) in zip(places, step.spans)]
        last = self.passes[-1].parts
        return {name: own and tuple(self._part(name, layer, step, found) for layer in range(len(own))) for name, own in last.items()}

    @staticmethod
    def _place(row: int, node: int, tree: Tree, length: int, wanted: int) -> Place:
        end = length + node
        path = None if tree.is_chain or not node else [*range(length), *(length - 1 + own for own in tree.path(node) if own)]
        return Place(row, end - wanted, end, path)

    def _part(self, name: str, layer: int, step: Step, found: list[Place]) -> torch.Tensor | None:
        if name.endswith("hidden_states"):
            return self._states(name, layer, step, found)
        window = None if name == "cross_attentions" else self.windows[layer] if layer < len(self.windows) else 0
        return self._weights(name, layer, step, found, window)

    def _of(self, place: Place) -> Iterator[tuple[Pass, int, int, slice]]:
        """Every pass that has read some of a place: it, the slots from the first one up to an end, and where they are in its block."""
        for own in self.passes:
            start = own.starts[place.row]
            first, end = max(start, place.first), min(start + own.width, place.end)
            if first < end:
                yield own, first, end, slice(first - start, end - start)

    def _states(self, name: str, layer: int, step: Step, found: list[Place]) -> torch.Tensor:
        """[beams, width, H], or with streams before or behind, as `HiddenStates` has them."""
        like = self.passes[-1].parts[name][layer]
        at = 1 if like.ndim == 4 and self.first else 0  # where the rows are
        shape = [*like.shape]
        shape[at : at + 2] = len(found), step.width
        out = like.new_zeros(shape).movedim((at, at + 1), (0, 1))
        for b, (place, (begin, _)) in enumerate(zip(found, step.spans)):
            for own, first, end, block in self._of(place):
                read = step.read(b, begin + first - place.first, begin + end - place.first)
                out[b, read] = own.parts[name][layer].movedim((at, at + 1), (0, 1))[place.row, block]
        return out.movedim((0, 1), (at, at + 1))

    def _weights(self, name: str, layer: int, step: Step, found: list[Place], window: int | None) -> torch.Tensor | None:
        """[beams, heads, width, columns]."""
        like = self.passes[-1].parts[name][layer]
        if like is None:
            return None
        out = like.new_zeros(len(found), like.shape[1], step.width, like.shape[3] if window is None else step.total)
        for b, (place, (begin, _)) in enumerate(zip(found, step.spans)):
            for own, first, end, block in self._of(place):
                text, before = begin + end - place.first, own.keys[place.row]
                read, seen, piece = step.read(b, begin + first - place.first, text), slice(None), own.parts[name][layer][place.row, :, block]
                if window is not None:
                    piece = piece[..., -before : end - before] if place.path is None else piece[..., upload([slot - before for slot in place.path], piece.device)]
                    seen = step.seen(b, text)
                if isinstance(read, list) and isinstance(seen, list):
                    read = [[query] for query in read]
                out[b][:, read, seen] = piece
        shown = step.width + min(step.total - step.width, window - 1) if window else out.shape[3]
        return out if shown == out.shape[3] else out[..., -shown:].clone()
