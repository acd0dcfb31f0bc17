"""The draft of a call: the one that was passed, or what a config names by `draft` and `draft_source`, read from disk where it has weights."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import AutoConfig, GenerationMixin, PreTrainedModel

from . import compat
from .assistants import KINDS, auto_class, kind_of, refuse_foreign
from .config import OF_TARGET, SpeculativeConfig
from .drafts.base import Draft
from .folders import WeightsError, check_model_folder, from_whole
from .hints import first_line
from .registry import DRAFTS, LOADERS, SHIPPED, load

OF_A_MODEL = ("model", "model_tree")
OF_A_FILE = ("ngram", "retrieval")
ALSO = {"feature": ("feature_tree",), "feature_parallel": ("feature", "feature_tree")}  # what else a drafter's weights may be put into
_kept: WeakKeyDictionary = WeakKeyDictionary()  # target -> what its drafter was read from, and the drafter
_copies: WeakKeyDictionary = WeakKeyDictionary()  # target -> how it was compressed, and the copy


def behind(model: Any) -> Any:
    """The language model to whose `generate` a model's own hands what it has read, a prompt of embeddings, as BLIP-2 does; any other model as it is."""
    part = next((part for name in ("language_model", "text_model") if isinstance(part := getattr(model, name, None), GenerationMixin)), None)
    kind = getattr(type(model), "__base_class__", type(model))  # of one that is enabled
    return model if part is None or getattr(kind, "generate", None) is GenerationMixin.generate else part


def as_draft(draft: Any, config: SpeculativeConfig) -> Draft:
    """The draft that was passed, or a model in the draft that the config names (of an assistant that a family ships, its own), or the config's own draft."""
    draft = behind(draft)
    refuse_foreign(compat.unwrap(draft))
    named = draft is None or config.draft in (*OF_A_MODEL, *KINDS)
    name = config.draft if named and config.draft != "model" else kind_of(compat.unwrap(draft)) or "model"
    if config.draft_options and (isinstance(draft, Draft) or name != config.draft):
        raise ValueError(f"draft_options={config.draft_options!r} are those of draft={config.draft!r}, which assistant_model replaces. Drop one of them.")
    return draft if isinstance(draft, Draft) else _made(name, config, *([] if draft is None else [draft]))


def _made(name: str, config: SpeculativeConfig, *parts: Any, **more: Any) -> Draft:
    made = _class(name, config)
    try:
        return made(*parts, **more, **config.draft_options)
    except TypeError as error:
        raise ValueError(f"draft={config.draft!r} has to be made first: pass assistant_model={made.__name__}(...).") from error


def _class(name: str, config: SpeculativeConfig) -> type[Draft]:
    made = load(DRAFTS, name, "draft")
    _check_options(config, made)
    return made


def _check_options(config: SpeculativeConfig, made: Callable[..., Draft]) -> None:
    known = [name for name in inspect.signature(made).parameters if name != "target"]
    unknown = [name for name in config.draft_options if name not in known]
    if unknown:
        raise ValueError(f"draft_options: {made.__name__} has no {unknown[0]!r}; it has {sorted(known)}.")


def source_of(config: SpeculativeConfig) -> str | None:
    """Where the config's draft has its weights: a file, a folder, a hub id, a drafter's name, or that of a draft that is made of the target; None where it has none."""
    made = config.draft in OF_TARGET or any(map(_needs_target, _inner(config)))
    return config.draft_source or (None if config.draft in DRAFTS and not made else config.draft)


def _inner(config: SpeculativeConfig) -> list:
    """What a mixture by name is made of; [] where that is left to it, and of other drafts."""
    drafts = config.draft_options.get("drafts", []) if config.draft == "mixture" else []
    return drafts if isinstance(drafts, list) else []


def _needs_target(name: Any) -> bool:
    """Whether a draft of that name is made of the target, or is a drafter for it."""
    return name in OF_TARGET or isinstance(name, str) and name not in DRAFTS and load(LOADERS, "is_drafter", "draft_options")(name)


def loaded(config: SpeculativeConfig, target: PreTrainedModel) -> PreTrainedModel | Draft:
    """What `source_of(config)` holds: a model, in the target's dtype and on its device, or a whole draft, with the config's `draft_options`.

    A checkpoint is kept until another one is asked for; a drafter, which has the target's own embedding inside, as long as the target is, unless
    its file, or the target's device, dtype, embedding or head, become others.
    Raises ValueError naming the argument if the source cannot be read, if the target is not the one of the drafter, or if `draft` is another kind.
    """
    source, argument = source_of(config), "draft_source" if config.draft_source else "draft"
    if config.draft in OF_TARGET:
        return _compressed(config, target)
    if config.draft == "mixture":
        parts = [as_draft(loaded(SpeculativeConfig(draft=name), target), SpeculativeConfig()) if _needs_target(name) else name for name in _inner(config)]
        return _class("mixture", config)(**config.draft_options | {"drafts": parts})
    if config.draft in OF_A_FILE:
        kind = _class(config.draft, config)
        try:
            return kind.load(source, **config.draft_options)
        except (OSError, ValueError) as error:
            raise ValueError(f"{argument}={source!r}: {error}") from error
    if not load(LOADERS, "is_drafter", argument)(source):
        if config.draft not in (*OF_A_MODEL, *KINDS):
            raise ValueError(f"{argument}={source!r} holds no drafter, which draft={config.draft!r} is made of. Name one, or pass the draft as assistant_model.")
        return _model(source, target.dtype, target.device)
    try:
        found = _drafter(source, compat.unwrap(target), load(LOADERS, "drafter", argument))
    except (OSError, ValueError) as error:
        raise ValueError(f"{argument}={source!r}: {error}") from error
    held = found.name if isinstance(found, Draft) else "model"
    wanted = config.draft if config.draft in DRAFTS else held
    fits = (held, *ALSO.get(held, ())) if isinstance(found, Draft) else OF_A_MODEL
    if wanted not in fits:
        raise ValueError(f"draft={config.draft!r}: {source!r} is a drafter for draft={held!r}. Say that, or draft={source!r} without draft_source.")
    as_it_is = not isinstance(found, Draft) or wanted == held and not config.draft_options
    if as_it_is:
        return found
    if hasattr(found, "layout"):
        return _made(wanted, config, found.model, found.target, layout=found.layout)
    return _made(wanted, config, getattr(found, "heads", None) or found.model, found.target)


def _compressed(config: SpeculativeConfig, target: PreTrainedModel) -> Draft:
    """The target's compressed copy as its draft, a draft of this call's own; the copy is kept as long as the target is, unless it is made another way or the target changes."""
    made, whole = load(LOADERS, config.draft, "draft"), compat.unwrap(target)
    _check_options(config, made)
    now = json.dumps(config.draft_options), whole.device, whole.dtype, id(whole.get_input_embeddings().weight), id(whole.get_output_embeddings())
    before, found = _copies.get(whole, (None, None))  # another thread may put another one in its place
    if before != now:
        try:
            found = made(target, **config.draft_options).model
        except (TypeError, ValueError) as error:
            raise ValueError(f"draft={config.draft!r}: {error}") from error
        _copies[whole] = now, found
    return load(DRAFTS, config.draft, "draft")(target, found)


def _drafter(source: str, target: PreTrainedModel, read) -> PreTrainedModel | Draft:
    """read(source, target), or what it has returned for them before: a model, or a draft of this call's own around the same weights."""
    file = next((path for path in (SHIPPED / source / "model.safetensors", Path(source) / "model.safetensors") if path.is_file()), None)
    if file is None and Path(source).exists():
        return read(source, target)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    stamp = (source, 0) if file is None else (str(file.resolve()), file.stat().st_mtime_ns)  # a hub id, or the target's own module
    now = *stamp, target.device, target.dtype, id(embedding.weight), id(head), type(head)
    before, found = _kept.get(target, (None, None))  # another thread may put another one in its place
    if before != now:
        found = _around(read(source, target), None)  # were the target in it, both would stay for good
        _kept[target] = now, found
    return _around(found, target)


def _around(found: PreTrainedModel | Draft, target: PreTrainedModel | None) -> PreTrainedModel | Draft:
    """A model as it is; of a draft a copy with that target."""
    if not isinstance(found, Draft):
        return found
    found = copy.copy(found)
    found.target = target
    return found


@lru_cache(maxsize=1)
def _model(source: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    try:
        check_model_folder(source)
    except ValueError as error:
        raise ValueError(f"draft_source={source!r}: {error}") from error
    try:
        config = AutoConfig.from_pretrained(source)
        plain = getattr(config, "quantization_config", None) is None
        read = from_whole if plain else partial(load(LOADERS, "read", "draft_source"), config=config)
        made = read(f"draft_source={source!r}", auto_class(config), source, dtype=dtype, use_safetensors=True)
        return made.to(device).eval()
    except WeightsError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"draft_source={source!r} is no drafter and no transformers checkpoint with safetensors ({first_line(error)}). Load the "
                         f"draft yourself and pass it as assistant_model.") from error
