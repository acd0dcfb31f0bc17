"""The draft that a call asks for in the words of transformers' assisted generation, put into ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from . import registry
from .config import MAX_ASSISTANT_TOKENS, SpeculativeConfig
from .hints import check_int
from .loading import behind


class Asked(NamedTuple):
    """What is asked for: a draft by name, or the draft itself, and how many tokens it drafts. None: that is left open."""

    name: str | None = None
    draft: Any = None
    k: int | None = None

    def put_into(self, config: SpeculativeConfig) -> SpeculativeConfig:
        """`config` with what is asked for in the place of what it says; options and source of another draft go with that."""
        config = config if self.name in (None, config.draft) else replace(config, draft=self.name, draft_options={}, draft_source=None)
        return config if self.k is None else replace(config, num_assistant_tokens=self.k)


def _lookup(model, value: Any) -> Asked:
    check_int("prompt_lookup_num_tokens", value, 1, MAX_ASSISTANT_TOKENS)
    return Asked("prompt_lookup", k=value)


def _early_exit(model, value: Any) -> Asked:
    try:
        return Asked(draft=registry.load(registry.DRAFTS, "early_exit", "draft")(behind(model), value))
    except ValueError as error:
        raise ValueError(f"assistant_early_exit={value!r}: {error}") from error


WORDS: dict[str, Callable[[Any, Any], Asked]] = {"prompt_lookup_num_tokens": _lookup, "assistant_early_exit": _early_exit, "use_mtp": lambda model, value: Asked(registry.MTP)}


def taken_over(kwargs: dict[str, Any], model, assistant_model: Any = None, said: dict[str, Any] | None = None) -> tuple[dict[str, Any], Asked]:
    """`kwargs` without the words for a draft, of the call or of the `GenerationConfig` that it passes, and what they ask for. assistant_model, said: a draft and options that the same
    call names in our words.

    Raises ValueError for two drafts or two K in one call, and for numbers that are out of range."""
    given, said = kwargs.get("generation_config"), said or {}
    words = {name: value for name in WORDS if (value := kwargs.get(name, getattr(given, name, None)))}
    if not words:
        return kwargs, Asked()
    (name, value), *more = words.items()
    asked = WORDS[name](model, value)
    others = [f"{other}={value!r}" for other, value in more] + ([] if assistant_model is None else [f"assistant_model={type(assistant_model).__name__}"])
    others += [f'speculative={{"draft": {said["draft"]!r}}}'] if said.get("draft") not in (None, asked.name) else []
    if others:
        raise ValueError(f"{name}={value!r} and {others[0]} are two drafts. Pass one of them.")
    if asked.k is not None and said.get("num_assistant_tokens") not in (None, asked.k):
        raise ValueError(f"{name}={value!r} and num_assistant_tokens={said['num_assistant_tokens']!r} contradict each other. Say it once.")
    kwargs = {name: value for name, value in kwargs.items() if name not in WORDS}
    if any(getattr(given, name, None) for name in WORDS):
        kwargs["generation_config"] = given = copy.deepcopy(given)
        for name in WORDS:
            if hasattr(given, name):  # use_mtp is newer than others
                setattr(given, name, None)
    return kwargs, asked
