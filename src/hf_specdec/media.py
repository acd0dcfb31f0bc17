"""What a prompt shows beside its text: images, videos, sounds. The pass over the prompt reads them, as the first pass of plain generate does; what comes
after it is text. transformers prepares that pass (5.10 up to 6)."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from . import compat
from .caches import CACHE, GOES_ON, cached_tokens
from .kinds import BOTH_WAYS
from .signatures import taken_by
from .uploads import upload

TRIED = {  # model types whose answers to what they are shown were compared with plain generate's
    "image": frozenset(
        "apertus1p5 aria aya_vision chameleon cohere2_vision cohere_compass deepseek_ocr2 deepseek_vl deepseek_vl_hybrid dots3_note emu3 "
        "ernie4_5_vl_moe exaone4_5 fast_vlm fuyu gemma3 gemma3n gemma4 gemma4_unified glm46v glm4v glm4v_moe glm5_next glm_ocr glmga got_ocr2 "
        "granite4_vision granite_docling hunyuan_vl hy_v4_vl hyperclovax_vision_v2 idefics2 idefics3 inkling2 internvl janus kimi_k25 lfm2_vl lfm3_vl "
        "lighton_ocr llama4 llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 "
        "mistral_large4 mllama molmo2 muse_glimmer muse_spark nemotron_h_omni ovis2 paddleocr_vl paligemma perception_lm phi4_multimodal "
        "pp_chart2table qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe "
        "qwen4_exp smolvlm step3p7 video_llama_3 video_llava vipllava".split()),
    "video": frozenset(
        "cohere_compass dots3_note glm5_next glmga hy_v4_vl hyperclovax_vision_v2 llava_next_video minimax_m3_vl perception_lm qwen2_5_vl qwen2_vl "
        "qwen3_5 qwen3_vl qwen4_exp video_llava".split()),
    "sound": frozenset(
        "apertus1p5 audioflamingo3 dots3_note fun_asr_nano gemma3n glmasr granite_speech granite_speech_plus moss_transcribe_diarize musicflamingo "
        "nemo_speechlm omniasr phi4_multimodal qwen2_audio qwen3_asr vibevoice_asr voxtral".split()),
}
if not GOES_ON:  # transformers before 5.17: these count positions by what they have kept of the first pass
    TRIED["image"] -= {"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"}
_HEARD = ("audio", "input_features", "feature_attention_mask", "input_values", "padding_mask", "sample", "speech")  # parts of the names of inputs that are sounds
_MARKS = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids")
_READ, _READS = "mm_encoder_outputs", "_maybe_prepare_encoder_kwargs_for_generation"  # since transformers 5.24, where a model has them
_SIGHT = ("patch_size", "spatial_patch_size", "temporal_patch_size", "spatial_merge_size", "in_channels", "num_channels", "num_mel_bins")
_COUNTS = ("_token_id", "_token_index", "_seq_length", "_seq_len", "scale_factor", "pool_stride", "pooling_ratio", "downsample_mode", "downsample_rate")  # how such names end
BY_COLUMNS = frozenset(("exaone4_5", "moss_transcribe_diarize", "vibevoice_asr"))  # plain generate() hands these no positions: they count padding, and a cache of theirs shows it
_LOOKED = ("cross_attention_mask",)  # what the tokens of a prompt look at, [B, P, ...]
_TEXT = frozenset(("attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "cache_position", "output_attentions", "output_hidden_states"))


def media_in(config: Any, model_kwargs: dict[str, Any], cached: int = 0) -> dict[str, Any]:
    """Of the model inputs that `generate` has prepared for the model of `config` those that are no text; {} where they say no more than that there is
    nothing behind the first `cached` tokens."""
    marks = _MARKS if hasattr(config, "vision_config") and not both_ways(config, cached) else _MARKS[:2]
    found = {name: value for name, value in model_kwargs.items() if name not in _TEXT and value is not None and not (isinstance(value, dict) and not value)}
    return found if any(name not in marks or bool(value[..., cached:].any()) for name, value in found.items()) else {}


def both_ways(config: Any, cached: int) -> bool:
    """Whether a prompt whose first `cached` tokens are in a cache gets a pass by itself whatever it shows, as its tokens see those behind them."""
    return config.model_type in BOTH_WAYS and not cached


def untried(config: Any, shown: dict[str, Any]) -> str | None:
    """The first of the inputs `shown` that nobody has tried on a model of this type; None where there is none."""
    read = {f"{kind} features": value for kind, value in (shown.get(_READ) or {}).items() if value is not None}
    for name in (*shown, *read):
        kind = "video" if "video" in name or name == "second_per_grid_ts" else "sound" if any(part in name for part in _HEARD) else "image"
        if name != _READ and name not in _MARKS and config.model_type not in TRIED[kind]:
            return name
    return None if any(config.model_type in types for types in TRIED.values()) else next(iter(shown), None)


@dataclass
class Media:
    """inputs: of the call, by the names that forward has for them. columns: per row, the places of its tokens in the padded prompts `tokens` int64 [B, P].
    positions: int64 [B, P], or [axes, B, P] where a model has several for an image; None where it takes none. raw: the arguments that
    `generate` was given, of before an encoder read them (transformers 5.24 runs it first); None where nobody has kept them."""

    model: PreTrainedModel
    inputs: dict[str, Any]
    tokens: torch.Tensor
    columns: list[list[int]]
    positions: torch.Tensor | None
    raw: dict[str, Any] | None = None

    def first_pass(self, tokens: torch.Tensor, begins: list[int], ends: list[int], cache: Any) -> dict[str, Any]:
        """The arguments of the pass over the prompts, int64 [B, W], of which row b stands at the places begins[b]..ends[b] - 1; the others are padding."""
        width, device = tokens.shape[1], tokens.device
        places, (first, last) = torch.arange(width, device=device), upload([begins, ends], device)[..., None]
        given = {name: self._laid_out(value, width, begins) for name, value in self.inputs.items()}
        given["attention_mask"] = None if min(ends) == width and not any(begins) else ((places >= first) & (places < last)).long()
        if self.positions is not None:
            beyond = places + upload(ahead(self.positions, self.columns, self.tokens.shape[1]), device)[:, None]
            given["position_ids"] = self._laid_out(self.positions, width, begins, beyond)
        positions = given.get("position_ids") if compat.unwrap(self.model).config.model_type in BY_COLUMNS else None
        given = self.model.prepare_inputs_for_generation(tokens, use_cache=True, is_first_iteration=True, **{CACHE: cache}, **given)
        given = given if positions is None else {**given, "position_ids": positions}  # they were dropped
        return {name: value.to(device) if torch.is_tensor(value) else value for name, value in given.items() if value is not None}

    def sight(self) -> dict[str, torch.Tensor]:
        """What tokens are told to look at of what is shown, [B, 1, ...] by name: behind a prompt what its last one is."""
        ends = torch.tensor([own[-1] for own in self.columns], device="cpu")
        return {name: value[torch.arange(len(ends)), ends.to(value.device)][:, None] for name, value in self.inputs.items() if name in _LOOKED}

    def _laid_out(self, value: Any, width: int, begins: list[int], beyond: torch.Tensor | int = 0) -> Any:
        """A tensor with a number for every token as the rows of a pass have them, `beyond` where the prompts have ended; anything else as it is."""
        shape = self.tokens.shape
        if any(value is self.inputs.get(name) for name in _LOOKED) and value is not None:  # with several numbers for every token
            return self._laid_out(value.flatten(2).permute(2, 0, 1), width, begins).permute(1, 2, 0).unflatten(2, value.shape[2:])
        numbered = torch.is_tensor(value) and (value is self.positions or not value.is_floating_point())  # positions may be fractions
        if not numbered or value.ndim < 2 or value.shape[-1] != shape[1] or value.shape[-2] not in (1, shape[0]):
            return value
        if width == shape[1] and all(len(own) == width for own in self.columns):
            return value
        laid = torch.zeros((*value.shape[:-2], shape[0], width), dtype=value.dtype, device=self.tokens.device) + torch.as_tensor(beyond, device=self.tokens.device)
        for b, own in enumerate(self.columns):
            laid[..., b, begins[b] : begins[b] + len(own)] = value[..., b if value.shape[-2] > 1 else 0, own]
        return laid.to(value.dtype)

    def for_draft(self, model: PreTrainedModel) -> Media | None:
        """The same for a draft `model` that sees what the target sees; None for one that reads the text alone, marks of images in it included."""
        own, seen, device = compat.unwrap(model), compat.unwrap(self.model), compat.device_of(model)
        given = self._as_given(own)
        if _kind(own) is not _kind(seen) or _eyes(own.config) != _eyes(seen.config) or not given:
            return None
        tokens, mask = self.tokens.to(device), torch.zeros_like(self.tokens, device=device)
        for b, columns in enumerate(self.columns):
            mask[b, columns] = 1
        copies = len(tokens) // self.prompts  # num_return_sequences
        prompts, mask = tokens[::copies], mask[::copies]
        given = {name: value.to(device, own.dtype if value.dtype == seen.dtype else value.dtype) if torch.is_tensor(value) else value
                 for name, value in given.items()}
        positions = None if self.positions is None else own._prepare_position_ids_for_generation(prompts, {**given, "attention_mask": mask})
        if hasattr(own, _READS):
            given = getattr(own, _READS)(prompts, given, "input_ids", own.generation_config)
        _, given = own._expand_inputs_for_generation(copies, input_ids=prompts, position_ids=positions, **given)
        return Media(model, given, tokens, self.columns, given.pop("position_ids", None))

    @property
    def prompts(self) -> int:
        """How many prompts were given."""
        return next((len(self.raw[name]) for name in ("input_ids", "inputs") if self.raw and self.raw.get(name) is not None), len(self.tokens))

    def _as_given(self, model: PreTrainedModel) -> dict[str, Any]:
        """The inputs that `model` can read; {} where there are none."""
        if self.raw is None:
            return {} if _READ in self.inputs else self.inputs
        names = taken_by(model).keys() - _TEXT - {"input_ids", "inputs_embeds", "labels"}
        return {name: value for name, value in self.raw.items() if name in names and value is not None}


_BY_IDS = frozenset(  # what else goes by the ids: embeddings of every layer, positions of the first pass
    "gemma4 gemma4_text gemma4_unified git camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod".split())


class Embedded(Media):
    """Prompts that are embeddings, inputs["inputs_embeds"] float [B, P, H]. tokens: what was passed beside them, or zeros."""

    def _laid_out(self, value: Any, width: int, begins: list[int], beyond: torch.Tensor | int = 0) -> torch.Tensor:
        laid = value.new_zeros((len(value), width, value.shape[-1]))
        for b, own in enumerate(self.columns):
            laid[b, begins[b] : begins[b] + len(own)] = value[b, own]
        return laid

    def for_draft(self, model: PreTrainedModel) -> Embedded | None:
        """The same for a draft that embeds tokens as the target does; None for another, which reads the tokens."""
        own, theirs = (compat.unwrap(each).get_input_embeddings().weight for each in (model, self.model))
        if own is not theirs and (own.shape != theirs.shape or not torch.equal(own.to(theirs), theirs)):
            return None
        embeds = {"inputs_embeds": self.inputs["inputs_embeds"].to(own)}
        return Embedded(model, embeds, self.tokens.to(own.device), self.columns, None)


def embedded(model: PreTrainedModel, input_ids: torch.Tensor, generation: Any, model_kwargs: dict[str, Any], traits: compat.ModelTraits) -> tuple:
    """input_ids int64 [B, P] and generation config of a call whose prompts are inputs_embeds, with or without ids beside them, and its other model inputs: without
    ids zeros stand for the embeddings, and lengths count them. ValueError naming the argument where nobody has tried it."""
    embeds, others = model_kwargs["inputs_embeds"], {name: value for name, value in model_kwargs.items() if name != "inputs_embeds"}
    if embeds.ndim != 3:
        raise ValueError(f"inputs_embeds: expected [B, L, H], got {list(embeds.shape)}.")
    name, positions = type(compat.unwrap(model)).__name__, others.get("position_ids")
    why = "an encoder reads them" if traits.encoder != "none" else \
        f"{name} makes its masks or positions itself, or carries states" if traits.own_positions and not traits.flash or traits.indexed else \
        f"{name} goes by ids beside them" if compat.unwrap(model).config.model_type in _BY_IDS else \
        f"{name} has several positions for a token" if positions is not None and positions.ndim > 2 else \
        f"a {CACHE} that holds tokens" if cached_tokens(others.get(CACHE)) else \
        f"they have {embeds.shape[1]} places and input_ids {input_ids.shape[1]}" if input_ids.shape[1] not in (0, embeds.shape[1]) else \
        next((f"{other} beside them" for other in media_in(compat.unwrap(model).config, others)), None)
    if why is not None:
        raise ValueError(f"inputs_embeds: not with speculative=True here ({why}). Pass input_ids alone, or use speculative=False.")
    if input_ids.shape[1]:
        return input_ids, generation, others
    generation = copy(generation)
    generation.max_length += embeds.shape[1]
    return input_ids.new_zeros(embeds.shape[:2]), generation, others


def ahead(positions: torch.Tensor | None, columns: list[list[int]], width: int) -> list[int]:
    """Per row, by how much the positions of what follows a prompt exceed the number of tokens before it: an image of many tokens may take few. positions:
    as `Media` has them, of all `width` columns or of the last ones, of every row or alike in all. ValueError where a prompt ends within an image."""
    if positions is None:
        return []
    axes = positions if positions.ndim == 3 else positions[None]
    ends = [axes[max(len(axes) - 3, 0) :, min(b, axes.shape[1] - 1), own[-1] - width].tolist() for b, own in enumerate(columns)]
    if any(len(set(each)) > 1 for each in ends):
        raise ValueError("input_ids: the prompt ends with an image, whose last token has several positions. Put a token of text behind it.")
    return [each[0] - len(own) + 1 for each, own in zip(ends, columns)]


def _kind(model: PreTrainedModel) -> type:
    """Its class, and not the one that `enable` has made of it."""
    return getattr(type(model), "__base_class__", type(model))


def _eyes(config: Any) -> list:
    """What decides how many tokens an image or a sound becomes, and which."""
    marks = [(name, value) for name, value in sorted(config.to_dict().items()) if name.endswith(_COUNTS)]
    parts = [getattr(config, name, None) for name in ("vision_config", "audio_config")]
    return [marks] + [[getattr(part, name, None) for name in _SIGHT] for part in parts]
