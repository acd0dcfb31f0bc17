"""Streamed answers: texts that end before their stop strings, events that end as the API's do, and several answers in one stream."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from .logprobs import Entry


class Failed(Exception):
    """An answer that breaks off while it is streamed."""


class Pieces:
    """A queue of what is streamed, in which texts end before the first stop string: what may begin one is held back until it is known. echo: comes first;
    told: of each item that is handed out, gets the log-probabilities that belong to it."""

    def __init__(self, queue: Any, stops: list[str], echo: str = "", told: deque | None = None):
        self.queue, self.stops, self.held, self.over, self.ready = queue, stops, "", False, []
        self.told, self.entries, self.came, self.out = deque() if told is None else told, [], 0, 0
        if echo:
            self._hand(echo)

    async def get(self) -> Any:
        while not self.ready:
            self.take(await self.queue.get())
        return self.ready.pop(0)

    def get_nowait(self) -> Any:
        while not self.ready:
            self.take(self.queue.get_nowait())
        return self.ready.pop(0)

    def take(self, item: Any) -> None:
        if type(item) is Entry:
            self.entries.append((self.came, item))
        elif type(item) is not str:  # the end, an error, reasoning, a tool call
            if self.held:
                self._hand(self.held)
            self.held = ""
            self._hand(item)
        elif not self.over:
            self.came += len(item)
            text = self.held + item
            kept = before(text, self.stops)
            self.over = len(kept) < len(text)
            open_ = 0 if self.over else max((size for stop in self.stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
            self.held = text[len(text) - open_ :] if open_ else ""
            if ready := kept[: len(kept) - open_]:
                self._hand(ready)

    def _hand(self, item: Any) -> None:
        self.ready.append(item)
        self.out += len(item) if type(item) is str else 0
        mine = [pair for pair in self.entries if type(item) is not str and not self.over or pair[0] < self.out]
        self.entries = self.entries[len(mine) :]
        self.told.append([entry for _, entry in mine])


class Raising(Pieces):
    def take(self, item: Any) -> None:
        if type(item).__name__ == "_StreamError":
            raise Failed(item.msg)
        super().take(item)


def before(text: str, stops: list[str]) -> str:
    """What of a text comes before the first stop string."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


# --- events -----------------------------------------------------------------------------------------------------------


async def finished(stream: AsyncIterator[str], error_of: Callable[[str], dict]) -> AsyncIterator[str]:
    """A stream of events that ends as the API's do, if need be with an error that clients can read."""
    async with aclosing(stream):
        try:
            async for event in stream:
                yield event
        except Failed as error:
            yield f"data: {json.dumps(error_of(str(error)))}\n\n"
        yield "data: [DONE]\n\n"


async def with_logprobs(stream: AsyncIterator[str], told: deque, of: Callable[[list[Entry]], list[dict]]) -> AsyncIterator[str]:
    """The events of a response with the log-probabilities `of` the tokens that `Pieces` has told: of each piece of text, and of the whole at its end."""
    whole: list[dict] = []
    async with aclosing(stream):
        async for text in stream:
            for head, _, data in (event.rpartition("data: ") for event in text.split("\n\n") if event):
                event = json.loads(data)
                kind = event["type"].removeprefix("response.")
                entries = told.popleft() if told and kind in ("output_text.delta", "reasoning_text.delta", "function_call_arguments.done") else []
                if kind == "output_text.delta":
                    event["logprobs"] = of(entries)
                    whole += event["logprobs"]
                elif kind == "output_text.done":
                    whole += of([entry for each in told for entry in each])  # of the end, which is no text
                    told.clear()
                    event["logprobs"] = whole
                for part in _texts(event):
                    part["logprobs"] = whole
                yield f"{head}data: {json.dumps(event)}\n\n"


def _texts(event: dict) -> list[dict]:
    """The finished texts in an event of a response."""
    if event["type"] == "response.content_part.done":
        return [event["part"]]
    items = [event["item"]] if event["type"] == "response.output_item.done" else event["response"]["output"] if event["type"] == "response.completed" else []
    return [part for item in items if item["type"] == "message" for part in item["content"]]


@dataclass(frozen=True)
class Streamed:
    """An answer's events, what `Pieces` told of them, what makes a choice's `logprobs` of that (None: there are none), what ends it, and whether it calls one tool alone."""

    events: AsyncIterator[str]
    told: deque
    logprobs: Callable[[list[Entry]], Any] | None
    leave: Callable[[], None]
    one_call: bool = False


async def in_turn(answers: list[Streamed], of_a_prompt: int, usage: bool, details: Callable[[], dict] = dict) -> AsyncIterator[str]:
    """The events of several answers, one after the other, each with its choice's index. of_a_prompt: answers; usage: whether an event of its own, at the end, says what
    all took, with its `details`."""
    spent, last = {"prompt_tokens": 0, "completion_tokens": 0}, {}
    try:
        for place, answer in enumerate(answers):
            async with aclosing(answer.events):
                async for text in answer.events:
                    for last in map(json.loads, (event.removeprefix("data: ") for event in text.split("\n\n") if event)):
                        took = last.pop("usage", None) or {}
                        spent["prompt_tokens"] += 0 if place % of_a_prompt else took.get("prompt_tokens", 0)
                        spent["completion_tokens"] += took.get("completion_tokens", 0)
                        for choice in last["choices"]:
                            choice["index"] = place
                            if answer.one_call and "tool_calls" in (delta := choice.get("delta", {})):
                                delta["tool_calls"] = delta["tool_calls"] if delta["tool_calls"][0]["index"] == 0 else []
                            entries = [] if "role" in choice.get("delta", ()) or not answer.told else answer.told.popleft()
                            choice |= {"logprobs": answer.logprobs(entries)} if answer.logprobs and entries else {}
                        yield f"data: {json.dumps(last)}\n\n"
        if usage:
            yield f"data: {json.dumps(last | {'choices': [], 'usage': spent | {'total_tokens': sum(spent.values())} | details()})}\n\n"
    finally:  # a client that goes leaves answers that have not begun
        for answer in answers:
            answer.leave()
