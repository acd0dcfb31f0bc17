"""A `QuantizedCache` of one row, as plain generate fills it: the same tokens are quantised together, at the same moment, and none that was rejected is among them.

Transformers' layers hold a text quantised up to some token and what follows as it is, until that is `residual_length` tokens, which are then quantised with all before
them. Up to the token that makes it so many, every token sees the same: so a pass over several that ends there at the latest sees what each of them sees alone. Here they
stay apart until they are known to be committed; then transformers' own layer is given them.
"""

from __future__ import annotations

import copy
from sys import maxsize
from typing import Any

import torch

from .kv_cache import SlotLayer, SlotPlan

APART = 128  # most tokens that stay apart where a layer quantises each token by itself (fp8): it could be given them at once


class Quantised:
    """Of one call: transformers' `layers`, copies of those of the `cache` that it was given, which is written when the call ends.

    begun: whether the prompt has been read, of which nothing can be rejected.
    """

    def __init__(self, cache: Any):
        self.layers, self.begun = [QuantisedLayer(layer) for layer in cache.layers], False

    def layer(self, plan: SlotPlan, index: int, count: int = 0) -> QuantisedLayer:
        return self.layers[index].placed(plan, index, self)

    def room(self, length: int) -> int:
        """How many tokens behind `length` cached ones a pass may read: those up to the one with which transformers would quantise; first the prompt, by itself."""
        return min(layer.room(length) for layer in self.layers) if self.begun else 1

    def read(self, cache: Any) -> list:
        """Nothing of it has to be copied."""
        return []

    def hand_back(self, write: Any, into: Any, length: int) -> Any:
        """Put what is known of the first `length` tokens into a cache of transformers."""
        for layer, given in zip(self.layers, into.layers):
            layer.hand_over(length - layer.held)
            vars(given).update(vars(layer.inner))
        return into


class QuantisedLayer(SlotLayer):
    """`inner`: transformers' layer, of the first `held` tokens. keys, values [1, H, n, D]: of those behind, drafted ones included; whichever the next pass
    does not begin behind were rejected."""

    call: Quantised

    def __init__(self, inner: Any):
        self.inner, self.held = copy.copy(inner), int(inner.get_seq_length())  # its methods put other tensors in the place of those that it has

    def placed(self, plan: SlotPlan, index: int, call: Quantised) -> QuantisedLayer:
        super().__init__(plan, index)
        self.call = call
        return self

    def _left(self, apart: int) -> int:
        """How many tokens more `inner` would take without quantising them, with so many that are `apart` still: 0 or less, where it would by now."""
        unquantised = self.inner.keys.shape[-2] if self.inner.is_initialized and self.inner.keys.ndim == 4 else 0
        return getattr(self.inner, "residual_length", APART) - unquantised - apart

    def room(self, length: int) -> int:
        if not hasattr(self.inner, "residual_length"):
            return maxsize
        apart = length - self.held
        left = self._left(apart)
        return left if left > 0 else self.inner.residual_length if apart else 1  # full of a prompt: some versions of it quantise with the token that comes next

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, H, visible, D] as plain generate sees them at the first token of a block [1, H, Q, D]."""
        apart = self.plan.cached - self.held
        if not self.call.begun:
            self.held, self.is_initialized = self.held + key_states.shape[2], True
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            return self.inner.update(key_states, value_states)
        if apart and self._left(apart) <= 0:
            self.hand_over(apart)
            apart = 0
        self.keys, self.values = (torch.cat([own[:, :, :apart], new], dim=2) for own, new in ((self.keys, key_states), (self.values, value_states)))
        seen = copy.copy(self.inner)
        if hasattr(seen, "residual_length"):
            seen.residual_length = maxsize
        return seen.update(self.keys, self.values)

    def hand_over(self, count: int) -> None:
        """The first `count` tokens that are apart are committed."""
        ends = [0, count - 1, count] if self._left(count) <= 0 else [0, count]  # it looks, some versions of it before it takes what is new, at what it has
        for begin, end in zip(ends, ends[1:]):
            if begin < end:
                self.inner.update(self.keys[:, :, begin:end], self.values[:, :, begin:end])
        self.held, self.keys, self.values = self.held + count, self.keys[:, :, count:], self.values[:, :, count:]

    def gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        super().gather(source - self.held, target - self.held)

    def keep(self, rows: torch.Tensor) -> None:
        """There is one row."""

    def row(self, b: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`Quantised.hand_back` hands it back."""
        return self.keys[b, :, :0], self.values[b, :, :0]
