"""Processors with a memory: the matcher of a grammar, a count of tokens. Plain decoding calls them once a token, in order. Here candidates are tried and
dropped, so that such a processor is put back, before every call, to where the text without its last token has left it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any

import torch
from transformers import LogitsProcessor

from . import compat
from .kept import MANY, Kept, entries, names

SOON = 8  # tokens that are written before what was kept for their texts is dropped


class _Text:
    """A text that processors were asked about: what they kept `before` the call and `after` it (None: not called), and the texts one token longer."""

    def __init__(self, before: Kept):
        self.before, self.after, self.longer = before, None, {}


class Following(LogitsProcessor):
    """`processors`, one behind the other, for one row, whose prompt has `start` tokens and whose text, prompt included, is `written`, live. What they keep is put
    back (`kept.Kept`): numbers, strings, containers of up to 10,000 entries, dataclasses, tensors and arrays of up to 4 MiB and random generators, in attributes,
    closures and partial functions, and objects that copy themselves by fork() or deep_copy(), as matchers do. Other objects are taken not to change.

    base:   the text from which on others are known, at first that of no token; `told`: its tokens behind the prompt.
    tables: by processor and attribute, what was found there last, and whether it has too many entries to be put back.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], start: int, written: Sequence[int] = ()):
        self.processors, self.start, self.written = processors, start, written
        self.name = ", ".join(type(processor).__name__ for processor in processors)
        self.tables: dict[tuple[int, str], tuple[Any, bool]] = {}
        self.told: list[int] = []
        self.first = self._kept()
        self.base = _Text(self.first)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """input_ids int64 [1, start + n], scores float [1, V]."""
        if len(self.written) > self.start + len(self.told) + SOON:
            self._move(list(self.written[self.start :]))
        tokens = input_ids[0, self.start :].tolist()
        if tokens[: len(self.told)] != self.told:
            self.told, self.base = [], _Text(self.first)
        text = self.base
        for n in range(len(self.told), len(tokens)):
            if text.after is None:  # nobody has asked
                self._ask(text, input_ids[:, : self.start + n], scores)
            text = text.longer.setdefault(tokens[n], _Text(text.after))
        return self._ask(text, input_ids, scores)

    def _ask(self, text: _Text, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        text.before.put_back()
        scores = scores.clone()  # a processor may keep it
        for processor in self.processors:
            scores = processor(input_ids, scores)
            _made_to_fork(processor)
        text.after, text.longer = self._kept(text.before), {}  # what a draft's scores have led to goes
        return scores

    def _move(self, tokens: list[int]) -> None:
        """Go on from the text with these tokens, as far as it is known: nobody will ask about shorter ones any more."""
        for token in tokens[len(self.told) :]:
            if token not in self.base.longer:
                break
            self.base = self.base.longer[token]
            self.told.append(token)

    def _kept(self, before: Kept | None = None) -> Kept:
        own = {(i, name): value for i, processor in enumerate(self.processors) for name, value in names(processor).items()}
        self.tables = {place: known if (known := self.tables.get(place)) and known[0] is value else (value, entries(value) > MANY) for place, value in own.items()}
        return Kept(self.processors, before, [value for value, large in self.tables.values() if large])

    def settle(self, tokens: list[int]) -> None:
        """Leave the processors as plain decoding does that has written these tokens behind the prompt."""
        text = self.base
        for token in tokens[len(self.told) :]:
            if token not in text.longer:
                (text.after or text.before).put_back()
                return
            text = text.longer[token]
        text.before.put_back()


def that_follow(rows: list[list[LogitsProcessor]], texts: list[list[int]]) -> list[list[LogitsProcessor]]:
    """The processors of each row, those with a memory made to follow its text; texts: the rows' tokens without padding, live, the prompts alone as yet."""
    return [_together([_for_row(own, b) if remembers(own) else own for own in processors], text) for b, (processors, text) in enumerate(zip(rows, texts))]


def _together(processors: list[LogitsProcessor], text: list[int]) -> list[LogitsProcessor]:
    """From the first to the last of those that share something, they are asked together: what one of them changes, another sees."""
    following = {i: Following([own], len(text), text) for i, own in enumerate(processors) if remembers(own)}
    alone = [following.get(i, own) for i, own in enumerate(processors)]
    sharing = [i for i in following for other in following if i != other and following[i].first.shares_with(following[other].first)]
    if not sharing:
        return alone
    first, behind = min(sharing), max(sharing) + 1
    return [*alone[:first], Following(processors[first:behind], len(text), text), *alone[behind:]]


def settle(rows: list[list[LogitsProcessor]], written: list[list[int]]) -> None:
    """After a call that has written these tokens in each row: what remembers is left as plain decoding leaves it, in a batch by its longest row."""
    for tokens, processors in sorted(zip(written, rows), key=lambda pair: len(pair[0])):
        for own in processors:
            if isinstance(own, Following):
                own.settle(tokens)


def remembers(processor: Any) -> bool:
    """Whether a processor may keep something from call to call: of transformers' own, SynthID's watermark does, and others that are refused."""
    return isinstance(processor, compat.SYNTHID) or not type(processor).__module__.startswith(("transformers.", "hf_specdec."))


def _for_row(processor: LogitsProcessor, b: int) -> LogitsProcessor:
    """The processor for row b: xgrammar's may have a grammar for every row, of which it gets its own."""
    grammars = getattr(processor, "__dict__", {}).get("compiled_grammars")
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

    def fork(self) -> Retold:
        return Retold(self.make, self.told)

    def advance(self, token_id: int, return_tokens: bool = True) -> Any:
        found = self.guide.advance(token_id, return_tokens=return_tokens)
        self.told.append(token_id)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.guide, name)


def _made_to_fork(processor: LogitsProcessor) -> None:
    """Put guides that can be copied in the place of a processor's own, which it makes in its first call."""
    guides = getattr(processor, "__dict__", {}).get("_guides")
    if guides and type(guides[0]).__module__.startswith("outlines_core"):
        processor._guides = [Retold(partial(type(guide), processor.index)) for guide in guides]
