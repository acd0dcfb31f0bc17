"""Attention masks of blocks that are no plain causal ones."""

from __future__ import annotations

import torch

from .tree import Tree


class CausalMasks:
    """Masks of chains that begin at the same slot in all rows. They are kept, and only the columns of the block are written: making them anew would take
    longer the longer the text is."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self.kept: dict[int, tuple[torch.Tensor, int]] = {}  # by width: a mask, and the slot where its last block began

    def mask(self, start: int, width: int, capacity: int) -> torch.Tensor:
        """Float [1, 1, width, start + width] for the block of `width` tokens from slot `start` on; capacity: slots that there are."""
        mask, last = self.kept.get(width, (None, 0))
        if mask is None or mask.shape[-1] < start + width:
            mask, last = torch.zeros((1, 1, width, capacity), dtype=self.dtype, device=self.device), 0
        mask[..., last : last + width] = 0
        mask[..., start : start + width] = torch.full((width, width), torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device).triu(1)
        self.kept[width] = mask, start
        return mask[..., : start + width]


def who_sees_whom(lengths: list[int], slots: torch.Tensor, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [B, 1, S] of the slots int64 [S], and the slots that every node of a tree sees, bool [B, N+1, S]: all of the past, and its own
    ancestors. Row b has lengths[b] tokens before the root."""
    starts, depths = torch.tensor(lengths, device=slots.device)[:, None], torch.tensor(tree.depths, device=slots.device)
    node = slots - starts
    inside = node.clamp(0, len(tree))
    seen = tree.ancestors.to(slots.device)[:, inside].transpose(0, 1) & (node <= len(tree))[:, None] | (node < 0)[:, None]
    return torch.where(node < 0, slots, starts + depths[inside])[:, None], seen


def additive(kind: str, size: int, seen: torch.Tensor, query: torch.Tensor, slot: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float mask [B, 1, Q, S] of the slots seen, bool [B, Q, S], by queries at positions `query` [B, Q, 1] of slots at `slot` [B, 1, S]: right under
    eager and sdpa attention alike, which boolean masks are not. kind: "full", or "sliding" or "chunked" windows of `size` tokens."""
    if kind == "sliding":
        seen = seen & (slot > query - size)
    elif kind == "chunked":
        seen = seen & (slot // size == query // size)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
