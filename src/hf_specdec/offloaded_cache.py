"""Keys and values in the host's memory, for `cache_implementation="offloaded"` and its kind: a device holds those of the layer that is running and of the next one.

A pass copies to the device what a layer's block may see, beside what the device computes for the layer before, and what is new to the host, in its place: nothing is
copied back that lies there already. Trees, rows that leave and a cache that grows are matters of the host alone.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import maxsize
from typing import Any
from weakref import WeakValueDictionary

import torch

from .caches import read_cache
from .kv_cache import SlotLayer, SlotPlan
from .states import StateLayer


class Lane:
    """Copies from the host to one device. On a GPU they have a stream of their own, which is never more than a layer ahead of what the device has been told to compute: so
    the memory that it takes is free again when the next copy takes it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.own = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, parts: list[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
        """Begin to copy the slots begin..end - 1 of `parts` [B, S, H, D], after all that the device has been told to write to them."""
        if self.own is None:
            return [part[:, begin:end].to(self.device) for part in parts]
        self.own.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.own):
            sent = [torch.empty((part.shape[0], end - begin, *part.shape[2:]), dtype=part.dtype, device=self.device) for part in parts]
            for into, part in zip(sent, parts):
                for row, own in zip(into, part):  # a row's slots lie together in memory: a copy that needs no other in between
                    row.copy_(own[begin:end], non_blocking=True)
        return sent

    def arrive(self) -> None:
        """What the device computes from here on waits for what has been sent."""
        if self.own is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.own)

    def settle(self) -> None:
        """The host waits until the device has written what it was told to."""
        if self.own is not None:
            torch.cuda.current_stream(self.device).synchronize()


class Host:
    """Of one cache: its layers and the lanes to their devices. windows: by layer, how many tokens before its own a token sees at most, where not all."""

    def __init__(self, device: torch.device, windows: dict[int, int]):
        self.pins, self.windows, self.last = device.type == "cuda", windows, -1
        self.layers: WeakValueDictionary[int, OffloadedLayer] = WeakValueDictionary()
        self.lanes: dict[torch.device, Lane] = {}

    def layer(self, plan: SlotPlan, index: int, count: int = 0) -> OffloadedLayer:
        """One that carries `count` states, which stay on the device, beside keys and values."""
        made = self.layers[index] = OffloadedStateLayer(plan, index, count) if count else OffloadedLayer(plan, index)
        made.host, self.last = self, max(self.last, index)
        return made

    def send_next(self, index: int) -> None:
        """Send what the first layer behind number `index` needs that keeps keys and values."""
        for later in range(index + 1, self.last + 1):
            layer = self.layers.get(later)
            if layer is not None and layer.is_initialized:
                layer.send()
                return

    begun = True  # nothing is read apart

    def room(self, length: int) -> int:
        """There is room for what a device has room for."""
        return maxsize

    def read(self, cache: Any) -> list:
        """As `read_cache` has it, of a caller's cache, which may have been moving."""
        if self.pins:
            torch.cuda.synchronize()
        return read_cache(cache)

    def hand_back(self, write: Callable[[Any], Any], into: Any, length: int) -> Any:
        """The cache that `write(into)` makes, as transformers leaves an offloaded one between two passes: keys and values are the host's, but for those of the first layer that it
        fetches and, in some caches, of layers with a window."""
        for layer in () if into is None else into.layers:
            _place(layer, torch.device("cpu"), True)
        cache = write(into)
        if into is None:
            return cache
        devices = {index: layer.device for index, layer in self.layers.items() if layer.is_initialized}
        first = True
        for index, layer in enumerate(cache.layers):
            if index in devices:
                stays = layer.is_sliding and getattr(cache, "only_non_sliding", False)
                _place(layer, devices[index], first or stays)
                first &= stays
        return cache

    def lane(self, device: torch.device) -> Lane:
        if device not in self.lanes:
            self.lanes[device] = Lane(device)
        return self.lanes[device]


class OffloadedLayer(SlotLayer):
    """`keys` and `values` [B, H, capacity, D] are the host's, a row's slots one after the other in memory. device: where they are read.

    sent: what is on its way to the device or there, [B, n, H, D] each, from which slot on, and the pass that it is for.
    """

    host: Host
    sent: tuple[list[torch.Tensor], int, int] | None = None

    def _allocate(self, part: str, like: torch.Tensor) -> torch.Tensor:
        rows, heads, _, size = like.shape
        made = torch.zeros((rows, self.plan.capacity, heads, size), dtype=like.dtype, device="cpu")
        return (made.pin_memory() if self.host.pins else made).transpose(1, 2)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SlotLayer.update`; meanwhile what the next layer needs is sent."""
        if self.is_initialized:
            self.device = key_states.device
            if (self.keys.dtype, self.values.dtype) != (key_states.dtype, value_states.dtype):
                self._move(self.keys.to(key_states.dtype), self.values.to(value_states.dtype))
            self.send()
            self.host.lane(self.device).arrive()
            self.host.send_next(self.index)
        seen = super().update(key_states, value_states, *args, **kwargs)
        self.sent = None
        return seen

    def send(self) -> None:
        """Begin to copy to the device what the planned block may see of what comes before it, unless that has begun."""
        plan, window = self.plan, self.host.windows.get(self.index)
        known = self.sent is not None and self.sent[2] == plan.passes and self.sent[0][0].device == self.device
        if known or plan.padded or not plan.cached:
            return
        begin = max(min(plan.starts) - window, 0) if window else 0
        self.sent = self.host.lane(self.device).send([part.transpose(1, 2) for part in (self.keys, self.values)], begin, plan.cached), begin, plan.passes

    def _write(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Write a block of `states` [B, H, Q, D] to the host; [B, H, visible, D] on the device, with zeros where nothing is in sight."""
        plan, held, block = self.plan, buffer.transpose(1, 2), states.transpose(1, 2).contiguous()
        for own, new, start in zip(held, block, plan.starts):  # before slot 0 is padding
            own[max(start, 0) : start + plan.width].copy_(new[max(-start, 0) :], non_blocking=self.host.pins)
        if self.sent is None:
            return states
        (keys, values), begin, _ = self.sent
        seen = states.new_zeros((*states.shape[:2], plan.visible, states.shape[3]))
        seen[:, :, begin : plan.cached] = (values if buffer is self.values else keys).transpose(1, 2)
        return super()._write(seen, states)

    # what the host does with them
    def _move(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.settle()
        super()._move(keys, values)

    def gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.settle()
        super().gather(source, target)

    def keep(self, rows: torch.Tensor) -> None:
        if self.is_initialized:
            self.settle()
            self._move(*(part.index_select(0, rows.to("cpu")) for part in (self.keys, self.values)))
        if self.indexer is not None:
            self.indexer.keep(rows)

    def row(self, b: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.settle()
        return super().row(b, length)

    def settle(self) -> None:
        """What was copied from the device is there."""
        self.host.lane(self.device).settle()


def _place(layer: Any, device: torch.device, whole: bool) -> None:
    """`device` is where a layer of transformers' is read from now on. whole: its keys and values go there, too."""
    if getattr(layer, "keys", None) is None:
        return
    layer.device = device
    for name, part in vars(layer).items():
        if isinstance(part, torch.Tensor) and (part.ndim == 0 or whole and name in ("keys", "values")):
            setattr(layer, name, part.to(device))


class OffloadedStateLayer(OffloadedLayer, StateLayer):
    """Its states stay on the device."""
