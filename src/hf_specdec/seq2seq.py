"""Encoder-decoder models: what the encoder has read, and the decoder as a model that is called like any other.

The encoder runs once a call. A draft model reads the target's encoder outputs if it has no encoder of its own, or the same one;
otherwise its own encoder runs once, on the same input. What a draft reads decides how often it is right, never what is committed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache
from transformers.modeling_outputs import BaseModelOutput, ModelOutput

from . import compat, parts
from .caches import refill
from .fixed_cache import Read
from .kinds import READ_BEFORE, READ_BESIDE
from .positions import blank
from .uploads import upload

BLIND = {"led"}  # decoders that look at no mask in a pass over one token
_READS = ("_maybe_prepare_encoder_kwargs_for_generation", "_prepare_encoder_decoder_kwargs_for_generation")  # since transformers 5.24, and before


@dataclass
class Source:
    """What an encoder has read, and what it has made of it.

    encoder: the module.
    inputs:  token ids int64 [B, S] or features (float); None where the call was given the outputs alone.
    mask:    int64 [B, S] or None.
    outputs: the encoder's `ModelOutput`.
    tokens:  per row, the text of `inputs` without padding; [] if the decoder has another vocabulary or there is no text.
    shared:  whose outputs these are: "" the model's own, else why they are the target's.
    blank:   the token that the decoder leaves out where it counts positions, within a pass; None for most.
    beside:  what else of the call the encoder has read, by the names that it has for it: images beside a text, where their words stand.
    """

    encoder: torch.nn.Module
    inputs: torch.Tensor | None
    mask: torch.Tensor | None
    outputs: Any
    tokens: list[list[int]]
    shared: str = ""
    blank: int | None = None
    beside: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel, inputs: torch.Tensor | None, model_kwargs: dict[str, Any], batch: int = 1, given: dict[str, Any] | None = None) -> Source:
        """What `generate` has prepared for `batch` rows of `model`: `inputs_tensor`, which it does not repeat for num_return_sequences, and its model inputs; `given`:
        what it was given itself, where that is known. Whisper, which does not read its mask, hands on that of the sounds that it began with, whichever are left and how
        often."""
        model, mask = compat.unwrap(model), model_kwargs.get("attention_mask")
        mask = None if mask is None or len(mask) != batch else mask
        if inputs is None or model_kwargs.get("inputs_embeds") is not None or (not inputs.is_floating_point() and int(inputs.min()) < 0):
            inputs = None  # generate() makes ids of -100 where it is given encoder_outputs; embeddings are those of one model
        elif len(inputs) < batch:
            inputs = inputs.repeat_interleave(batch // len(inputs), dim=0)
        text = inputs is not None and inputs.ndim == 2 and not inputs.is_floating_point() and parts.one_vocabulary(model)
        keep = torch.ones_like(inputs) if text and mask is None else mask
        tokens = [row[own.bool()].tolist() for row, own in zip(inputs, keep)] if text else []
        encoder = model.get_encoder()
        return cls(encoder, inputs, mask, model_kwargs["encoder_outputs"], tokens, blank=blank(model), beside=_beside(model, encoder, model_kwargs, batch, given))

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        at = upload(rows, self.outputs[0].device)
        self.inputs, self.mask = (part if part is None else part[at.to(part.device)] for part in (self.inputs, self.mask))
        self.beside = {name: part[at.to(part.device)] if torch.is_tensor(part) else part for name, part in self.beside.items()}
        self.outputs, self.tokens = each(self.outputs, lambda part: part[at]), [self.tokens[row] for row in rows] if self.tokens else []

    def for_draft(self, model: PreTrainedModel, traits: compat.ModelTraits) -> Source:
        """What the draft `model` reads. ValueError naming assistant_model if it cannot read this source."""
        model = compat.unwrap(model)
        if traits.encoder == "another's":
            if (width := self.outputs[0].shape[-1]) != model.config.hidden_size:
                raise ValueError(f"assistant_model: {type(model).__name__} has a width of {model.config.hidden_size} and no encoder of its own, and the "
                                 f"target's encoder has {width}. Pass a draft made for this target, or one with its own encoder.")
            return self._lent(model, "it has no encoder of its own")
        encoder = model.get_encoder()
        same = same_encoder(encoder, self.encoder)
        if same:
            return self._lent(model, same)
        name = f"assistant_model: {type(model).__name__}"
        if self.inputs is None:
            raise ValueError(f"{name} has an encoder of its own, and the call was given encoder_outputs of the target's, or embeddings. Pass the encoder's input "
                             f"instead ({self.encoder.main_input_name}), or a draft with the target's encoder.")
        if encoder.main_input_name != self.encoder.main_input_name:
            raise ValueError(f"{name} has an encoder that reads {encoder.main_input_name}, and the target's reads {self.encoder.main_input_name}. Pass a draft that "
                             f"reads what the target reads, or a decoder-only one.")
        bins, own = getattr(encoder.config, "num_mel_bins", None), 1 if encoder.config.model_type == "whisper" else -1
        if bins is not None and self.inputs.ndim == 3 and self.inputs.shape[own] != bins:
            raise ValueError(f"{name} reads features of {bins} mel bins, and these have {self.inputs.shape[own]}. Pass a draft that reads the "
                             f"target's features.")
        if not self.inputs.is_floating_point() and int(self.inputs.max()) >= encoder.get_input_embeddings().num_embeddings:
            raise ValueError(f"{name}: its encoder knows token ids below {encoder.get_input_embeddings().num_embeddings}, and the input has "
                             f"{int(self.inputs.max())}. Speculative decoding needs a draft with the target's tokenizer.")
        return self._read(model, encoder)

    def _lent(self, model: PreTrainedModel, why: str) -> Source:
        mask = None if self.mask is None else self.mask.to(model.device)
        outputs = each(self.outputs, lambda part: part.to(model.device, model.dtype if part.is_floating_point() else None, copy=True))  # Moonshine's decoder adds to them
        return Source(self.encoder, self.inputs, mask, outputs, self.tokens, why)

    def _read(self, model: PreTrainedModel, encoder: torch.nn.Module) -> Source:
        inputs = self.inputs.to(model.device, model.dtype) if self.inputs.is_floating_point() else self.inputs.to(model.device)
        mask = None if self.mask is None else self.mask.to(model.device)
        beside = {name: part.to(model.device, model.dtype if part.is_floating_point() else None) if torch.is_tensor(part) else part
                  for name, part in self.beside.items()}
        beside |= {} if mask is None else {"attention_mask": mask}
        if model.config.model_type in READ_BEFORE:
            read = next(getattr(model, name) for name in _READS if hasattr(model, name))
            outputs = read(inputs, beside, encoder.main_input_name, model.generation_config)["encoder_outputs"]
        else:
            outputs = encoder(**{encoder.main_input_name: inputs}, **beside, return_dict=True)
        return Source(encoder, inputs, mask, outputs, self.tokens)


class Decoder:
    """The decoder of `model` with its source: takes a decoder's own tokens and cache, as a decoder-only model does.

    cross: keys and values of the source, filled by the first pass. whole: those of all rows, also of such as have ended.
    """

    def __init__(self, model: PreTrainedModel, source: Source):
        self.model, self.source = model, source
        self.cross = self.whole = DynamicCache()
        self.cache: EncoderDecoderCache | None = None
        self.own = compat.unwrap(model).config.is_encoder_decoder
        self.given: Read | None = None

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **inputs):
        """attention_mask int64 [B, S]: of the decoder's own tokens. One that hides nothing says nothing that the model does not know."""
        cache = inputs.pop(compat.CACHE)
        if self.cache is None or self.cache.self_attention_cache is not cache:
            self.cache = EncoderDecoderCache(cache, self.cross)
        inputs |= {compat.CACHE: self.cache, "decoder_input_ids" if self.own else "input_ids": input_ids}
        if cache.plan.columns is not None:
            inputs["decoder_attention_mask" if self.own else "attention_mask"] = attention_mask
        if self.own and "position_ids" in inputs:
            inputs["decoder_position_ids"] = inputs.pop("position_ids")
        if self.own and self.source.mask is not None:
            inputs["attention_mask"] = self.source.mask
        return self.model(encoder_outputs=self.source.outputs, **inputs)

    def read(self) -> Read:
        """What compiled passes are given, after the first pass: contiguous, for what they are made for is not checked again."""
        if self.given is None:
            for layer in self.cross.layers:
                layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()
            mask = None if not self.own or self.source.mask is None or bool(self.source.mask.all()) else self.source.mask  # one that hides nothing says nothing
            self.given = Read(self.source.outputs[0].contiguous(), mask, [(layer.keys, layer.values) for layer in self.cross.layers], self.own)
        return self.given

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        self.given = None
        self.source.keep(rows)
        self.cross, self.cache = copy.copy(self.cross), None
        self.cross.layers = [copy.copy(layer) for layer in self.cross.layers]
        self.cross.batch_select_indices(upload(rows, self.source.outputs[0].device))

    def with_cross(self, cache: DynamicCache | StaticCache, made: EncoderDecoderCache) -> EncoderDecoderCache:
        """The cache that plain generate returns: the decoder's own `cache`, and that of the source, of the kind that transformers has `made`."""
        static = made.cross_attention_cache if isinstance(cache, StaticCache) else None
        return EncoderDecoderCache(cache, self.whole if static is None else refill(static, [(layer.keys, layer.values) for layer in self.whole.layers]))


def _beside(model: PreTrainedModel, encoder: torch.nn.Module, model_kwargs: dict[str, Any], batch: int, given: dict[str, Any] | None) -> dict[str, Any]:
    """What the encoder has read of a call beside its main input, of `batch` rows; of images that generate has read before it, those that it was `given`."""
    names = inspect.signature(encoder.forward).parameters.keys() - {"attention_mask", "encoder_outputs", "use_cache", compat.CACHE, encoder.main_input_name}
    known = {name: (given or {}).get(name) for name in READ_BESIDE.get(model.config.model_type, ())} | {name: model_kwargs.get(name) for name in names}
    found = {name: value for name, value in sorted(known.items()) if value is not None}
    return {name: value.repeat_interleave(batch // len(value), dim=0) if torch.is_tensor(value) and value.ndim and 0 < len(value) < batch else value
            for name, value in found.items()}


def each(outputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> ModelOutput:
    """Encoder outputs of the same class, with every tensor changed: some models ask theirs for more than hidden states (a mask, what routers said)."""
    outputs = outputs if isinstance(outputs, ModelOutput) else BaseModelOutput(last_hidden_state=outputs[0])
    return type(outputs)(**{name: change(part) for name, part in outputs.items() if torch.is_tensor(part)})


def same_encoder(one: torch.nn.Module, other: torch.nn.Module) -> str:
    """Why two encoders are the same: "the same module" or "equal parameters"; "" if they are not."""
    if one is other:
        return "the same module"
    ours, theirs = one.state_dict(), other.state_dict()
    alike = type(one) is type(other) and ours.keys() == theirs.keys() and all(
        (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) for a, b in zip(ours.values(), theirs.values()))
    return "equal parameters" if alike and all(a is b or torch.equal(a, b) for a, b in zip(ours.values(), theirs.values())) else ""
