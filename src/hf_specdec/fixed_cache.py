"""The caches that compiled passes see: of fixed shapes, so that they know neither rows nor how long the text is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer
from transformers.modeling_outputs import BaseModelOutput


class Held(NamedTuple):
    """What a compiled pass is given of one layer: buffers for keys and values [B, H, S, D], which are written, and, of a layer that carries states, by number the
    inputs [B, C, n] that its convolutions have read, n as many as they see, and recurrent states [B, ...]. None: it has none."""

    keys: torch.Tensor | None
    values: torch.Tensor | None
    inputs: tuple[torch.Tensor | None, ...] = ()
    recurrent: tuple[torch.Tensor | None, ...] = ()


class FixedLayer(CacheLayerMixin):
    """The buffers of one layer inside a compiled pass: written at `slots` (int64 [Q] of the one row, or [B, Q]), read whole.

    taken: the states after the pass, where there are any (`FixedStates`).
    """

    is_compileable, is_sliding = True, False
    taken: tuple | None = None

    def __init__(self, held: Held, slots: torch.Tensor):
        super().__init__()
        self.held, self.keys, self.values, self.slots, self.is_initialized = held, held.keys, held.values, slots, True

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
        return 0 if self.keys is None else self.keys.shape[2], 0

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape


class FixedStates(FixedLayer, LinearAttentionLayer):
    """A layer that carries states inside a compiled pass, which leaves those that it is given alone. Convolutions record all their inputs; in the place of a recurrent
    state after several tokens may be what makes it (`recurrences.Told`)."""

    def __init__(self, held: Held, slots: torch.Tensor):
        LinearAttentionLayer.__init__(self, len(held.inputs))
        FixedLayer.__init__(self, held, slots)
        self.record_past = True
        for i, (inputs, state) in enumerate(zip(held.inputs, held.recurrent)):
            self.conv_states[i], self.recurrent_states[i] = inputs, None if state is None else state.clone()
            self.has_previous_state[i] = inputs is not None or state is not None

    @property
    def taken(self) -> tuple[tuple, tuple]:
        """By number, what convolutions have read, and recurrent states."""
        return tuple(self.conv_states.values()), tuple(self.recurrent_states.values())

    @taken.setter
    def taken(self, states: tuple[tuple, tuple]) -> None:
        self.conv_states, self.recurrent_states = (dict(enumerate(kind)) for kind in states)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        parts = self.conv_states[state_idx].transpose(1, 2), conv_states.transpose(1, 2)  # as `states.StateLayer` has it
        self.conv_states[state_idx] = torch.cat(parts, dim=1).transpose(1, 2)
        return self.conv_states[state_idx]

    def update_recurrent_state(self, recurrent_states, state_idx: int = 0, **kwargs):
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


def of_one_length(held: Iterable[Held], slots: torch.Tensor | None, *others: Any) -> bool:
    """Whether all buffers have as many slots as the first of them, and so have the masks [B, 1, W, S] among `others`, or by name in them; and as many rows as `slots` [B, W], if
    there are several. Where a compiler traces the question, one number stands for them all from here on: torch makes a tensor of every number that it gives a compiled
    function, in every pass."""
    buffers = [part for layer in held for part in (layer.keys, layer.values) if part is not None]
    if slots is not None and slots.dim() == 2 and any(part.shape[0] != slots.shape[0] for part in buffers):
        return False
    counts = [part.shape[2] for part in buffers]
    parts = [part for own in others for part in (own.values() if isinstance(own, dict) else [own])]
    counts += [part.shape[3] for part in parts if isinstance(part, torch.Tensor) and part.dim() == 4]
    return not any(size != counts[0] for size in counts)


def fixed(held: Held, slots: torch.Tensor) -> FixedLayer:
    return (FixedStates if held.inputs else FixedLayer)(held, slots)


class FixedCache(Cache):
    """The cache that a compiled pass sees, of what each layer holds. It does not know how long the text is; positions and masks are given."""

    def __init__(self, layers: list[FixedLayer]):
        super().__init__(layers=layers)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        return self.layers[layer_idx].update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> torch.Tensor:
        """Where the block begins, int64 []: layers of Inkling, which take no rows of unequal length, count distances from there."""
        return self.layers[layer_idx].slots.flatten()[0]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.layers[layer_idx].get_mask_sizes(query_length)


class CountingCache(FixedCache):
    """One that says where its block begins, int64 [], to decoders of an encoder's states, which count positions from there."""

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        return self.get_query_offset(layer_idx)


class Read(NamedTuple):
    """What a compiled pass is given of what an encoder has read: its states [1, S, H], which say how long that is, its mask int64 [1, S] or None, and per
    layer of the decoder keys and values of it, [1, H, S, D]. own: whether the encoder is a part of the model."""

    states: torch.Tensor
    mask: torch.Tensor | None
    cross: list[tuple[torch.Tensor, torch.Tensor]]
    own: bool

    def sizes(self) -> list[tuple[torch.Tensor, int]]:
        """The tensors that have a dimension of S, each with the number of that dimension."""
        return [(self.states, 1), *[(part, 2) for layer in self.cross for part in layer]] + ([] if self.mask is None else [(self.mask, 1)])

    def beside(self, cache: FixedCache) -> EncoderDecoderCache:
        """The cache of a pass whose own tokens go to `cache`."""
        both = EncoderDecoderCache(cache, FixedCache([FixedLayer(Held(*layer), cache.layers[0].slots) for layer in self.cross]))
        both.is_updated = dict.fromkeys(range(len(self.cross)), True)
        return both

    def inputs(self, tokens: torch.Tensor, mask: torch.Tensor) -> dict:
        """What else the model is given: tokens int64 [1, W] of the decoder, and a mask [1, 1, W, slots] of those that they see."""
        outputs = BaseModelOutput(last_hidden_state=self.states)
        if not self.own:
            return {"encoder_outputs": outputs, "input_ids": tokens, "attention_mask": mask}
        padding = {} if self.mask is None else {"attention_mask": self.mask}  # torch 2.7 traces no union of dicts
        return {"encoder_outputs": outputs, "decoder_input_ids": tokens, "decoder_attention_mask": mask, **padding}


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
    """What the cache of a compiled pass, keys and values of every layer, does not fit, and a device that these passes are not made for."""
    if model.device.type not in ("cpu", "cuda", "meta"):
        return f"its device is {model.device.type!r}, and compiled passes are made for \"cpu\" and \"cuda\""
    config = model.config.get_text_config()
    if getattr(config, "cross_attention_layers", None):
        return "it passes over layers where there is no image"
    return "it keeps the keys of an indexer, too" if "indexed_attention" in (getattr(config, "layer_types", None) or ()) else None
