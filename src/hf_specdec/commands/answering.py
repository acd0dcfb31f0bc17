"""The model that `hf-specdec serve` hands to transformers' server: a conversation is not read from its beginning at every turn, and calls of several threads share its passes."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from ..caches import CACHE, cached_tokens, counts_tokens
from ..drafts import SuffixAutomatonDraft
from ..drafts.base import Draft
from ..hints import many
from ..joint import Joint
from ..kinds import BOTH_WAYS
from .logprobs import Tap, Tapped
from .metrics import Metrics, Report

ORDINARY = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "cache_implementation": None,
            "prompt_lookup_num_tokens": None, "assistant_early_exit": None}  # stock assisted decoding does not go on from a cache that lacks several tokens
WEIGHTS = ("model", "target", "whole", "table", "datastore", "heads", "tokenizer", "draft_tokenizer")  # what drafts read and do not change
BEFORE = 4  # tokens of a prompt's end, behind which a predicted text is looked for


@dataclasses.dataclass
class Conversation:
    """A text, as tokens, and the cache of all of them but the last, which says how many they are."""

    tokens: list[int]
    cache: Any

    def shared(self, ids: list[int]) -> int:
        """How many of the cached tokens `ids` begins with; its last one has to be read anew."""
        cached = self.tokens[: cached_tokens(self.cache)]
        return next((place for place, (one, other) in enumerate(zip(cached, ids[:-1])) if one != other), min(len(cached), len(ids) - 1))

    def cut(self, length: int) -> bool:
        """Take the tokens after `length` out of the cache; False where a layer does not hold them all, as windows and states do not."""
        if beyond := cached_tokens(self.cache) - length:
            if any(type(layer) is not DynamicLayer for layer in self.cache.layers):
                return False
            self.cache.crop(-beyond)
        return True


class Answering:
    """What takes the place of an enabled model's `generate`, for as many calls at a time as threads make: the part of a text that it has read or written before is not
    read again, and of every answer `say` is told what speculation did for it. keep: that many conversations, the last ones, are held in memory; drafts: for each
    of the calls that are made at a time one, or none, where every call makes its own."""

    def __init__(self, model, keep: int, say: Callable[[str], None], drafts: list[Draft] | None = None, metrics: Metrics | None = None):
        self.model, self.generate, self.say, self.joint = model, model.generate, say, Joint()
        self.kept: deque[Conversation] = deque(maxlen=keep)
        self.drafts, self.metrics = list(drafts or ()), metrics or Metrics()

    def __call__(self, tap: Tap | None = None, report: Report | None = None, predicted: list[int] | None = None, **kwargs):
        """tap: reads the logits; report: is told what is known of the answer; predicted: tokens that the answer is likely to have, from which it is drafted."""
        report = report or Report()
        with self.joint.taking_part(), self._draft(predicted, kwargs["input_ids"]) as draft:
            report.begun, report.prompt = monotonic(), kwargs["input_ids"].shape[1]
            return self._answer(tap, report, kwargs | draft)

    @contextmanager
    def _draft(self, predicted: list[int] | None, ids: torch.Tensor) -> Iterator[dict[str, Any]]:
        """The draft of a call, as an argument."""
        if predicted is not None:
            yield {"assistant_model": SuffixAutomatonDraft([ids[0, -BEFORE:].tolist() + predicted])}
        elif not self.drafts:
            yield {}
        else:
            draft = self.drafts.pop()
            try:
                yield {"assistant_model": draft}
            finally:
                self.drafts.append(draft)

    def _answer(self, tap: Tap | None, report: Report, kwargs: dict[str, Any]) -> torch.Tensor:
        ids, apart = kwargs["input_ids"][0].tolist(), self.model.config.model_type in BOTH_WAYS  # what it has read goes by what came behind, and marks say how
        kwargs = kwargs if apart else without_marks(kwargs)
        alone = not apart and not is_shown(kwargs) and is_alone(kwargs.get("generation_config"), self.model.generation_config)
        if tap is not None:
            if not is_alone(kwargs.get("generation_config"), self.model.generation_config):
                raise ValueError("logprobs: of a text that is decoded the ordinary way alone, without beams, say; leave out generation_config.")
            kwargs |= {"streamer": Tapped(kwargs.get("streamer"), tap)}
            self.tell(tap, kwargs["input_ids"], alone)
        if kwargs.get("streamer") is not None:
            kwargs |= {"streamer": Timed(kwargs["streamer"], report)}
        cache, known = self.take(ids) if alone else (None, 0)
        report.known = known
        try:
            out = self.generate(**kwargs | in_full(kwargs.get("generation_config"), tap is not None), **({CACHE: cache} if known else {}))
        except BaseException:  # a client has gone: the next turn finds what was known
            if known and (held := Conversation(ids, cache)).cut(known):
                self.kept.append(held)
            raise
        if tap is not None and out.logits:  # of plain generate(), which hands no streamer logits
            tap.read(out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits))
        if alone and (cache := getattr(out, CACHE, None)) is not None and counts_tokens(cache):  # one of states alone says nothing of its text
            self.kept.append(Conversation(out.sequences[0].tolist(), cache))
        report.done, report.tokens = monotonic(), out.sequences[0, len(ids) :].tolist()
        self.metrics.answered(report, getattr(out, "speculation", None))
        self.say(line_of(out, len(ids), known))
        return out.sequences

    def tell(self, tap: Tap, ids: torch.Tensor, alone: bool) -> None:
        """Of a prompt ids [1, P] what the model gave its tokens; what was read for it is not read again."""
        if not tap.echo:
            return
        if self.model.config.model_type in BOTH_WAYS:
            raise ValueError("echo: without logprobs alone; this model reads a prompt in both directions, and gives its tokens none.")
        with torch.no_grad():
            out = self.model(input_ids=ids, use_cache=True)
        tap.read_prompt(ids[0].tolist(), out.logits[0])
        if alone and (cache := getattr(out, CACHE, None)) is not None and counts_tokens(cache):
            self.kept.append(Conversation(ids[0].tolist(), cache))

    def take(self, ids: list[int]) -> tuple[Any, int]:
        """The cache of what `ids` begins with, and its number of tokens; (None, 0) for none, and where more than half of a conversation would be lost."""
        known, found = max(((each.shared(ids), place) for place, each in enumerate(self.kept)), default=(0, None))
        if not known or 2 * known < cached_tokens(self.kept[found].cache) or not self.kept[found].cut(known):
            return None, 0
        cache = self.kept[found].cache
        del self.kept[found]  # the answer's text takes its place
        return cache, known


def in_full(config: Any, logits: bool = False) -> dict[str, Any]:
    """The argument that has a call return its cache, and logits: in a copy of the config, beside which transformers wants no other, or without one by its name."""
    said = {"return_dict_in_generate": True} | ({"output_logits": True} if logits else {})
    if config is None:
        return said
    config = copy.copy(config)
    for name, value in said.items():
        setattr(config, name, value)
    return {"generation_config": config}


def is_alone(config: Any, own: Any) -> bool:
    """Whether a request, whose generation config may say anything, is for one text with a cache of the ordinary kind; what it leaves out the model's `own` says."""
    said = ((ordinary, *(getattr(each, name, None) for each in (config, own))) for name, ordinary in ORDINARY.items())
    return all(next((value for value in values if value is not None), ordinary) == ordinary for ordinary, *values in said)


def without_marks(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A request without what says of every token that it is text (zeros in `token_type_ids`, say), as processors of models that read images do where there is none."""
    ids = kwargs["input_ids"]
    marks = {name for name, value in kwargs.items() if name.endswith("token_type_ids") and value is not None and value.shape == ids.shape and not value.any()}
    return {name: value for name, value in kwargs.items() if name not in marks}


def is_shown(kwargs: dict[str, Any]) -> bool:
    """Whether a request comes with more than text: images, say, for which tokens alone do not stand."""
    return any(hasattr(value, "dtype") for name, value in kwargs.items() if name not in ("input_ids", "attention_mask"))


def line_of(out: Any, prompt: int, known: int) -> str:
    """One line about an answer."""
    tokens = out.sequences.shape[1] - prompt
    text = f"{many(tokens, 'token')} to a prompt of {prompt}"
    if known:
        text += f" ({known} of them known)"
    if (trace := getattr(out, "speculation", None)) is None:
        return f"{text}, without speculation"
    rate = f"acceptance rate {trace.acceptance_rate:.0%}" if trace.proposed else "nothing was drafted"
    return f"{text}, {many(trace.target_calls, 'target forward')}, block efficiency {trace.block_efficiency:.2f}, {rate}"


class Timed:
    """A streamer that tells a report of the tokens, and so when the first one came: what hears the end of a stream may be faster than the call."""

    def __init__(self, streamer: Any, report: Report):
        self.streamer, self.report, self.put_prompt = streamer, report, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.streamer, name)

    def put(self, tokens: torch.Tensor) -> None:
        if self.put_prompt:
            self.report.token(tokens.tolist())
        self.put_prompt = True
        self.streamer.put(tokens)


def twins(draft: Any, count: int) -> list[Draft]:
    """`count` drafts, `draft` among them, of calls that run at the same time, with the same weights; [] for a model, of which every call makes a draft, and for None."""
    if not isinstance(draft, Draft):
        return []
    held = [value for each in draft.all() for name, value in vars(each).items() if name in WEIGHTS or isinstance(value, torch.nn.Module)]
    return [draft, *(copy.deepcopy(draft, {id(value): value for value in held}) for _ in range(count - 1))]
