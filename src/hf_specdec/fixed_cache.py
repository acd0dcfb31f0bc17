"""The caches that compiled passes see: of fixed shapes, so that they know neither rows nor how long the text is."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin


class FixedLayer(CacheLayerMixin):
    """The buffers of one layer inside a compiled pass: written at `slots` (int64 [Q] of the one row, or [B, Q]), read whole."""

    is_compileable, is_sliding = True, False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor):
        super().__init__()
        self.keys, self.values, self.slots, self.is_initialized = keys, values, slots, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            states = states.to(buffer.dtype)
            if self.slots.ndim == 1:
                buffer.index_copy_(2, self.slots, states)
            else:
                rows = torch.arange(len(self.slots), device=self.slots.device)[:, None]
                buffer.transpose(1, 2)[rows, self.slots] = states.transpose(1, 2)
        return self.keys, self.values

    def lazy_initialization(self, *args, **kwargs) -> None:
        """There is nothing to make."""

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape


class FixedCache(Cache):
    """The cache that a compiled pass sees: keys and values [B, H, S, D] per layer. It does not know how long the text is; positions
    and masks are given."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor], slots: torch.Tensor):
        super().__init__(layers=[FixedLayer(key, value, slots) for key, value in zip(keys, values)])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        return self.layers[layer_idx].update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.layers[layer_idx].get_mask_sizes(query_length)


class OneLayer(FixedCache):
    """A cache of one layer, whatever number it is asked by."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        return self.layers[0].update(key_states, value_states)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.layers[0].get_mask_sizes(query_length)


class EmptyCache(Cache):
    """A cache before the first token of a text, which keeps the keys and values that one layer gives it."""

    def __init__(self):
        super().__init__(layers=[])
        self.states: tuple = ()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        self.states = key_states, value_states
        return self.states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


def why_not_compiled(model: PreTrainedModel) -> str | None:
    """What the cache of a compiled pass, keys and values of every layer, does not fit."""
    config = model.config.get_text_config()
    if getattr(config, "cross_attention_layers", None):
        return "it passes over layers where there is no image"
    return "it keeps the keys of an indexer, too" if "indexed_attention" in (getattr(config, "layer_types", None) or ()) else None
