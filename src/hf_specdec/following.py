"""Processors with a memory: the matcher of a grammar, a count of tokens. Plain decoding calls them once a token, in order. Here candidates are tried and
dropped, so that such a processor is put back, before every call, to where the text without its last token has left it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from . import compat
from .config import MAX_ASSISTANT_TOKENS

LARGE, MANY = 1 << 22, 10_000  # bytes, entries; what is larger is taken for a table, which calls do not change
ATOMS = (int, float, str, bytes, tuple, type(None))


class _Text:
    """A text that a processor was asked about: what it kept `before` the call and `after` it (None: not called), and the texts one token longer."""

    def __init__(self, before: dict[str, Any]):
        self.before, self.after, self.longer = before, None, {}


class Following(LogitsProcessor):
    """`processor`, for one row, whose prompt has `start` tokens. What it keeps in its attributes is put back: numbers, strings, lists, deques, sets and dicts of up to
    10,000 entries, tensors and arrays of up to 4 MiB, and objects that copy themselves by fork() or deep_copy(), as matchers do. Other objects are taken not to change.

    base:  the text from which on others are known, its first; `told`: its tokens behind the prompt.
    small: by attribute, whether it is put back.
    """

    def __init__(self, processor: LogitsProcessor, start: int):
        self.processor, self.start = processor, start
        self.small: dict[str, bool] = {}
        self.told: list[int] = []
        self.first = self._kept()
        self.base = _Text(self.first)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """input_ids int64 [1, start + n], scores float [1, V]."""
        tokens = input_ids[0, self.start :].tolist()
        if tokens[: len(self.told)] != self.told:
            self.told, self.base = [], _Text(self.first)
        text = self.base
        for n in range(len(self.told), len(tokens)):
            if text.after is None:  # nobody has asked
                self._ask(text, input_ids[:, : self.start + n], scores.clone())
            text = text.longer.setdefault(tokens[n], _Text(text.after))
        if len(tokens) - len(self.told) > 4 * MAX_ASSISTANT_TOKENS:
            self._move(tokens[: -2 * MAX_ASSISTANT_TOKENS])
        return self._ask(text, input_ids, scores)

    def _ask(self, text: _Text, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._put_back(text.before)
        found = self.processor(input_ids, scores)
        _made_to_fork(self.processor)
        text.after, text.longer = self._kept(), {}  # what a draft's scores have led to goes
        return found

    def _move(self, tokens: list[int]) -> None:
        """Nobody will ask about shorter texts than this one any more."""
        for token in tokens[len(self.told) :]:
            self.base = self.base.longer[token]
        self.told = tokens

    def _kept(self) -> dict[str, Any]:
        own = vars(self.processor)
        self.small |= {name: _entries(value) <= MANY for name, value in own.items() if name not in self.small}
        return {name: _copied(value) if self.small[name] else value for name, value in own.items()}

    def _put_back(self, state: dict[str, Any]) -> None:
        own = vars(self.processor)
        own.clear()
        own.update({name: _copied(value) if self.small[name] else value for name, value in state.items()})

    def settle(self, tokens: list[int]) -> None:
        """Leave the processor as plain decoding does that has written these tokens behind the prompt."""
        text = self.base
        for token in tokens[len(self.told) :]:
            if token not in text.longer:
                break
            text = text.longer[token]
        else:
            self._put_back(text.before)
            return
        self._put_back(text.after or text.before)


def that_follow(rows: list[list[LogitsProcessor]], prompts: list[list[int]]) -> list[list[LogitsProcessor]]:
    """The processors of each row, those with a memory made to follow its text; prompts: the rows without padding."""
    return [[Following(_of_row(own, b), len(prompt)) if remembers(own) else own for own in processors]
            for b, (processors, prompt) in enumerate(zip(rows, prompts))]


def settle(rows: list[list[LogitsProcessor]], written: list[list[int]]) -> None:
    """After a call that has written these tokens in each row: what remembers is left as plain decoding leaves it, in a batch by its longest row."""
    for tokens, processors in sorted(zip(written, rows), key=lambda pair: len(pair[0])):
        for own in processors:
            if isinstance(own, Following):
                own.settle(tokens)


def remembers(processor: Any) -> bool:
    """Whether a processor may keep something from call to call: of transformers' own, SynthID's watermark does, and others that are refused."""
    return isinstance(processor, compat.SYNTHID) or not type(processor).__module__.startswith(("transformers.", "hf_specdec.")) and bool(getattr(processor, "__dict__", None))


def _entries(value: Any) -> int:
    """Of a container and of all inside."""
    if isinstance(value, dict):
        return len(value) + sum(map(_entries, value.values())) if len(value) <= MANY else len(value)
    if isinstance(value, (list, deque, set)):
        return len(value) + sum(map(_entries, value)) if len(value) <= MANY else len(value)
    return 0


def _copied(value: Any) -> Any:
    if type(value) in (list, deque, set):
        return value.copy() if all(isinstance(item, ATOMS) for item in value) else type(value)(map(_copied, value))
    if type(value) is dict:
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value if value.nbytes > LARGE else value.clone() if torch.is_tensor(value) else value.copy()
    if isinstance(value, compat.SYNTHID_STATE):
        own = copy(value)
        vars(own).update(_copied(vars(value)))
        return own
    fork = getattr(value, "fork", None) or getattr(value, "deep_copy", None)
    return value if fork is None or isinstance(value, type) else fork()


def _of_row(processor: LogitsProcessor, b: int) -> LogitsProcessor:
    """xgrammar's processor may have a grammar for every row."""
    grammars = vars(processor).get("compiled_grammars")
    if not isinstance(grammars, list) or not b < len(grammars) > 1:
        return processor
    own = copy(processor)
    own.compiled_grammars = grammars[b : b + 1]
    return own


# --- guides of outlines-core, which neither copy themselves nor go back further than 32 tokens ------------------------

class Retold:
    """A guide; a copy of it is a new one, made by `make`, that is told the same tokens."""

    def __init__(self, make: Callable[[], Any], told: Sequence[int] = ()):
        self.make, self.told = make, list(told)

    @cached_property
    def guide(self) -> Any:
        guide = self.make()
        for token in self.told:
            guide.advance(token, return_tokens=False)
        return guide

    def fork(self) -> "Retold":
        return Retold(self.make, self.told)

    def advance(self, token_id: int, return_tokens: bool = True) -> Any:
        found = self.guide.advance(token_id, return_tokens=return_tokens)
        self.told.append(token_id)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.guide, name)


def _made_to_fork(processor: LogitsProcessor) -> None:
    """After its first call."""
    guides = vars(processor).get("_guides")
    if guides and type(guides[0]).__module__.startswith("outlines_core"):
        processor._guides = [Retold(partial(type(guide), processor.index)) for guide in guides]
