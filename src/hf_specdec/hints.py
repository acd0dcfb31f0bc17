"""Did you mean: what a name that nobody knows was probably meant to be, and how a value is shown in a message."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any

# words for the same thing, here and in other libraries
ALIKE = (
    ("num_assistant_tokens", "k", "gamma", "num_speculative_tokens", "num_draft_tokens", "speculative_tokens", "draft_tokens"),
    ("assistant_model", "draft", "draft_model", "drafter", "assistant", "speculative_model"),
)


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be."""
    known, word = list(known), str(name).lower().replace("-", "_")
    alike = [other for group in ALIKE if word in group for other in group if other in known]
    return next(iter(alike or get_close_matches(word, known, 1, 0.7)), None)


def meant(name: Any, known: Iterable[str]) -> str:
    """" (did you mean 'x'?)", or "" where no known name is near."""
    found = nearest(name, known)
    return f" (did you mean {found!r}?)" if found else ""


def short(value: Any) -> str:
    """repr(value), or the name of its type where that is long."""
    text = repr(value)
    return text if len(text) <= 120 and "\n" not in text else type(value).__name__


def by_name(function: Callable, remedy: Callable[[str, list[str]], str] = meant) -> Callable:
    """`function`, whose TypeError for a keyword that it does not take says what was meant: remedy(name, the names that it takes)."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function
    known = [name for name in parameters if name != "self"]

    @wraps(function)
    def checked(*args, **given):
        for name in given:
            if name not in known:
                raise TypeError(f"{function.__qualname__.removesuffix('.__init__')}() has no argument {name!r}{remedy(name, known)}; it has {known}.")
        return function(*args, **given)

    return checked
