"""A block of tokens as compiled passes are given it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from .kv_cache import SlotCache


class Block(NamedTuple):
    """What a compiled pass over W places is given: tokens int64 [B, W], or embeds [B, W, H] in their place (None: there are none), positions int64 [B, W],
    mask float [B, 1, W, S] or one per layer type, slots int64 [W] of the one row, or [B, W], and per layer keys and values [B, H, S, D], which are written. Of several
    passes, tokens [B, 1] are the first one's, and embeds are (make, states [B, 1, H])."""

    tokens: torch.Tensor
    embeds: torch.Tensor | tuple[Callable, torch.Tensor] | None
    positions: torch.Tensor
    mask: torch.Tensor | dict[str, torch.Tensor]
    slots: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def laid_out(cls, cache: SlotCache, tokens, embeds, positions, mask) -> Block:
        """At the slots of `cache.plan`. What is no buffer is contiguous: a compiled function is made for the strides of its arguments, which are not
        checked again (`passes.unguarded`)."""
        slots, layers = cache.plan.slots, [layer.settled() for layer in cache.layers]
        given = tree_map_only(torch.Tensor, torch.Tensor.contiguous, (tokens, embeds, positions, mask, slots if len(tokens) > 1 else slots[0]))
        return cls(*given, [layer.keys for layer in layers], [layer.values for layer in layers])
