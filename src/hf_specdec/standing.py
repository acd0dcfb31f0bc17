"""What an enabled model does in calls that say nothing of speculation: what was said once, when it was enabled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from threading import Event
from typing import Any

from . import compat
from .arguments import check_draft
from .assistants import kind_of
from .config import SpeculativeConfig
from .drafts.base import Draft
from .drafts.vocabulary import check_vocabulary
from .hints import meant
from .loading import OF_A_MODEL, as_draft

_UNKNOWN = "not used by the model"  # what transformers says of arguments that it does not know
_OPTIONS = [field.name for field in fields(SpeculativeConfig)]
_OURS = ("speculative", "assistant_model", "num_assistant_tokens")
_ATTRIBUTE = "_hf_specdec_standing"  # in the model's __dict__, past torch, which would make the draft a part of the model


@dataclass(frozen=True, eq=False)
class Standing:
    """speculative, assistant_model: as in a call. Copies of the model share it, draft and all."""

    speculative: bool | dict | SpeculativeConfig | None = None
    assistant_model: Any = None

    def __deepcopy__(self, memo: dict) -> Standing:
        return self


def say(model, speculative: bool | dict | SpeculativeConfig | None, assistant_model: Any) -> None:
    """Set what calls do from now on. What is None stays as it was, but a draft that is named replaces one that was passed; speculative=False takes all back.
    ValueError and TypeError for options that no call could have, and for a draft with another vocabulary."""
    before = said(model)
    if speculative is False:
        unsay(model)
        return
    config = SpeculativeConfig.resolve(before.speculative or True if speculative is None else speculative)
    check_draft(assistant_model, "assistant_model", "speculative")
    check_one_draft(speculative, assistant_model)
    if assistant_model is not None:
        check_vocabulary(as_draft(assistant_model, config), compat.traits_of(compat.unwrap(model), "model"))
    named = isinstance(speculative, dict) and "draft" in speculative  # which takes the place of the one passed before
    draft = before.assistant_model if assistant_model is None and not named else assistant_model
    vars(model)[_ATTRIBUTE] = Standing(before.speculative if speculative is None else speculative, draft)


def check_one_draft(speculative: Any, assistant_model: Any) -> None:
    """ValueError for a dict that names another draft than the one that is passed. (What a `SpeculativeConfig` names is for calls without one.)"""
    named = speculative.get("draft") if isinstance(speculative, dict) else None
    fits = (assistant_model.name,) if isinstance(assistant_model, Draft) else (*OF_A_MODEL, kind_of(compat.unwrap(assistant_model)))
    if named is not None and assistant_model is not None and named not in fits:
        raise ValueError(f"assistant_model={type(assistant_model).__name__} and speculative={{\"draft\": {named!r}}} are two drafts. Pass one of them.")


def said(model) -> Standing:
    """What was said for this instance."""
    return vars(model).get(_ATTRIBUTE) or Standing()


def hand_on(model, other) -> None:
    """What was said for `model`, if anything, is said for `other`, too."""
    if _ATTRIBUTE in vars(model):
        vars(other)[_ATTRIBUTE] = said(model)


def unsay(model) -> None:
    vars(model).pop(_ATTRIBUTE, None)


def call(generate: Callable[..., Any], model, named: dict[str, Any], speculative: bool | dict | SpeculativeConfig | None, assistant_model: Any) -> Any:
    """generate(speculative=..., assistant_model=...), whose other arguments are `named`: by what the call says, else by what was said before."""
    known = said(model)
    asked = getattr(named.get("generation_config"), "speculative", None) if speculative is None else speculative
    draft = known.assistant_model if assistant_model is None else assistant_model
    if asked is None and known.speculative is not None and named.get("custom_generate") is None:
        own = None if isinstance(assistant_model, Draft) else assistant_model  # which plain generate() knows
        return _attempt(partial(generate, speculative=known.speculative, assistant_model=draft), partial(generate, speculative=False, assistant_model=own))
    return generate(speculative=speculative, assistant_model=assistant_model if asked is None or asked is False else draft)


def _attempt(speculate: Callable[..., Any], stock: Callable[[], Any]) -> Any:
    """A call that did not ask for speculation: where it is refused, before its first pass, `stock` serves it, and a warning says why."""
    began = Event()
    try:
        return speculate(began=began)
    except (ValueError, TypeError, NotImplementedError) as error:
        if began.is_set():
            raise
        why = str(error)
    warnings.warn(f"This call runs without speculation, which enable(speculative=...) asked for: {why}", stacklevel=4)
    return stock()


@contextmanager
def explained(arguments: dict[str, Any]) -> Iterator[None]:
    """Around plain `generate`: what transformers says of an argument that it does not know ends with the one of ours that was meant."""
    try:
        yield
    except ValueError as error:
        unknown = [name for name in arguments if f"'{name}'" in str(error)] if _UNKNOWN in str(error) else []
        for name in unknown:
            if name in _OPTIONS and (name != "draft" or isinstance(arguments[name], str)):
                raise ValueError(f"{error}. {name} is an option of speculative calls: pass speculative=True, too.") from error
            if near := meant(name, _OURS):
                raise ValueError(f"{error}. {name} is no argument of generate(){near}.") from error
        raise
