"""transformers' way of adding an attention implementation, of choosing it, and of asking a quantisation config: the one place that reads its private names here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.quantizers import auto as quantizers


def register_attention(name: str, forward: Callable, masks: str = "sdpa") -> None:
    """Make `attn_implementation=name` known to transformers, with the masks that `masks` gets."""
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, AttentionMaskInterface()[masks])


def check_attention(model: PreTrainedModel, name: str) -> None:
    """ValueError for a model with a part whose attention does not go through transformers' AttentionInterface."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation():
            raise ValueError(
                f"model: the attention of {type(part).__name__} does not go through transformers' AttentionInterface, so it "
                f"cannot become {name!r}."
            )


def set_attention_from(model, before: str, name: str) -> None:
    """Let a transformers model that runs attn_implementation=`before` run `name`: all of it, if every part would take it and none has code of its own for "sdpa"; else
    its text model, if that is so of this part; else nothing."""
    if not isinstance(model, PreTrainedModel) or model.config.get_text_config()._attn_implementation != before:
        return
    text, parts = model.config.get_text_config(), [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    key = next((key for key in getattr(model.config, "sub_configs", {}) if getattr(model.config, key, None) is text), None)
    if all(_takes_any(type(part), text_alone=text is model.config) for part in parts):
        set_attention(model, name)
    elif key is not None and all(_takes_any(type(part), text_alone=True) for part in parts if part.config is text):
        set_attention(model, name, key)


def _takes_any(kind: type[PreTrainedModel], text_alone: bool) -> bool:
    return kind._can_set_attn_implementation() and not _treats_sdpa_apart(kind.__module__, text_alone)


def _source_of(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return ""


@lru_cache
def _treats_sdpa_apart(module: str, text_alone: bool) -> bool:
    """text_alone: what blocks that read images run by default (`attn_implementation: str = "sdpa"`) does not count."""
    source = _source_of(module)
    if not source:
        return True
    source = source.replace(': str = "sdpa"', "") if text_alone else source
    return '"sdpa"' in source or "AttentionInterface()" in source


def has_eager_alone(model) -> bool:
    """Whether a transformers model knows no "sdpa" (capped scores, sinks), and calls its "eager" by that function's name alone."""
    source = _source_of(type(model).__module__)
    return isinstance(model, PreTrainedModel) and not model._supports_sdpa and "def eager_attention_forward" in source and '"eager"' not in source


def by_eager(module, *args, **kwargs):
    """What an attention layer of such a model computes itself."""
    return vars(sys.modules[type(module).__module__])["eager_attention_forward"](module, *args, **kwargs)


def by_sdpa(*args, **kwargs):
    """transformers' own attention function "sdpa"."""
    return AttentionInterface()["sdpa"](*args, **kwargs)


def set_attention(model: PreTrainedModel, name: str, part: str | None = None) -> None:
    """`model.set_attn_implementation(name)`, or of the part whose config has this name, and ValueError if it did not take."""
    model.set_attn_implementation(name if part is None else {part: name})
    if model.config.get_text_config()._attn_implementation != name:
        raise ValueError(f"model: {type(model).__name__} did not take attn_implementation={name!r}.")


def take_loading_options(kind: type) -> type:
    """Let a config of this class that is passed beside a compressed checkpoint say how that is loaded (`dequantize=True`): transformers asks
    the classes on a list of its own, and leaves the others' options out."""
    known = getattr(quantizers, "LOADING_ATTRIBUTES_CONFIG_TYPES", ())
    if known and kind not in known:
        quantizers.LOADING_ATTRIBUTES_CONFIG_TYPES = (*known, kind)
    return kind
