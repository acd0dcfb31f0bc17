"""Everything that depends on the insides of transformers (5.10 up to 6): which processors look at the prefix, which masks a
model wants, and which models can be rolled back. Its caches are in `caches`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import CompileConfig, GenerationMixin, LogitsProcessor, PreTrainedModel
from transformers.generation import logits_process as lp

from . import assistants
from .caches import CACHE, INDEXED, OWN_CACHE, READ_IN_PIECES, states_of, strange_layers
from .flash import flash_of, why_not
from .kinds import BOTH_WAYS, ENCODER_DECODERS, GO_ON, HANDS_ON, ONE_MASK, OWN_MASK, OWN_MASK_BEFORE_SDPA, OWN_WAYS, OWN_WAYS_BEFORE
from .positions import max_positions, placed, writer
from .recurrences import begins_with_nothing
from .signatures import taken_by

# --- logits processors ------------------------------------------------------------------------------------------------

_PREFIX_FREE = (
    lp.TemperatureLogitsWarper, lp.TopKLogitsWarper, lp.TopPLogitsWarper, lp.MinPLogitsWarper, lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper, lp.EtaLogitsWarper, lp.InfNanRemoveLogitsProcessor, lp.LogitNormalization,
    lp.SuppressTokensLogitsProcessor, *filter(None, [getattr(lp, "TopHLogitsWarper", None)]),
)
_TENTATIVE_CALLS_BREAK = {  # and the argument that asks for each
    lp.UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale", lp.ClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    lp.WhisperNoSpeechDetection: "no_speech_threshold", lp.AlternatingCodebooksLogitsProcessor: "logits_processor",
}
SYNTHID, SYNTHID_STATE = lp.SynthIDTextWatermarkLogitsProcessor, lp.SynthIDTextWatermarkState
_COUNTED_FROM_THE_PADDED_START = {
    lp.MinLengthLogitsProcessor: "min_length", lp.MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    lp.ForcedEOSTokenLogitsProcessor: "max_length", lp.ExponentialDecayLengthPenalty: "regulation_start",
    lp.SuppressTokensAtBeginLogitsProcessor: "begin_index", lp.WhisperTimeStampLogitsProcessor: "begin_index", lp.RepetitionPenaltyLogitsProcessor: "prompt_ignore_length",
}


def is_prefix_free(processor: LogitsProcessor) -> bool:
    """Whether the processor looks at the scores alone, so that all nodes can go through it at once."""
    return type(processor) in _PREFIX_FREE


def that_keeps_a_state(processors: Sequence[LogitsProcessor]) -> tuple[str, str] | None:
    """Of the first processor with a state of its own, which tentative calls on drafted tokens would corrupt: the argument that asks for such a one, and
    its class; None without."""
    return next(((name, type(processor).__name__) for processor in processors for kind, name in _TENTATIVE_CALLS_BREAK.items() if isinstance(processor, kind)), None)


def processors_per_row(processors: Sequence[LogitsProcessor], input_ids: torch.Tensor, prompts: list[list[int]]) -> list[list[LogitsProcessor]]:
    """One list per row, for prefixes without padding: lengths that transformers counted from the padded start of input_ids [B, P]
    are shifted by the row's padding, and what belongs to one row is bound to it. prompts: the rows without padding."""
    if not processors:
        return []
    forced = any(isinstance(processor, lp.ForcedBOSTokenLogitsProcessor) for processor in processors)
    return [[_for_row(processor, row, input_ids, prompt, forced) for processor in processors] for row, prompt in enumerate(prompts)]


def _for_row(processor: LogitsProcessor, row: int, input_ids: torch.Tensor, prompt: list[int], forced: bool) -> LogitsProcessor:
    batch, pad = len(input_ids), input_ids.shape[1] - len(prompt)
    if isinstance(processor, lp.PrefixConstrainedLogitsProcessor) and batch > 1:
        own, allowed, index = copy.copy(processor), processor._prefix_allowed_tokens_fn, row // processor._num_beams
        own._prefix_allowed_tokens_fn, own._num_beams = lambda _, tokens: allowed(index, tokens), 1
        return own
    if isinstance(processor, (lp.EncoderRepetitionPenaltyLogitsProcessor, lp.EncoderNoRepeatNGramLogitsProcessor)):
        return _for_prompt(processor, row, input_ids, input_ids.new_tensor([prompt]))
    attribute = _COUNTED_FROM_THE_PADDED_START.get(type(processor))
    value = getattr(processor, attribute, None) if attribute else None
    if value is None or (pad == 0 and not torch.is_tensor(value)):
        return processor
    own = copy.copy(processor)
    pad -= attribute == "begin_index" and forced and len(prompt) == 1  # the text of such a row begins behind the forced token
    if torch.is_tensor(value) and value.ndim == 1 and len(value) == batch:
        value = value[row : row + 1]
    setattr(own, attribute, (value - pad).clamp(min=0) if torch.is_tensor(value) else max(value - pad, 0))
    return own


def _for_prompt(processor: LogitsProcessor, row: int, input_ids: torch.Tensor, prompt: torch.Tensor) -> LogitsProcessor:
    """A processor made of the padded prompts, one of which serves all its num_return_sequences rows, as if it were made of the row's
    `prompt` [1, L] alone. One that a user has made of something else keeps it, row by row."""
    own, padded = copy.copy(processor), input_ids[row : row + 1]
    if isinstance(processor, lp.EncoderRepetitionPenaltyLogitsProcessor):
        ids = (given := processor.encoder_input_ids)[row * len(given) // len(input_ids)][None]
        own.encoder_input_ids = prompt if torch.equal(ids, padded) else ids
        return own
    own.batch_size, own.generated_ngrams = 1, [processor.generated_ngrams[row * processor.batch_size // len(input_ids)]]
    of_padded, of_prompt = (lp.EncoderNoRepeatNGramLogitsProcessor(own.ngram_size, ids).generated_ngrams for ids in (padded, prompt))
    if own.generated_ngrams == of_padded:
        own.generated_ngrams = of_prompt
    return own


# --- what a model accepts ---------------------------------------------------------------------------------------------

_OWN_WAYS = OWN_WAYS | (OWN_WAYS_BEFORE if CACHE == "past_key_values" else {})


@dataclass(frozen=True)
class ModelTraits:
    """What the cached model has to know of a model, asked once.

    masks:          (key, kind, size) per mask: kind "full", "sliding" or "chunked"; key None where the model takes a single
                    mask, else the layer type under which it looks its mask up.
    own_positions:  the model makes its masks or positions itself, from lengths or a 2-D mask (ALiBi, GPT-Neo): chains only; of models
                    with states, those of one row.
    logits_to_keep: whether forward can be told which logits to compute.
    vocab_size:     number of logits.
    max_positions:  longest text, or None; of the decoder where there is an encoder, too.
    encoder:        "none", "own" (encoder-decoder models) or "another's" (decoders that read the outputs of an encoder they
                    do not have). With either, masks and positions are the model's own.
    states:         per layer, how many states it carries from token to token (`states.py`); () for models without any. With them,
                    too, masks of one row are the model's own.
    placed:         positions are given although masks are the model's own.
    flash:          it runs flash attention, which has masks of its own.
    indexed:        layers keep the keys of an indexer beside keys and values.
    own_cache:      it reads from a cache of its own kind (`own_cache.py`): chains, as with `states`; as a draft of one row.
    """

    masks: tuple[tuple[str | None, str, int], ...]
    own_positions: bool
    logits_to_keep: bool
    vocab_size: int
    max_positions: int | None
    encoder: str = "none"
    states: tuple[int, ...] = ()
    placed: bool = False
    flash: bool = False
    indexed: bool = False
    own_cache: bool = False

    @property
    def mask_name(self) -> str:
        """The argument that says what of a prompt is padding."""
        return "decoder_attention_mask" if self.encoder == "own" else "attention_mask"


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def traits_of(model: PreTrainedModel, role: str) -> ModelTraits:
    """Ask what `model` accepts. ValueError naming `role` ("target" or "assistant_model") and the remedy if it cannot be used."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{role}: expected a transformers model, got {type(model).__name__}. Load one with from_pretrained.")
    name, config = f"{role}: {type(model).__name__}", model.config.get_text_config()
    assistants.refuse_as_a_model(model, name)
    if not isinstance(model, GenerationMixin) and model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no head that writes tokens. Load it with AutoModelForCausalLM.from_pretrained.")
    _refuse_what_cannot_roll_back(model, config, name)
    forward, head = taken_by(model), model.get_output_embeddings()
    encoder, states = "own" if model.config.is_encoder_decoder else "another's" if "encoder_outputs" in forward else "none", states_of(model, config)
    masks, flash, own = _masks(config, bool(states)), flash_of(config), encoder == "own"
    own_mask = config.model_type in OWN_MASK or getattr(config, "alibi", False) or len(masks) > 1 and model.config.model_type in ONE_MASK \
        or config.model_type in OWN_MASK_BEFORE_SDPA and not model._supports_sdpa
    where = placed(model, forward) or model.config.model_type in HANDS_ON
    if flash and (why := why_not(model, config, {kind for _, kind, _ in masks}, encoder, states)):
        raise ValueError(f'{name} runs attn_implementation={flash!r}, which {why}. Call model.set_attn_implementation("sdpa") (or "eager").')
    return ModelTraits(
        masks=masks,
        own_positions=own_mask or encoder != "none" or not where or bool(states) or bool(flash),
        logits_to_keep="logits_to_keep" in forward and config.model_type not in READ_IN_PIECES,
        vocab_size=head.weight.shape[0] if torch.is_tensor(getattr(head, "weight", None)) else getattr(head, "out_features", config.vocab_size),
        max_positions=max_positions(model, config),
        encoder=encoder,
        states=states,
        placed=(own_mask or own or bool(states) or bool(flash)) and where,
        flash=bool(flash),
        indexed=INDEXED in (getattr(config, "layer_types", None) or ()) and not states,
        own_cache=bool(states) and config.model_type in OWN_CACHE,
    )


def _refuse_what_cannot_roll_back(model: PreTrainedModel, config: Any, name: str) -> None:
    kind = model.config.model_type
    if model.config.is_encoder_decoder and kind not in ENCODER_DECODERS | _OWN_WAYS.keys():
        raise ValueError(f"{name} is an encoder-decoder model of type {kind!r}, whose decoder nobody has tried to roll back; those that work are "
                         f"{sorted(ENCODER_DECODERS)}. Use speculative=False.")
    if (own := writer(model)) is not model:
        return _refuse_decoder(own, config, f"{name} with a decoder {type(own).__name__}")
    states, strange = states_of(model, config), strange_layers(config)
    if states and (config.model_type not in GO_ON | OWN_CACHE or begins_with_nothing(model)):
        raise ValueError(f"{name} carries a state from token to token, and nobody has seen it go on from there over several tokens as it does token by token (layers "
                         f"of Mamba 1 and of RecurrentGemma do where they run their own forward): it cannot be rolled back after a rejected token. Use speculative=False.")
    own_way = "reads the cache of its last loop itself" if getattr(config, "recurrent_kv_cache_mode", "") == "last_loop" else _OWN_WAYS.get(kind)
    unknown = getattr(model, "_is_stateful", False) and not getattr(config, "layer_types", None)
    if not states and not own_way and (unknown or strange):
        what = f"layers of type {strange}" if strange else "a recurrent state"
        raise ValueError(f"{name} has {what}, which cannot be rolled back after a rejected token. Use speculative=False.")
    if own_way or not states and not model.config.is_encoder_decoder and CACHE not in taken_by(model, CACHE):
        raise ValueError(f"{name} {own_way or f'takes no cache (no {CACHE}=)'}, so its passes cannot be ours. Use speculative=False.")
    if not model.config.is_encoder_decoder and kind not in BOTH_WAYS and _reads_both_ways(model, config):
        raise ValueError(f"{name} reads its text in both directions (is_decoder=False, is_causal=False or use_bidirectional_attention in its config), so a "
                         f"drafted token would change what is before it. Use speculative=False, or load it as a decoder.")
    attention = getattr(config, "_attn_implementation", None) or "eager"
    if "paged" in attention or "flex" in attention:
        raise ValueError(f"{name} runs attn_implementation={attention!r}, whose masks and cache are not ours to make. "
                         f'Call model.set_attn_implementation("sdpa") (or "eager").')


def _refuse_decoder(decoder: PreTrainedModel, config: Any, name: str) -> None:
    """Of a model that is composed of two."""
    _refuse_what_cannot_roll_back(decoder, config, name)
    if states_of(decoder, config) or "encoder_hidden_states" not in inspect.signature(decoder.forward).parameters:
        raise ValueError(f"{name} was not made to look at an encoder (no encoder_hidden_states=, or states from token to token). Use speculative=False.")
    if _reads_both_ways(decoder, config):
        raise ValueError(f"{name} reads its text in both directions (is_decoder=False, is_causal=False or use_bidirectional_attention in its config), so a "
                         f"drafted token would change what is before it. Use speculative=False, or load it as a decoder.")


def _reads_both_ways(model: PreTrainedModel, config: Any) -> bool:
    """Many configs carry an `is_decoder` that nothing heeds: it counts where a module has it, too."""
    if getattr(config, "use_bidirectional_attention", None) in (True, "all") or getattr(config, "is_causal", True) is False:
        return True
    return getattr(config, "is_decoder", True) is False and any(getattr(part, "is_decoder", True) is False for part in model.modules())


def own_mask_refusal(model: PreTrainedModel, role: str, branches: bool = False) -> str:
    """Why a model takes no ragged batch, or one that makes its own masks or carries states no `branches` of a tree."""
    model = unwrap(model)
    config = model.config.get_text_config()
    states, flash = states_of(model, config), flash_of(config)
    along = "keeps what it has read in a cache of its own kind, along one text" if states and config.model_type in OWN_CACHE else ""
    if branches:
        why = f"{along}, which" if along else "carries a state from token to token, which" if states else \
            f'runs attn_implementation={flash!r}, which goes along one text (call set_attn_implementation("sdpa")), which' if flash else \
            "makes its attention mask or positions itself (as encoder-decoders and ALiBi do), along one text, which"
        return f"{role}: {type(model).__name__} {why} branches of a tree cannot share. Propose chains, or use speculative=False."
    return (f"{role}: {type(model).__name__} {along or 'gives a row other logits in a ragged batch than alone'}, so rows that accept different numbers of tokens cannot "
            f"share a pass. Generate the rows one by one (batch size 1; num_return_sequences and num_beams make rows, too), or use speculative=False.")


def device_of(model: PreTrainedModel) -> torch.device:
    """Where its inputs go; of one whose weights are offloaded, where it runs."""
    if model.device.type != "meta":
        return model.device
    hooks = [hook for module in unwrap(model).modules() if (hook := getattr(module, "_hf_hook", None)) is not None]
    devices = [getattr(one, "execution_device", None) for hook in hooks for one in getattr(hook, "hooks", [hook])]
    return next((torch.device(device) for device in devices if device is not None), model.device)


def _masks(config: Any, states: bool = False) -> tuple[tuple[str | None, str, int], ...]:
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    sizes = {"full_attention": ("full", 0), "sliding_attention": ("sliding", window or 0), "chunked_attention": ("chunked", chunk or 0), INDEXED: ("full", 0)}
    if states:  # such models name the masks of their layers in ways of their own
        sliding = [(key, *sizes["sliding_attention"]) for key in ("sliding_attention", "hybrid_sliding")] if window else []
        return tuple((key, *sizes["full_attention"]) for key in ("full_attention", "hybrid")) + tuple(sliding)
    if getattr(config, "layer_types", None):
        return tuple((key, *sizes[key]) for key in sorted(set(config.layer_types)) if key in sizes)
    return ((None, "sliding", window),) if window is not None else ((None, "chunked", chunk),) if chunk is not None else ((None, "full", 0),)


# --- transformers' own beam search --------------------------------------------------------------------------------------

class _Beams(GenerationMixin):
    """A "model" for transformers' beam search that asks `logits`, and what is `shown` beside them, instead of running anything; there is no cache to reorder."""

    def __init__(self, model: PreTrainedModel, logits: Callable[[torch.Tensor], torch.Tensor], shown: Callable[[], dict[str, Any]]):
        self.config, self.logits, self.shown = unwrap(model).config, logits, shown

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs) -> dict[str, torch.Tensor]:
        return {"input_ids": input_ids}

    def __call__(self, input_ids: torch.Tensor, **kwargs) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits(input_ids)[:, None], **self.shown())

    def _prefill(self, input_ids: torch.Tensor, *args, **kwargs) -> SimpleNamespace:
        return self(input_ids)

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs: dict, *args, **kwargs) -> dict:
        return model_kwargs


def beam_search(model: PreTrainedModel, logits: Callable[[torch.Tensor], torch.Tensor], input_ids: torch.Tensor, processors, criteria, generation, shown: Callable, read: Any):
    """transformers' beam search over `logits`, int64 [B, L] -> [B, V], from prompts int64 [batch * num_beams, P]. shown: what else a step puts out; read: what an encoder has."""
    return GenerationMixin._beam_search(_Beams(model, logits, shown), input_ids, processors, criteria, generation, use_cache=True,
                                        encoder_outputs=read if isinstance(read, dict) else {})


def compiled_decoding() -> dict[str, Any]:
    """The arguments with which stock generate compiles its steps over a static cache, on a CPU, too."""
    config = CompileConfig()
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def mask_width(generation: Any, otherwise: int) -> int:
    """Columns of an attention mask that transformers has dropped because it hides nothing."""
    return getattr(generation, "_mask_length", otherwise)


def quantised_rows(cache: Any) -> int | None:
    """How many rows a `QuantizedCache` holds; None where it is empty."""
    return len(cache.layers[0]._dequantize(cache.layers[0]._quantized_keys)) if cache.layers[0].is_initialized else None
