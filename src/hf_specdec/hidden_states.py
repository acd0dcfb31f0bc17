"""What the layers of a target put out at every position of a text: `output_hidden_states` of `generate()`.

A pass over several tokens puts out states of drafted tokens, too. They lie where the keys of these tokens lie, and go the same way: what is rejected is written over.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .kv_cache import SlotLayer, SlotPlan
from .steps import Step
from .uploads import upload


_INSIDE, _FIRST = (0, 2, 1, 3), (1, 0, 2, 3)  # where rows, streams, places and numbers are in what a pass puts out


class HiddenStates:
    """plan: of the target's cache. first: whether streams come before rows in what a pass puts out, where there are several. ended: by row, what is known of those that
    have left the call.

    layers: one for every tensor that transformers hands out for a pass; states [B, streams, slots, H], of nearly all models in one stream.
    """

    def __init__(self, plan: SlotPlan, rows: int, first: bool = False):
        self.plan, self.rows, self.layers, self.order = plan, list(range(rows)), [], _FIRST if first else _INSIDE
        self.ended: dict[int, list[torch.Tensor]] = {}
        self.orders: list[tuple | None] = []  # per layer; None: there are no streams

    def update(self, states: tuple[torch.Tensor, ...], starts: list[int]) -> None:
        """Keep what the planned block put out, per layer [B, L, H], or [streams, B, L, H] (Gemma 3n), or [B, L, streams, H] (HY v4)."""
        self.layers = self.layers or [SlotLayer(self.plan) for _ in states]
        self.orders = [None if own.ndim == 3 else self.order for own in states]
        for layer, own, order in zip(self.layers, states, self.orders):
            own = own[:, None, -self.plan.width :] if order is None else own.permute(order)  # OpenAI GPT puts out its whole text
            layer.update(own, own[..., :0])

    def gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """As `SlotLayer.gather`."""
        for layer in self.layers:
            layer.gather(source, target)

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        self.ended |= {self.rows[b]: [layer.keys[b].clone() for layer in self.layers] for b in range(len(self.rows)) if b not in rows}
        for layer in self.layers if rows else ():
            layer.keep(upload(rows, layer.keys.device))
        self.rows = [self.rows[b] for b in rows]

    def packed(self, steps: Iterable[Step]) -> tuple[tuple[torch.Tensor, ...], ...]:
        """As transformers has it: per new token, per layer [B, width, H]; where a row has ended, and at padding, there are zeros."""
        self.keep([])
        return tuple(tuple(self._step(layer, step) for layer in range(len(self.layers))) for step in steps)

    def _step(self, layer: int, step: Step) -> torch.Tensor:
        like = self.ended[0][layer]
        out = like.new_zeros(len(step.spans), like.shape[0], step.width, like.shape[2])
        for b, (first, end) in enumerate(step.spans):
            if end > first:
                out[b, :, step.read(b, first, end)] = self.ended[b][layer][:, first:end]
        order = self.orders[layer]
        return out[:, 0] if order is None else out.permute([order.index(axis) for axis in range(4)])
