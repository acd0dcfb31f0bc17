"""Positions of the tokens of a block, and attention masks where it is no plain causal one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .kv_cache import SlotPlan
from .tree import Tree
from .uploads import upload

if TYPE_CHECKING:
    from .compat import ModelTraits


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
    starts, depths = upload(lengths, slots.device)[:, None], upload(tree.depths, slots.device)
    node = slots - starts
    inside = node.clamp(0, len(tree))
    seen = upload(tree.ancestors, slots.device)[:, inside].transpose(0, 1) & (node <= len(tree))[:, None] | (node < 0)[:, None]
    return torch.where(node < 0, slots, starts + depths[inside])[:, None], seen


def additive(kind: str, size: int, seen: torch.Tensor, query: torch.Tensor, slot: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float mask [B, 1, Q, S] of the slots seen, bool [B, Q, S], by queries at positions `query` [B, Q, 1] of slots at `slot` [B, 1, S]: right under
    eager and sdpa attention alike, which boolean masks are not. kind: "full", or "sliding" or "chunked" windows of `size` tokens."""
    if kind == "sliding":
        seen = seen & (slot > query - size)
    elif kind == "chunked":
        seen = seen & (slot // size == query // size)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


RECURRENT = ("linear_attention", "conv")  # layers that carry states look their mask up under these names


class Placing:
    """How a model is told where the tokens of a block are and what they see."""

    def __init__(self, traits: ModelTraits, dtype: torch.dtype, device: torch.device):
        self.traits, self.dtype, self.device = traits, dtype, device
        self.causal = CausalMasks(dtype, device)

    def __call__(self, plan: SlotPlan, lengths: list[int], width: int, tree: Tree | None, sizes: list[int], first: int = 0) -> dict:
        """position_ids int64 [B, width], counted in tokens, and attention_mask, for the block that `plan` has laid out: in row b, sizes[b] tokens of a
        chain, or nodes of `tree` from node `first` on, behind lengths[b] tokens (and, of a tree, those that come before)."""
        device, chain = self.device, tree is None or tree.is_chain
        if self.traits.own_cache and (len(sizes) > 1 or any(plan.pads)):
            return self._in_columns(plan, [length + first for length in lengths], width, sizes)
        if self.traits.states and (len(sizes) > 1 or plan.whole):  # else of one row, whose masks the model makes itself, which say the same
            return self._beside_states(plan, [length + first for length in lengths], width, sizes)
        if self.traits.states and not self.traits.placed:  # Mamba takes a mask for its block alone; there is no padding
            return {"attention_mask": None}
        if self.traits.own_positions and not (plan.whole and self.traits.encoder != "none"):  # compiled, decoders take a mask as others do
            return self._by_columns(plan, [length + first for length in lengths], width, sizes)
        level = plan.start is not None and min(sizes) == width  # all rows begin at the same slot, and none is padded
        if level and chain and not plan.whole and (width == 1 or plan.start == 0):  # the model's own causal mask says the same, at less cost
            positions = torch.arange(plan.start, plan.start + width, device=device)[None]
            return {"position_ids": positions.expand(len(sizes), -1), "attention_mask": None}
        depths = torch.arange(first, first + width, device=device) if chain else upload(tree.depths[first:], device)
        if level:
            positions = (depths + (plan.start - first))[None]
        else:
            deepest = [first + size - 1 if chain else max(tree.depths[: first + size]) for size in sizes]
            starts, last = upload([lengths, deepest], device)
            positions = starts[:, None] + torch.minimum(depths, last[:, None])
        if level and chain and not plan.whole and all(kind == "full" for _, kind, _ in self.traits.masks):
            mask = self.causal.mask(plan.start, width, plan.capacity).expand(len(sizes), -1, -1, -1)
            masks = {key: mask for key, _, _ in self.traits.masks}
            return {"position_ids": positions.expand(len(sizes), -1), "attention_mask": masks.get(None, masks)}
        slots = torch.arange(plan.visible, device=device)
        if chain:
            slot_positions, seen = slots[None, None], slots <= positions[..., None]
        else:
            slot_positions, seen = who_sees_whom(lengths, slots, tree)
            seen = seen[:, first:]
        masks = {key: additive(kind, size, seen, positions[..., None], slot_positions, self.dtype).expand(len(sizes), -1, -1, -1)
                 for key, kind, size in self.traits.masks}
        return {"position_ids": positions.expand(len(sizes), -1), "attention_mask": masks.get(None, masks)}

    def _by_columns(self, plan: SlotPlan, starts: list[int], width: int, sizes: list[int]) -> dict:
        """Of a model that makes its masks itself, from which columns [B, visible] hold tokens: those of the block, and before it as many as a row has. Flash
        attention needs no mask where all begin at the same slot; the positions of one row then go on in its padding: others would be those of several texts."""
        flash = self.traits.flash
        begins, last = upload([starts, [width] if flash and len(sizes) == 1 else sizes], self.device)[..., None]
        hidden = not flash or plan.columns is not None
        mask = {"attention_mask": (torch.arange(plan.visible, device=self.device) >= plan.cached - begins).long() if hidden else None}
        return mask | ({"position_ids": begins + torch.arange(width, device=self.device).minimum(last - 1)} if self.traits.placed else {})

    def _beside_states(self, plan: SlotPlan, starts: list[int], width: int, sizes: list[int]) -> dict:
        """Of several rows whose layers carry states. starts[b] < 0: the block begins with padding, which the model hides as it does in plain generate."""
        firsts, last = upload([starts, sizes], self.device)[..., None]
        places = torch.arange(width, device=self.device)
        positions = (firsts + torch.minimum(places, last - 1)).clamp(min=0)
        given = {"position_ids": positions} if self.traits.placed else {}
        if plan.padded:
            return given | {"attention_mask": (firsts + places >= 0).long()}
        slots = torch.arange(plan.visible, device=self.device)[None, None]
        masks = {key: additive(kind, size, slots <= positions[..., None], positions[..., None], slots, self.dtype) for key, kind, size in self.traits.masks}
        return given | {"attention_mask": masks | dict.fromkeys(RECURRENT) if self.traits.placed else None}

    def _in_columns(self, plan: SlotPlan, starts: list[int], width: int, sizes: list[int]) -> dict:
        """Of several rows whose cache is of its own kind: all blocks begin at the same column, and each row's padding is before its text, as in plain generate."""
        firsts, last, pads = upload([starts, sizes, plan.pads], self.device)[..., None]
        given, columns = {}, torch.arange(plan.visible, device=self.device)
        if self.traits.placed:
            given["position_ids"] = (firsts + torch.arange(width, device=self.device).minimum(last - 1)).clamp(min=0)
        whole = not any(plan.pads) and min(sizes) == width
        return given | {"attention_mask": None if whole else ((columns >= pads) & (columns < plan.cached + last)).long()}
