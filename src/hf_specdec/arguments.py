"""What a speculative call may be asked for: everything that can be refused is refused here, by name and before any forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from math import ceil
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel, QuantizedCache

from . import compat, lengths
from .caches import cached_tokens, check_cache, check_implementation, check_quantised, offloads, read_cache, seeing, static_in
from .config import SpeculativeConfig, instead_of
from .drafts.base import Draft
from .hints import meant, nearest, what
from .kinds import COMPOSED, READ_BESIDE
from .media import both_ways, media_in, untried
from .per_token import check_per_token
from .positions import counting
from .probe import check_batch, check_mode, check_own_cache, check_source
from .signatures import taken_by

# Arguments that ask transformers for another way of decoding, and what to do instead.
_OTHER_WAYS = {
    "prompt_lookup_num_tokens": "speculative=True looks the prompt up where it is given no draft. Drop it, and say num_assistant_tokens for a fixed K.",
    "assistant_early_exit": "the model's first layers are a draft, assistant_model=EarlyExitDraft(model, layers) from hf_specdec.drafts.early_exit. Pass that, and drop it.",
    "use_mtp": "the prediction module of the model's own checkpoint drafts with speculative={\"draft\": \"mtp\"}. Say that, and drop it.",
    "assistant_ensemble_weight": "a mixture with the draft's law is another law than the model's. Drop it, or say lenience=... for a text that may differ.",
    "penalty_alpha": "contrastive search is another way of decoding. Drop it, or use speculative=False.",
    "dola_layers": "DoLa is another way of decoding. Drop it, or use speculative=False.",
    "token_healing": "the tokenizer does not reach transformers. Heal the prompt first, input_ids = model.heal_tokens(input_ids, tokenizer), and drop it.",
    "constraints": "constrained beam search is another way of decoding. Drop it, or use speculative=False.",
    "force_words_ids": "constrained beam search is another way of decoding. Drop it, or use speculative=False.",
}
# Arguments that tune transformers' own drafting. A model's own config may carry them, so they are refused where the caller gives them.
_FILLED = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.4, "assistant_lookbehind": 10, "target_lookbehind": 10}
_OTHER_TUNING = dict.fromkeys((*_FILLED, "max_matching_ngram_size"), "num_assistant_tokens says how many tokens are drafted") | {
    "assistant_confidence_threshold": 'speculative={"draft_stop": "confidence", "draft_confidence": ...} stops a draft that is less sure of a token'}

# Arguments that transformers does not hand to a `custom_generate`, and where a `SpeculativeDecoder` takes them.
_NOT_HANDED_ON = {"assistant_model": "draft", "streamer": "streamer=...", "stop_strings": "stop_strings=..., tokenizer=...",
                  "assistant_tokenizer": "tokenizer=..., assistant_tokenizer=...",
                  **{name: f'config={{"{name}": ...}}' for name in ("num_assistant_tokens", "lenience", "acceptance")}}
_OPTIONS = [field.name for field in fields(SpeculativeConfig)]


def goes_into(argument: str, name: Any) -> str:
    """What an error about an unknown argument `name` ends with: how `argument` takes the draft or the option that was probably meant; "" for none."""
    option = nearest(name, [*_OPTIONS, "assistant_model"]) if isinstance(name, str) else None
    return "" if option is None else ": pass assistant_model=..." if option == "assistant_model" else f': pass {argument}={{"{option}": ...}}'


def check_said_once(speculative: Any, options: dict[str, Any]) -> None:
    """ValueError for an option that a dict and a keyword say differently."""
    said = speculative if isinstance(speculative, dict) else {}
    for name, value in options.items():
        if value is not None and name in said and said[name] != value:
            raise ValueError(f"{name}={value!r} and speculative={{\"{name}\": {said[name]!r}}} contradict each other. Say it once.")


def check_names(kwargs: dict[str, Any], model) -> None:
    """ValueError for an argument that neither `generate` nor the model has but that resembles one of ours: transformers would only say that it is unknown."""
    ours = ["speculative", *_OPTIONS, "assistant_model", "max_new_tokens"]
    taken = {*ours, *inspect.signature(GenerationMixin.generate).parameters, *taken_by(model)}
    for name in kwargs:
        if name not in taken and not hasattr(model.generation_config, name) and nearest(name, ours):
            raise ValueError(f"{name} is no argument of generate(){meant(name, ours)}.")


def check_draft(draft: Any, argument: str, options: str) -> None:
    """TypeError for what is neither a model nor a draft. argument, options: where it was passed, and where options go."""
    if draft is not None and not isinstance(draft, Draft) and not isinstance(compat.unwrap(draft), PreTrainedModel):
        raise TypeError(f"{argument}: expected a transformers model or a hf_specdec Draft, got {what(draft)}.{instead_of(draft, options)}")


def check_hook(kwargs: dict[str, Any], own) -> None:
    """`generate(custom_generate=SpeculativeDecoder(...))` without `speculative=`."""
    for name, place in _NOT_HANDED_ON.items():
        if kwargs.get(name) is not None or given_in_config(kwargs, own, name) is not None:
            raise ValueError(f"{name}: transformers does not hand it to custom_generate. Pass custom_generate=SpeculativeDecoder({place}), or use "
                             f"speculative=True in the place of custom_generate.")


def given_in_config(kwargs: dict[str, Any], own, name: str) -> Any:
    """What the caller's `generation_config` says of `name`; None if the model's own says so, too, or one of transformers' pipelines has filled it in."""
    config = kwargs.get("generation_config")
    value, filled = getattr(config, name, None), all(getattr(config, other, None) == default for other, default in _FILLED.items())
    filled = filled and value == {**_FILLED, "num_assistant_tokens": 20}.get(name)
    return None if filled or value == getattr(own, name, None) else value


def _check_options(kwargs: dict[str, Any], own) -> None:
    """ValueError for an option of `SpeculativeConfig` that is passed to `generate` (those that it takes beside `speculative=` are gone by now), or set in a
    `GenerationConfig`, other than transformers' own num_assistant_tokens."""
    given = {name: given_in_config(kwargs, own, name) for name in _OPTIONS if name != "num_assistant_tokens"}
    given |= {name: kwargs[name] for name in _OPTIONS if kwargs.get(name) is not None}
    for name, value in given.items():
        if value is None:
            continue
        if name == "draft" and not isinstance(value, str):
            raise ValueError(f"draft={type(value).__name__}: a draft or a model is passed as assistant_model; draft is the name of one, "
                             f"speculative={{\"draft\": \"prompt_lookup\"}}.")
        raise ValueError(f"{name} is an option of the config: pass speculative={{\"{name}\": {value!r}}}.")


def check_arguments(kwargs: dict[str, Any], model) -> None:
    """What `generate` was called with, before transformers does anything with it."""
    _check_options(kwargs, own := model.generation_config)
    for name in ("inputs", "input_ids"):
        given = kwargs.get(name)
        if given is not None and (not torch.is_tensor(given) or given.ndim < 2):
            shape = f"a Tensor of the shape {list(given.shape)}" if torch.is_tensor(given) else what(given)
            raise TypeError(f'{name}: expected token ids int64 [B, L], got {shape}. Pass **tokenizer(text, return_tensors="pt").')
    check_source(model, kwargs)
    if len(kwargs.get("adapter_names") or ()) > 1:
        raise ValueError("adapter_names: rows leave a batch as they end, which an adapter per row does not survive. Generate the rows of one adapter at a "
                         "time, with set_adapter, or use speculative=False.")
    if kwargs.get("synced_gpus"):
        raise ValueError("synced_gpus=True: devices that share every pass would need the same number of them, and how many a text takes depends on what is "
                         "accepted. Give every device a whole model and drop it, or use speculative=False.")
    for name, instead in _OTHER_TUNING.items():
        value = kwargs.get(name, given_in_config(kwargs, own, name))
        if value is not None:
            raise ValueError(f"{name}={value!r}: this tunes transformers' own assisted decoding and means nothing to speculative=True. Drop it; {instead}.")
    config = kwargs.get("generation_config")
    for option in (kwargs.get, lambda name: getattr(config, name, None)):
        _check_way_of_decoding(option, own)
    name = kwargs.get("cache_implementation") or getattr(config or own, "cache_implementation", None) or own.cache_implementation
    check_implementation(name, _in_own_config("cache_implementation", name, own))
    _check_way_of_decoding(lambda name: None if name in kwargs or getattr(config, name, None) is not None else getattr(own, name, None), own)


def _in_own_config(name: str, value: Any, own) -> str:
    """What a refusal of `value` ends with where the model's own generation config asks for it, too."""
    if value is None or value != getattr(own, name, None):
        return ""
    return f" It is set in model.generation_config: model.generation_config.{name} = None takes it away."


def _check_way_of_decoding(option: Callable[[str], Any], own) -> None:
    for name, remedy in _OTHER_WAYS.items():
        if option(name):
            raise ValueError(f"{name}={option(name)!r}: {remedy}{_in_own_config(name, option(name), own)}")


def _check_processors(processors, generation, own) -> None:
    """Refuse, by name, processors with a state of their own."""
    argument, kind = compat.that_keeps_a_state(processors) or (None, None)
    if argument is None:
        return
    name = argument if (value := getattr(generation, argument, None)) is not None else "logits_processor"  # an instance of the caller's own
    raise ValueError(f"{name}: {kind} keeps a state from call to call, and drafted tokens that are rejected would corrupt it. Drop it, or generate with "
                     f"speculative=False.{_in_own_config(argument, value, own)}")


def check_draft_stop(draft: Draft, config: SpeculativeConfig) -> None:
    """ValueError for a `draft_stop` by confidence where the draft does not go token by token, with a probability of each."""
    if config.draft_stop in ("confidence", "expected_gain") and not draft.stops:
        raise ValueError(f"draft_stop={config.draft_stop!r}: the draft {draft.name!r} does not draft token by token with a confidence of its "
                         f'own. Pass a smaller model as assistant_model, or leave draft_stop="constant" (or "heuristic").')


def check_call(model, input_ids, processors, generation, model_kwargs: dict, traits: compat.ModelTraits, config: SpeculativeConfig) -> dict | None:
    """What transformers has made of the call, its model's own config included. Returns what is shown beside the text, None where prompts need no pass of their own."""
    check_mode(model, "target")
    model = compat.unwrap(model)
    own = model.generation_config
    _check_beams(generation)
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError("input_ids: the prompt is empty; give at least one row, and at least one token per row.")
    _check_way_of_decoding(lambda name: getattr(generation, name, None), own)
    check_implementation(generation.cache_implementation, _in_own_config("cache_implementation", generation.cache_implementation, own))
    if generation.use_cache is False and model.config.model_type == "cpmant":
        raise ValueError(f"use_cache=False: without its cache {type(model).__name__} lets every token look at those behind it, in plain generate(), so its passes cannot be ours. "
                         f"Drop it, or use speculative=False.")
    cache, cached = model_kwargs.get(compat.CACHE), 0
    check_per_token(generation, traits, len(input_ids), static_in(cache) is not None)
    if cache is not None and traits.encoder != "own":
        if generation.use_cache is False:
            raise ValueError(f"use_cache=False beside {compat.CACHE}: plain generate() would read the whole text anew for every token, behind what is cached. Pass one of the two.")
        if offloads(cache) and traits.own_cache:
            raise ValueError(f"{compat.CACHE}: what {type(model).__name__} has read is of a kind of its own, and stays on its device. Pass a cache that is not offloaded, or none and no "
                             f"cache_implementation.")
        if not isinstance(cache, QuantizedCache):
            check_cache(cache, model.config, input_ids.shape[0], ceil(generation.max_length) - 1)
        cached = cached_tokens(cache)
    shown = _check_inputs(model.config, model_kwargs, traits, cached)
    mask, positions = model_kwargs.get(traits.mask_name), model_kwargs.get("position_ids")
    _check_mask(mask, generation, input_ids.shape, cache, traits)
    real = torch.ones_like(input_ids).bool() if mask is None else mask[:, -input_ids.shape[1]:].bool()
    if isinstance(cache, QuantizedCache):
        check_quantised(cache, compat.quantised_rows(cache), model, real, bool(traits.states or traits.own_cache or traits.indexed or traits.encoder != "none"))
    longest = int(real.sum(-1).max())
    if traits.max_positions and longest > traits.max_positions:
        raise ValueError(f"input_ids: the prompt has {longest} tokens and the target's context is {traits.max_positions}. Shorten the prompt.")
    if traits.encoder == "own":
        _check_decoder_padding(model, real)
    elif cache is not None:
        if cached >= input_ids.shape[1]:
            raise ValueError(f"{compat.CACHE} holds {cached} tokens and input_ids {input_ids.shape[1]}; input_ids must be "
                             f"the whole conversation, with at least one token that is not cached yet.")
        if cached and not bool(real.all()) and counting(model):
            raise ValueError(f"{compat.CACHE}: {type(model).__name__} counts the positions of a text from the length of its cache on, and rows of a padded batch are counted "
                             f"otherwise by plain generate() and by speculative=True. Leave the cache out, or continue the rows one by one.")
        if not isinstance(cache, QuantizedCache):
            _check_tails(cache, real)
    if not shown:
        _check_positions(positions, real, cached)
    lengths.check_rope(model, generation.max_length, "target")
    lengths.check_selection(model, generation.max_length, "target")
    lengths.check_experts(model, input_ids.shape[0], longest, config)
    if input_ids.shape[0] > 1:
        lengths.check_counting(model, generation.max_length, "target")
    _check_processors(processors, generation, own)
    check_batch(model, traits, input_ids.shape[0], "target", generation.use_cache is False)
    if traits.own_cache:
        check_own_cache(model, generation, real)
    return shown if shown or both_ways(model.config, cached) else None


def _check_inputs(config, model_kwargs: dict, traits: compat.ModelTraits, cached: int) -> dict:
    """The model inputs that are shown beside the text, {} for none. ValueError for inputs that the loop does not support."""
    shown, own = media_in(config, model_kwargs, cached), ("encoder_outputs", "decoder_attention_mask", "global_attention_mask")  # the last, LED's encoder has read
    composed = config.model_type in COMPOSED  # what is not the decoder's, their encoder has read; labels are Seq2SeqTrainer's, and generate hands them to no pass
    shown = {name: value for name, value in shown.items() if name != "labels" and (not composed or name.startswith("decoder_"))}
    own = {*own, *READ_BESIDE.get(config.model_type, ("inputs_embeds",))}
    name = next((name for name in shown if name not in own), None) if traits.encoder == "own" else untried(config, shown)
    if name is not None:
        raise ValueError(f"{name}: this model input is not supported with speculative=True for a model of type {config.model_type!r}. Drop it, or use speculative=False.")
    if traits.encoder == "own":
        return {}
    if shown and seeing(config) and not {"pixel_values", "cross_attention_mask"} <= shown.keys():  # without a mask, what a token sees goes by the width of its pass
        raise ValueError(f"{next(iter(shown))}: images need pixel_values and cross_attention_mask beside each other. Pass both, or use speculative=False.")
    if shown and cached:
        raise ValueError(f"{compat.CACHE} beside {next(iter(shown))}: what is shown anew cannot be told from what the cache has seen. Pass the whole conversation without the "
                         f"cache, or its text alone with it.")
    return shown


def _check_mask(mask: torch.Tensor | None, generation, shape: torch.Size, cache, traits: compat.ModelTraits) -> None:
    """ValueError unless the mask is of 0 and 1 in the `shape` [B, P] of input_ids. One that hides nothing has been dropped by transformers."""
    width = shape[1] if traits.encoder == "own" else compat.mask_width(generation, shape[1])
    given = mask.shape if mask is not None else torch.Size([shape[0], width])
    if given == shape:
        if mask is not None and not torch.equal(mask, mask.bool().to(mask.dtype)):
            raise ValueError(f"{traits.mask_name} holds other numbers than 0 and 1: give 1 for a token and 0 for padding, or leave it out.")
        return
    if cache is not None and cached_tokens(cache):
        raise ValueError(f"input_ids has {shape[1]} tokens a row and {traits.mask_name} {given[-1]}: with {compat.CACHE}, input_ids must be the whole "
                         f"conversation, as the draft and the processors read it, not its new tokens alone.")
    raise ValueError(f"{traits.mask_name} has the shape {list(given)} and input_ids {list(shape)}: give one number per token, 0 for padding, or leave it out.")


def _check_tails(cache, real: torch.Tensor) -> None:
    """A sliding layer keeps as many of the last columns as its window has, and any that real [B, P] hides among them took the place of a token."""
    for _, keys, _, first in read_cache(cache):
        if (real[:, :first].any(-1) & ~real[:, first : first + keys.shape[2]].all(-1)).any():
            raise ValueError(f"{compat.CACHE}: its sliding layers hold the last {keys.shape[2]} columns alone, with padding among them, so that tokens which "
                             f"the window reaches are gone. Leave it out.")


def _check_positions(positions: torch.Tensor | None, real: torch.Tensor, cached: int) -> None:
    """ValueError unless given positions [..., L] are those that the loop counts, wherever `real` [B, P] has a token; behind a cache of `cached` columns,
    which may hold images, they may begin at another number."""
    if positions is None:
        return
    width = min(positions.shape[-1], real.shape[1] - cached)
    mask, counted = real[:, -width:], (real.cumsum(-1) - 1)[:, -width:]
    shape = torch.Size([*positions.shape[:-2], *mask.shape])
    try:
        counted = counted + (positions[..., -1:] - counted[:, -1:] if cached else 0)
        same = torch.equal(positions[..., -width:].expand(shape)[mask.expand(shape)], counted.expand(shape)[mask.expand(shape)])
    except RuntimeError:  # a shape that no expansion makes fit
        same = False
    if not same:
        raise ValueError("position_ids: the loop counts positions itself, from each row's first token. Drop it, or use speculative=False.")


def _check_beams(generation) -> None:
    """ValueError for grouped beam search: only the plain one is there, and the one that samples."""
    if (generation.num_beams or 1) == 1:
        return
    groups, penalty = getattr(generation, "num_beam_groups", None) or 1, getattr(generation, "diversity_penalty", None) or 0.0
    if groups > 1 or penalty:
        raise ValueError(f"num_beam_groups={groups}, diversity_penalty={penalty}: speculative=True does plain beam search. Use num_beam_groups=1, or "
                         f"speculative=False.")


def _check_decoder_padding(model, real: torch.Tensor) -> None:
    """Whisper's positions go by the mask (transformers 5.10: not yet), and of relative ones it hides all that matters; others take padding for text."""
    by_columns = counting(model) or model.config.model_type in COMPOSED
    by_mask = model.config.model_type == "whisper" and type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if not real.all() and by_columns and not by_mask:
        raise ValueError(f"decoder_attention_mask: {type(model).__name__} counts padding of decoder_input_ids as text, so they are not supported with speculative=True; "
                         f"pass them without.")
