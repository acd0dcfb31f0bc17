"""The committed tokens of every row, and the one place that knows when a row ends."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteria
from transformers.generation import BaseStreamer, EosTokenCriteria, MaxLengthCriteria

from .hints import what
from .uploads import upload

Callback = Callable[[int, list[int], list[bool]], None]


def check_streamer(streamer: Any) -> None:
    """TypeError for what is neither a transformers streamer nor a callable of three values. Of a streamer's own `put` Python says it as well, before any pass."""
    if streamer is None or hasattr(streamer, "put"):
        return
    if not callable(streamer):
        raise TypeError(f"streamer: expected a transformers streamer or a callable streamer(row, tokens, drafted), got {what(streamer)}.")
    try:
        signature = inspect.signature(streamer)
    except ValueError:  # of some builtins nothing is known
        return
    try:
        signature.bind(0, [], [])
    except TypeError as error:
        raise TypeError(f"streamer: it is called with three values, streamer(row, tokens, drafted), and takes {signature}: {error}.") from error


@dataclass
class Row:
    """One sequence of the call. tokens: prompt and committed tokens, no padding; drafted: per new token, whether it was drafted; ended: it is
    still there for its last token to be cached, and gets no more."""

    index: int
    tokens: list[int]
    prompt: int
    drafted: list[bool] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    ended: bool = False


class Sequences:
    """rows: all rows of the call; `active`: those that go on.

    max_new:  tokens that every row may still get, counted from its prompt.
    criteria: stopping criteria; evaluated per committed token, prefix by prefix and in order, on the row's own tokens.
    streamer: a text streamer (batch 1; one `put` per token, `end` at the end) or a callable(row, tokens, drafted). One with `put_logits` gets, before the `put`s of a
              round, its tokens and their logits, float32 [n, V], where there are any; they are not kept then.
    hidden:   the prompts stand for embeddings, which criteria do not see.
    """

    def __init__(self, prompts: list[list[int]], max_new: int, criteria: Sequence[StoppingCriteria] = (), device="cpu",
                 streamer: BaseStreamer | Callback | None = None, hidden: bool = False):
        self.rows = [Row(index, list(tokens), len(tokens)) for index, tokens in enumerate(prompts)]
        self.active = list(self.rows)
        self.max_new, self.device, self.streamer, self.hidden = max_new, device, streamer, hidden
        self.eos: set[int] = set()
        self.criteria, self.own = [], {}
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is not MaxLengthCriteria:
                self.criteria.append(criterion)

    @property
    def tokens(self) -> list[list[int]]:
        """The tokens of the active rows, live."""
        return [row.tokens for row in self.active]

    def room(self) -> list[int]:
        """Tokens that each active row may still get, the target's own included: 1, for which nothing is drafted, of a row that has ended."""
        return [1 if row.ended else self.max_new - (len(row.tokens) - row.prompt) for row in self.active]

    def append(self, row: Row, tokens: list[int], drafted: int, scores=(), logits=()) -> tuple[int, bool]:
        """Commit `tokens` to `row`, the first `drafted` of which were drafted, up to and including the first that ends it.
        Returns how many were committed, and whether the row is done. scores, logits: one float [V] per token, or nothing."""
        before, done = len(row.tokens), False
        for i, token in enumerate(tokens):
            row.tokens.append(token)
            row.drafted.append(i < drafted)
            if scores:
                row.scores.append(scores[i])
            if logits:
                row.logits.append(logits[i])
            done = token in self.eos or len(row.tokens) - row.prompt >= self.max_new
            done = self._criteria_met(row) or done
            if done:
                break
        count = len(row.tokens) - before
        self._stream(row, count)
        return count, done

    def _criteria_met(self, row: Row) -> bool:
        if not self.criteria:
            return False
        ids = upload([row.tokens[row.prompt :] if self.hidden else row.tokens], self.device)
        scores = tuple(score[None] for score in row.scores) or None
        own = self.own.setdefault(row.index, [_of_row(criterion, row.prompt) for criterion in self.criteria])
        return any([_verdict(criterion, ids, scores, len(self.rows) == 1) for criterion in own])

    def _stream(self, row: Row, count: int) -> None:
        if self.streamer is None or not count:
            return
        tokens = row.tokens[-count:]
        if hasattr(self.streamer, "put"):
            if row.logits and hasattr(self.streamer, "put_logits"):
                self.streamer.put_logits(tokens, torch.stack(row.logits))
                row.logits.clear()
            for token in tokens:
                self.streamer.put(torch.tensor([token]))
        else:
            self.streamer(row.index, tokens, row.drafted[-count:])

    def keep(self, rows: list[int]) -> None:
        """Only these of the active rows go on."""
        self.active = [self.active[row] for row in rows]

    def padded(self, prompt: torch.Tensor, pad_token_id: int) -> torch.Tensor:
        """int64 [B, P + new]: the prompts as they were passed [B, P], each row's new tokens, then padding on the right."""
        new = [row.tokens[row.prompt :] for row in self.rows]
        width = max(map(len, new))
        tail = [tokens + [pad_token_id] * (width - len(tokens)) for tokens in new]
        return torch.cat([prompt, upload(tail, prompt.device, torch.long).reshape(len(new), width)], dim=1)


def _of_row(criterion: StoppingCriteria, prompt: int) -> StoppingCriteria:
    """lm-eval's criterion counts the rows of its batch, and the tokens of their padded prompts: one for a row alone."""
    if not {"done_tracker", "initial_decoder_input_length"} <= getattr(criterion, "__dict__", {}).keys():
        return criterion
    own = copy(criterion)
    own.done_tracker, own.initial_decoder_input_length = [False], prompt
    return own


def _verdict(criterion: StoppingCriteria, ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None, alone: bool) -> bool:
    """alone: whether there is one row."""
    said = criterion(ids, scores)
    found = torch.as_tensor(said)
    if found.numel() != 1:
        raise ValueError(f"stopping_criteria: {type(criterion).__name__} was given one row and returned {found.numel()} verdicts. With speculative=True "
                         f"every row is looked at alone; make it one that does not know the batch.")
    if said is True and not alone and not hasattr(criterion, "done_tracker"):
        warnings.warn(f"stopping_criteria: {type(criterion).__name__} returned True, which plain generate() takes for all rows of a batch. With speculative=True every row is looked at "
                      f"alone, and ends by itself; a criterion that means the row returns a tensor, True or False for each of input_ids.", stacklevel=2)
    return bool(found)
