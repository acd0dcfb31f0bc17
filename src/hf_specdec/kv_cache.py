"""A key/value cache in which slot = position: the token at position t of row b lives in slot t of row b.

Rollback is nothing (the next write overwrites), a ragged batch has no holes, and sliding windows need no special storage:
what a query may see is said by the mask alone. Padding on the right of a block lands in slots that the row's next tokens
overwrite before any mask shows them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .fixed_cache import Held
from .uploads import upload

if TYPE_CHECKING:
    from .compiled import FixedBuffers

SLACK = 64
FEWEST = 256  # slots of a cache of fixed shapes


class SlotLayer(CacheLayerMixin):
    """Keys and values [B, H, capacity, D] of layer number `index`, written at the slots that the cache has laid out. indexer: a layer beside it for the
    keys by which some models (DeepSeek-V3.2) select what they attend to."""

    is_sliding = False
    is_compileable = False
    indexer: SlotLayer | None = None

    def __init__(self, plan: SlotPlan, index: int = 0):
        super().__init__()
        self.plan, self.index = plan, index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self._allocate("keys", key_states)
        self.values = self._allocate("values", key_states if value_states is None else value_states)
        self.is_initialized = True

    def _allocate(self, part: str, like: torch.Tensor) -> torch.Tensor:
        shape, buffers = (*like.shape[:2], self.plan.capacity, like.shape[3]), self.plan.buffers
        return torch.zeros(shape, dtype=like.dtype, device=like.device) if buffers is None else buffers.take((self.index, part), shape, like)

    def release(self) -> None:
        """The buffers are read no more."""
        if self.is_initialized and self.plan.buffers is not None:
            self.plan.buffers.give_back((self.index, "keys"), self.keys)
            self.plan.buffers.give_back((self.index, "values"), self.values)
        if self.indexer is not None:
            self.indexer.release()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, H, Q, D] at the planned slots; return everything up to the longest row, [B, H, visible, D], or after padding the block itself. Where the blocks of
        all rows are to end up in the same columns, every row's slots are moved to the right as far as it is shorter."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.settled()
        if (self.keys.dtype, self.values.dtype) != (key_states.dtype, value_states.dtype):  # a caller's cache in another dtype than the model
            self.keys, self.values = self.keys.to(key_states.dtype), self.values.to(value_states.dtype)
        visible, keys, values = self.plan.visible, self._write(self.keys, key_states), self._write(self.values, value_states)
        if self.plan.columns is not None:
            rows, slots = self.plan.rows.to(keys.device), self.plan.columns.to(keys.device)
            return tuple(part.transpose(1, 2)[rows, slots].transpose(1, 2) for part in (keys, values))
        return (key_states, value_states) if self.plan.padded else (keys[:, :, :visible], values[:, :, :visible])

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        """Write keys [B, Q, D] of the indexer at the planned slots; return all of them, [B, visible, D]."""
        self.indexer = self.indexer or SlotLayer(self.plan, -1 - self.index)
        return self.indexer.update(states[:, None], states[:, None, :, :0])[0][:, 0]

    def held(self) -> Held:
        """What a compiled pass is given."""
        return Held(self.settled().keys, self.values) if self.is_initialized else Held(None, None)

    def settled(self) -> SlotLayer:
        """The layer, with buffers of the planned capacity."""
        if self.keys.shape[2] < self.plan.capacity:
            self._move(self.keys, self.values)
        return self

    def _move(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Into buffers of the planned capacity."""
        new = self._allocate("keys", keys), self._allocate("values", values)
        for buffer, old in zip(new, (keys, values)):
            buffer[:, :, : old.shape[2]] = old
        self.release()
        self.keys, self.values = new

    def _write(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        plan = self.plan
        if plan.start is not None:
            buffer[:, :, plan.start : plan.start + plan.width] = states
        else:
            rows, slots = plan.rows.to(buffer.device), plan.slots.to(buffer.device)
            buffer.transpose(1, 2)[rows, slots] = states.transpose(1, 2).to(buffer.dtype)  # ten times faster than scatter_
        return buffer

    def gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Move slots source[b, i] to target[b, i] (int64 [B, n]) in every row: an accepted tree path goes into place."""
        source, target = source.to(self.keys.device), target.to(self.keys.device)
        for buffer in (self.keys, self.values):
            if len(target) == 1:  # half the time
                buffer.index_copy_(2, target[0], buffer.index_select(2, source[0]))
            else:
                by_slot = buffer.transpose(1, 2)
                by_slot[_rows(target), target] = by_slot[_rows(source), source]
        if self.indexer is not None:
            self.indexer.gather(source, target)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all other rows."""
        if self.is_initialized:
            rows = rows.to(self.keys.device)
            keys, values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
            if self.plan.buffers is None or keys.device.type == "cpu":
                self.keys, self.values = keys, values
            else:  # a graph may have been recorded with buffers of these shapes
                self._move(keys, values)
        if self.indexer is not None:
            self.indexer.keep(rows)

    def add(self, other: SlotLayer) -> None:
        """Take the rows of another layer in, behind these, in buffers of the planned capacity."""
        if not other.is_initialized:
            return
        more = [torch.nn.functional.pad(part, (0, 0, 0, self.plan.capacity - part.shape[2])) for part in (other.keys, other.values)]
        if self.is_initialized:
            self.settled()
            more = [torch.cat(parts) for parts in zip((self.keys, self.values), more)]
        self.dtype, self.device, self.is_initialized = other.dtype, other.device, True
        self.keys, self.values = more

    def row(self, b: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [H, length, D] of row b."""
        return self.keys[b, :, :length], self.values[b, :, :length]

    # what models and masks of transformers ask of a layer
    def get_seq_length(self) -> int:
        return self.plan.cached

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.plan.cached + int(query_length), 0

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape


class SeenLayer(SlotLayer):
    """Keys and values [B, H, n, D] of what prompts show, at which the text behind them goes on looking (Mllama): they come with the pass over the prompts, and stay."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states

    def gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """No token is here."""

    def keep(self, rows: torch.Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = (part.index_select(0, rows.to(part.device)) for part in (self.keys, self.values))

    def row(self, b: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All of it, [1, H, n, D]."""
        return self.keys[b : b + 1], self.values[b : b + 1]


def _rows(slots: torch.Tensor) -> torch.Tensor:
    """int64 [B, 1]: the row of every slot [B, n]."""
    return torch.arange(len(slots), device=slots.device)[:, None]


class SlotPlan:
    """Where the next block of tokens goes; shared by the layers of one cache.

    start:    first slot of the block where all rows have the same one, else None (then `slots` int64 [B, Q] of `rows` [B, 1] count).
    width:    Q, tokens per row in the block.
    visible:  slots that attention reads: the longest row with its block, or with `whole` all there are.
    cached:   slots before the block in the longest row; `starts`: where it begins in each.
    passes:   how many blocks have been laid out.
    padded:   whether blocks of texts of which nothing is cached begin with padding: with a slot below 0, which stands for one that is not seen.
    aligned:  whether blocks are to be seen in the same columns of all rows, by models that count columns; `columns` int64 [B, visible], where rows are unequal, are
              the slots that they are shown there: before a shorter row comes what a mask has to hide.
    capacity: slots per row that the buffers have, or will have at the next write.
    buffers:  where layers of fixed shapes get theirs from: the capacity is then a power of two, so that the shapes of a compiled pass are few.
    """

    def __init__(self, limit: int, buffers: FixedBuffers | None = None, aligned: bool = False):
        self.limit, self.buffers, self.aligned, self.capacity = limit, buffers, aligned, 0
        self.start: int | None = 0
        self.slots = self.columns = None
        self.rows: torch.Tensor | None = None
        self.width = self.visible = self.cached = self.passes = 0
        self.starts: list[int] = []
        self.whole = self.padded = False

    def lay(self, starts: list[int], width: int, device, whole: bool = False) -> None:
        """Plan a block of `width` tokens that begins at slot starts[b] in row b. The capacity grows by an eighth at a time,
        never beyond `limit` (longest row + drafted tokens). whole: attention reads all slots there are, and `slots` counts."""
        self.width, self.cached, self.whole, self.padded = width, max(starts), whole, min(starts) < 0
        self.starts, self.passes = list(starts), self.passes + 1
        self.visible = self.cached + width
        level = min(starts) == self.cached
        self.start, self.slots = self.cached if level else None, None
        if whole or not level:
            self.slots = upload(starts, device)[:, None] + torch.arange(width, device=device)
            self.rows = _rows(self.slots)
        self.columns = None
        if self.aligned and not level:
            self.columns = (torch.arange(self.visible, device=device) + (self.slots[:, :1] - self.cached)).clamp(min=0)
        if self.visible > self.capacity:
            self.capacity = max(self.visible, min(self.visible + max(SLACK, self.visible // 8), self.limit))
            if self.buffers is not None:
                self.capacity = max(FEWEST, 1 << (self.visible + SLACK - 1).bit_length())
        if whole:
            self.visible = self.capacity


class SlotCache(Cache):
    """A `transformers.Cache` of `SlotLayer`s. `limit`: most slots a row can ever need; buffers, aligned: as in `SlotPlan`; layer(plan, index, count): makes
    those that carry `count` states, of which `states` has one number a layer; seen: the layers that look at what prompts show; plain(plan, index): makes the others."""

    def __init__(self, limit: int, buffers: FixedBuffers | None = None, states: tuple[int, ...] = (), layer: type[SlotLayer] = SlotLayer,
                 aligned: bool = False, seen: tuple[int, ...] = (), plain: Callable[[SlotPlan, int], SlotLayer] = SlotLayer):
        super().__init__(layers=[])
        self.seen, self.plain = seen, plain
        self.plan = SlotPlan(limit, buffers, aligned)
        self.layers += [layer(self.plan, i, count) if count else plain(self.plan, i) for i, count in enumerate(states)]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        while len(self.layers) <= layer_idx:
            self.layers.append((SeenLayer if len(self.layers) in self.seen else self.plain)(self.plan, len(self.layers)))
        return self.layers[layer_idx].update(key_states, value_states)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all other rows."""
        for layer in self.layers:
            layer.keep(rows)

    def add(self, other: SlotCache) -> None:
        """Take the rows of another cache of the same model in, behind these."""
        self.plan.capacity = max(self.plan.capacity, other.plan.capacity)
        for index, layer in enumerate(other.layers):
            if index == len(self.layers):
                self.layers.append(SlotLayer(self.plan, index))
            self.layers[index].add(layer)

    def release(self) -> None:
        """The call is over: nobody reads the cache any more."""
        for layer in self.layers:
            layer.release()
        self.layers.clear()

    # --- a caller's own cache -------------------------------------------------------------------------------------------

    def load(self, layers: list[tuple[int, torch.Tensor, torch.Tensor, int]], columns: list[list[int]], device: torch.device) -> None:
        """Copy a caller's cache, as `caches.read_cache` has it, slot s of row b from its column columns[b][s]; its other columns are padding."""
        for index, keys, values, first in layers:
            held = [[column - first for column in row if column >= first] for row in columns]
            rows = [[part[b : b + 1, :, row] for part in (keys, values)] for b, row in enumerate(held)]
            width = max(map(len, held))
            padded = [torch.cat([torch.nn.functional.pad(part, (0, 0, 0, width - part.shape[2])) for part in parts]) for parts in zip(*rows)]
            self.plan.lay([len(row) - len(own) for row, own in zip(columns, held)], width, device)
            self.update(*padded, index)

    def row(self, b: int, length: int, last: bool) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """The first `length` slots of row b: keys and values [H, n, D] per layer, None of one that holds nothing; copies, unless it is the `last` that
        is asked of this cache and its buffers are nobody else's afterwards."""
        parts = [layer.row(b, length) if layer.is_initialized else None for layer in self.layers]
        return parts if last and self.plan.buffers is None else [part and (part[0].clone(), part[1].clone()) for part in parts]

    # --- what models and masks ask --------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0 of a layer behind the first that holds nothing: so Mllama's cross-attention sees, before transformers 5.24, that there is no image."""
        holds = layer_idx == 0 or layer_idx < len(self.layers) and self.layers[layer_idx].is_initialized
        return self.plan.cached if holds else 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.plan.cached

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.plan.cached + int(query_length), 0

    @property
    def capacity(self) -> int:
        """Slots per row that are allocated."""
        return self.plan.capacity
