"""Caches of transformers (5.10 up to 6): which models carry states in theirs, and how a caller's is checked, read and written."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import transformers
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer, StaticLayer

CACHE = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"  # "cache" since 5.24
MADE = {"cpmant": "cache", "minimax": "cache", "openai-gpt": "", "rwkv": "state", "xlstm": "cache"}  # what they are given again, as they have made it themselves
READ_IN_PIECES = {"cpmant"}  # so that they are not told of which places logits are wanted
OWN_CACHE = frozenset(  # go on over several tokens as they do token by token, from a cache of their own kind; not tried before transformers 5.24
    ["deepseek_v4", "glm5_next_text", "inkling2_loop_text", "minimax_m3_vl_text", "qwen4_exp_text", *MADE] if CACHE == "cache" else ())
MIXED = {"rwkv"}  # of one token for each of several rows, plain generate's passes make one of all rows' tokens
PADDING_READ = {"rwkv", "xlstm"}  # as text: they look at no mask
PADDING_COUNTED = {"deepseek_v4", "minimax_m3_vl_text"}  # among the tokens of the groups or blocks that they read
BESIDE_BEAMS = {"minimax"}  # states that plain generate does not sort with its beams
IN_MODULES = {"recurrent_gemma"}  # where plain generate keeps the states of these, so that no cache says them
_VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
GOES_ON = _VERSION >= (5, 17)  # before, models do not go on from a state over several tokens, or not all of them
_MAY_RECORD = _VERSION >= (5, 21)  # before, a window that records its past does not fit its mask after two passes
INDEXED = "indexed_attention"
_KNOWN_LAYERS, _KNOWN_BLOCKS = {"full_attention", "sliding_attention", "chunked_attention"}, {"attention"}
_KNOWN_LAYERS |= {INDEXED} if hasattr(Cache, "update_indexer") else set()
_ALIKE = (None, "dynamic", "dynamic_full", "static", "hybrid", "hybrid_chunked", "sliding_window", "offloaded", "offloaded_static", "offloaded_hybrid",
          "offloaded_hybrid_chunked", "quantized")
_PLAIN = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}  # DummyLayer is newer than 5.17


def seeing(config: Any) -> tuple[int, ...]:
    """The layers of a model that look at an image, and hold it in the cache, or nothing where there is none (Mllama)."""
    return tuple(getattr(config.get_text_config(), "cross_attention_layers", None) or ())


def strange_layers(config: Any) -> list[str]:
    """Types of layers that are no attention, or attention to something else than all tokens before."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS) \
        or sorted(set(getattr(config, "layers_block_type", None) or ()) - _KNOWN_BLOCKS - _KNOWN_LAYERS)  # transformers 5.10


def states_of(model: PreTrainedModel, config: Any) -> tuple[int, ...]:
    """Per layer of a model, how many states it carries, 1 of those whose cache is of its own kind; () where none does, where one that is not known has a cache of
    another kind, and before transformers 5.17."""
    keeps = getattr(model, "_is_stateful", False) or strange_layers(config)
    if config.model_type in OWN_CACHE and (keeps or config.model_type in MADE):
        return (1,) * config.num_hidden_layers
    if not GOES_ON or not keeps:
        return ()
    layers = DynamicCache(config=config).layers
    if not all(isinstance(layer, LinearAttentionLayer) or type(layer).__name__ in _PLAIN for layer in layers):
        return ()
    counts = tuple(layer.number_of_states if isinstance(layer, LinearAttentionLayer) else 0 for layer in layers)
    return counts if any(counts) else ()


def check_implementation(name: str | None, own: str) -> None:
    """ValueError for a `cache_implementation` that is none of a single call. own: what a refusal ends with."""
    if name in _ALIKE:
        return
    why = "the speculative loop keeps a cache of its own, which can roll back"
    raise ValueError(f"cache_implementation={name!r}: {why}. Leave cache_implementation unset, or use speculative=False.{own}")


def static_in(cache: Any) -> StaticCache | None:
    """The static cache that this is, or that it has for the decoder's own text."""
    cache = getattr(cache, "self_attention_cache", cache)
    return cache if isinstance(cache, StaticCache) else None


def let_go(model: PreTrainedModel, cache: Any) -> None:
    """Transformers before 5.17 lays a static `cache` by for the model's next call, which breaks on one that nothing was written to: ours need not write to it."""
    static = static_in(cache)
    if static is not None and getattr(model, "_cache", None) is cache and not all(hasattr(layer, "max_batch_size") for layer in static.layers):
        del model._cache


def cached_tokens(cache: DynamicCache | StaticCache) -> int:
    """How many tokens a cache of transformers holds; one of states alone does not count them, and holds 1 where it holds any."""
    if not counts_tokens(cache):
        return int(any(any(layer.has_previous_state.values()) for layer in cache.layers if isinstance(layer, LinearAttentionLayer)))
    return int(cache.get_seq_length())  # a tensor, of a static cache


def counts_tokens(cache: DynamicCache) -> bool:
    """Whether a cache of transformers says how many tokens it holds."""
    layers = getattr(cache, "layers", ())  # that of an encoder-decoder model has none of its own
    return not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers)


def windows_of(cache: Any, config: Any, shown: bool) -> tuple[int | None, ...]:
    """Per layer of attention, in the order in which they run, how many columns a cache of transformers shows a token at most, 0 for all, None for one that looks at what
    prompts show, where they do; () where the cache does not say."""
    if seeing(config):
        return tuple(None if shown and i in seeing(config) else 0 for i in range(config.num_hidden_layers))
    layers = [layer for layer in getattr(getattr(cache, "self_attention_cache", cache), "layers", ()) if isinstance(layer, CacheLayerMixin)]
    sizes, kinds = tuple(getattr(layer, "sliding_window", 0) if layer.is_sliding else 0 for layer in layers), getattr(config, "layer_types", None) or ()
    shared = kinds[len(sizes) :] if sizes and getattr(config, "num_kv_shared_layers", 0) else ()  # they read what others of their kind have
    begin, loops = getattr(config, "n_input_layers", 0), getattr(config, "n_recurrent_loops", 1)
    end = begin + getattr(config, "n_recurrent_layers", 0)
    return (*sizes[:begin], *sizes[begin:end] * loops, *sizes[end : len(kinds) or None], *(sizes[kinds.index(kind)] for kind in shared))


def reaches(config: Any) -> dict[int, int]:
    """By layer, how many tokens a layer with a window sees at most."""
    return {index: layer.sliding_window for index, layer in enumerate(_empty_cache(config).layers) if getattr(layer, "is_sliding", False)}


def check_quantised(cache: QuantizedCache, rows: int | None, model: PreTrainedModel, real: torch.Tensor, kept: bool) -> None:
    """Refuse a `QuantizedCache` of `rows` where what is quantised together would not be what it is in plain generate: of several rows or a padded one in real [B, P], of a model
    of which something else is `kept`, or filled with other rows or by another model."""
    name, config = f"{CACHE}: a QuantizedCache (cache_implementation=\"quantized\")", model.config.get_text_config()
    if len(real) > 1 or not bool(real.all()):
        raise ValueError(f"{name} takes one row without padding: rows are quantised together, and accept different numbers of tokens. Generate the rows one by one (num_return_sequences "
                         f"and num_beams make rows, too), or leave it out.")
    if kept or seeing(model.config) or getattr(config, "num_kv_shared_layers", 0) or model.config.is_encoder_decoder:
        raise ValueError(f"{name}: {type(model).__name__} keeps more than keys and values of every layer, of its own text. Leave it out, or use speculative=False.")
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(f"{name} holds {len(cache.layers)} layers and the target has {config.num_hidden_layers}. Pass a cache that the target has filled, or leave it out.")
    if rows not in (None, 1):
        raise ValueError(f"{name} holds {rows} rows and the call has 1. Pass a cache of the same row, or leave it out.")


def check_cache(cache: Any, config: Any, rows: int, longest: int) -> None:
    """Refuse a caller's cache that is neither a plain `DynamicCache` nor a `StaticCache`, was filled with other `rows` or by another model, or has no room for `longest` tokens."""
    if not isinstance(cache, (DynamicCache, StaticCache)) or any("Quantized" in type(layer).__name__ for layer in cache.layers):
        raise ValueError(f"{CACHE}: {type(cache).__name__} cannot be read and rolled back. Pass a DynamicCache, a StaticCache or a QuantizedCache, or none and no cache_implementation.")
    room = min([layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer) and not layer.is_sliding], default=longest)
    if room < longest:
        raise ValueError(f"{CACHE}: the StaticCache has room for {room} tokens and the call may need {longest}. Pass one with max_cache_len={longest}, or lower max_new_tokens.")
    layers = read_cache(cache)
    if any(index in seeing(config) for index, *_ in layers):
        raise ValueError(f"{CACHE} holds an image, which the text behind it goes on seeing: not with speculative=True here. Use speculative=False.")
    if not layers and not cached_tokens(cache):
        return
    empty = _empty_cache(config)
    wanted = getattr(config, "decoder_layers", None) or sum(isinstance(layer, CacheLayerMixin) for layer in empty.layers) - len(seeing(config))
    if layers and wanted not in (0, len(layers)):
        raise ValueError(f"{CACHE} holds {len(layers)} layers and the target has {wanted}. Pass a cache that the target has filled, or leave it out.")
    own, theirs = ([(getattr(layer, "number_of_states", 0), isinstance(layer, CacheLayerMixin)) for layer in one.layers] for one in (empty, cache))
    if own != theirs and any(states for states, _ in own + theirs) and cached_tokens(cache):
        raise ValueError(f"{CACHE} holds the states of other layers than the target's. Pass a cache that the target has filled, or leave it out.")
    refused = rows > 1 and any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)  # anyhow, with better advice
    if layers and len(layers[0][1]) != rows and not refused:
        raise ValueError(f"{CACHE} holds {len(layers[0][1])} rows and the call has {rows} (num_return_sequences and num_beams count, as in a "
                         f"plain call). Pass a cache of the same rows (batch_repeat_interleave repeats them), or leave it out.")


def _empty_cache(config: Any) -> DynamicCache:
    """The cache that plain generate begins with; the forwards of Dory and Inkling 2 (loop) add a layer for every further pass through their middle ones."""
    cache = DynamicCache(config=config)
    text = config.get_text_config()
    loops = getattr(text, "n_recurrent_loops", 0) or getattr(text, "loop_num_passes", 1)
    if hasattr(text, "loop_num_passes"):
        middle = cache.layers[text.loop_layer_index_start : text.loop_layer_index_end]
    else:
        middle = cache.layers[text.n_input_layers :][: text.n_recurrent_layers] if loops > 1 else []
    cache.layers += [copy.deepcopy(layer) for layer in middle * (loops - 1)]
    return cache


def read_cache(cache: DynamicCache) -> list[tuple[int, torch.Tensor, torch.Tensor, int]]:
    """Per layer: its number, keys and values [B, H, n, D], and the position of their first slot (sliding layers keep a tail only). A layer that reads
    another's keys and values is left out, and so is one of states alone."""
    length, layers = cached_tokens(cache), [(i, layer) for i, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None]
    held = [(i, *(part[:, :, :length] if isinstance(layer, StaticLayer) else part for part in (layer.keys, layer.values))) for i, layer in layers if layer.keys.ndim == 4]
    return [(i, keys, values, length - keys.shape[2]) for i, keys, values in held]


def offloads(cache: Any) -> bool:
    """Whether keys and values of this cache, or of that for the decoder's own text, are to be in the host's memory."""
    return bool(getattr(getattr(cache, "self_attention_cache", cache), "offloading", False))


def refill(cache: StaticCache, layers: list[tuple[torch.Tensor, torch.Tensor] | None]) -> StaticCache:
    """Write keys and values [B, H, n, D] per layer over what a static cache holds: compiled functions know where its tensors lie."""
    cache.reset()
    for layer, parts in zip(cache.layers, layers):
        if parts is not None:
            layer.update(*(part if layer.keys is None else part.to(layer.keys) for part in parts))
    return cache


def write_cache(config: Any, layers: list[tuple[torch.Tensor, torch.Tensor] | None], into: DynamicCache | StaticCache | None) -> DynamicCache | StaticCache:
    """A `DynamicCache` that holds keys and values [B, H, n, D] per layer, nothing where there are None; `into` is refilled in place if given. config: None
    for a decoder whose config counts the layers of its encoder."""
    if isinstance(into, StaticCache):
        return refill(into, layers)
    fresh = _empty_cache(config) if config is not None else DynamicCache()
    if _MAY_RECORD and not any(isinstance(layer, LinearAttentionLayer) for layer in fresh.layers):  # convolutions would go on over all that they have read
        fresh.activate_past_recording()
    for index, parts in enumerate(layers):
        if parts is not None:
            fresh.update(*parts, index)
    if into is None:
        return fresh
    into.layers = fresh.layers
    return into
