"""A block of tokens as compiled passes are given it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from .fixed_cache import Held, Read

if TYPE_CHECKING:
    from .kv_cache import SlotCache


class Block(NamedTuple):
    """What a compiled pass over W places is given: tokens int64 [B, W], or embeds [B, W, H] in their place (None: there are none), positions int64 [B, W],
    mask float [B, 1, W, S] or one per layer type, slots int64 [W] of the one row, or [B, W], and what each layer holds. Of several passes, tokens [B, 1] are the
    first one's, and embeds are (make, states [B, 1, H]). read: what an encoder has read, for decoders that look at it."""

    tokens: torch.Tensor
    embeds: torch.Tensor | tuple[Callable, torch.Tensor] | None
    positions: torch.Tensor
    mask: torch.Tensor | dict[str, torch.Tensor | None] | None
    slots: torch.Tensor
    layers: list[Held]
    read: Read | None

    @classmethod
    def laid_out(cls, cache: SlotCache, tokens, embeds, positions, mask, read: Read | None = None) -> Block:
        """At the slots of `cache.plan`. What is no buffer is contiguous: a compiled function is made for the strides of its arguments, which are not
        checked again (`passes.unguarded`)."""
        slots = cache.plan.slots
        given = map(_contiguous, (tokens, embeds, positions, mask, slots if len(tokens) > 1 else slots[0]))
        return cls(*given, [layer.held() for layer in cache.layers], read)

    @property
    def kind(self) -> tuple:
        """What a function is made for, beside the shape of the block: the number format of the cache, how many layers there are, and what of an encoder."""
        return next((held.keys.dtype for held in self.layers if held.keys is not None), None), len(self.layers), self.read and self.read.mask is None

    def sizes(self, slots: bool, rows: bool = False) -> list[tuple[torch.Tensor, int]]:
        """The tensors that have a dimension of what an encoder has read, or, with `slots`, of the cache's slots, or, with `rows`, of rows and the tokens of each, with the
        number of that dimension."""
        read = [] if self.read is None else self.read.sizes()
        if not slots:
            return read
        masks = [part for part in (self.mask.values() if isinstance(self.mask, dict) else [self.mask]) if part is not None]
        buffers = [part for held in self.layers for part in (held.keys, held.values) if part is not None]
        found = [(part, 3) for part in masks] + [(part, 2) for part in buffers] + read
        if rows:
            given = [part for part in (self.tokens, self.embeds, self.positions, self.slots) if isinstance(part, torch.Tensor)]
            found += [(part, 0) for part in (*given, *masks, *buffers)] + [(part, 1) for part in given] + [(part, 2) for part in masks]
        return [(part, dim) for part, dim in found if part.shape[dim] > 1]


def _contiguous(part):
    """A tensor, or those in a tuple or a dict, as it lies in memory without gaps; anything else as it is."""
    if isinstance(part, torch.Tensor):
        return part.contiguous()
    if isinstance(part, tuple):
        return tuple(map(_contiguous, part))
    return {name: _contiguous(own) for name, own in part.items()} if isinstance(part, dict) else part
