"""Log-probabilities of an answer's tokens, as the OpenAI API tells them: the target's own, before temperature, penalties, biases and grammars."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import Any

import torch

MOST = 20  # likeliest tokens that are told of each place, as in the API
LEAST = -9999.0  # JSON has no -inf
IN_RESPONSES = "message.output_text.logprobs"  # what a request to /v1/responses says to `include`
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level tokenizers write as themselves (GPT-2's `bytes_to_unicode`)
BYTES = {chr(byte): byte for byte in PRINTED} | {chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in PRINTED)}


@dataclass(frozen=True)
class Entry:
    """A token, its log-probability (None of a prompt's first one), and the likeliest tokens of its place with theirs. first: of its text."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]
    first: bool


def wanted(body: dict[str, Any]) -> int | None:
    """How many of the likeliest tokens a request asks for, beside the one that is written; None for no log-probabilities."""
    said = body.get("logprobs")
    if "prompt" in body:
        return said
    said = IN_RESPONSES in (body.get("include") or ()) or body.get("top_logprobs") if "input" in body else said
    return (body.get("top_logprobs") or 0) if said else None


def check_logprobs(body: dict[str, Any]) -> None:
    """ValueError for log-probabilities that are asked for otherwise than the API has it, or that there are none of."""
    said, top = body.get("logprobs"), body.get("top_logprobs")
    if "input" in body:
        name, said = "top_logprobs", top
    elif "prompt" in body:
        name, said = "logprobs", None if said is False else said
        body["logprobs"] = said
    else:
        if said is not None and not isinstance(said, bool):
            raise ValueError(f"logprobs: expected true or false, got {said!r}; top_logprobs says how many.")
        if top and not said:
            raise ValueError("top_logprobs: say logprobs=true, too.")
        name, said = "top_logprobs", top
    if said is not None and not (isinstance(said, int) and not isinstance(said, bool) and 0 <= said <= MOST):
        raise ValueError(f"{name}: expected an int from 0 to {MOST}, got {said!r}.")
    if "prompt" in body and said is not None and body.get("echo") and body.get("stream"):
        raise ValueError("echo: with logprobs, without a stream alone; leave out one of the three.")


class Tap:
    """What is told of an answer's tokens. top: how many of the likeliest ones; echo: whether of its prompt's tokens, too."""

    def __init__(self, top: int, echo: bool):
        self.top, self.echo, self.prompt = top, echo, []
        self.answer: list[Entry] = []

    def read_prompt(self, ids: list[int], logits: torch.Tensor) -> None:
        """logits [P, V], behind each of the prompt's tokens."""
        self.prompt = [Entry(ids[0], None, [], True), *self._entries(ids[1:], logits[:-1], False)]

    def read(self, tokens: list[int], logits: torch.Tensor) -> None:
        """The answer's next tokens, and the logits [n, V] that each was chosen from, unprocessed."""
        self.answer += self._entries(tokens, logits, not self.answer)

    def _entries(self, tokens: list[int], logits: torch.Tensor, first: bool) -> list[Entry]:
        found = []
        for at in range(0, len(tokens), 128):  # as float32, of a large vocabulary, no more at once
            some = torch.tensor(tokens[at : at + 128], device=logits.device)
            law = logits[at : at + 128].float().log_softmax(-1)
            values, ids = law.topk(self.top, dim=-1)
            own = law.gather(1, some[:, None])[:, 0]
            found += [Entry(token, max(each, LEAST), [(one, max(value, LEAST)) for one, value in zip(*likeliest)], first and at == place == 0)
                      for place, (token, each, *likeliest) in enumerate(zip(some.tolist(), own.tolist(), ids.tolist(), values.tolist()))]
        return found


class Tapped:
    """A streamer, or none, whose tokens' log-probabilities are known. Of one that hands text on by a queue, each token's comes there before its text."""

    def __init__(self, streamer: Any | None, tap: Tap):
        self.streamer, self.tap, self.begun, self.told = streamer, tap, False, 0

    def put_logits(self, tokens: list[int], logits: torch.Tensor) -> None:
        self.tap.read(tokens, logits)

    def put(self, tokens: torch.Tensor) -> None:
        if self.begun and (queue := getattr(self.streamer, "_queue", None)) is not None:
            if self.told == len(self.tap.answer):
                raise ValueError("logprobs: in a stream, of answers with speculation alone, and this one has none; leave out stream.")
            self.streamer._loop.call_soon_threadsafe(queue.put_nowait, self.tap.answer[self.told])
            self.told += 1
        self.begun = True
        if self.streamer is not None:
            self.streamer.put(tokens)

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()


# --- as the API has it ------------------------------------------------------------------------------------------------


class Words:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.known = tokenizer, {}
        self.special = set(getattr(tokenizer, "all_special_ids", ()))
        self.anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]

    def __call__(self, token: int, first: bool = False) -> tuple[str, bytes]:
        """Of a part of a character the text says which bytes it is. first: nothing is before it, for which some tokenizers leave a blank out."""
        if (token, first) not in self.known:
            self.known[token, first] = self._found(token, first)
        return self.known[token, first]

    def _found(self, token: int, first: bool) -> tuple[str, bytes]:
        before, text = self.decoded(self.anchor), self.decoded([*self.anchor, token])
        text = text[len(before) :] if text.startswith(before) and not first else self.decoded([token])
        if "\ufffd" not in text:
            return text, text.encode()
        sign = self.tokenizer.convert_ids_to_tokens(token) or ""
        if found := re.fullmatch("<0x([0-9A-F]{2})>", sign):
            raw = bytes([int(found[1], 16)])
        else:
            raw = bytes(BYTES[each] for each in sign) if sign and all(each in BYTES for each in sign) else text.encode()
        return "".join(f"\\x{byte:02x}" for byte in raw), raw

    def decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Places:
    """Where in a text, from which special tokens are left out, each of its tokens begins."""

    def __init__(self, words: Words):
        self.words, self.decoder, self.at = words, codecs.getincrementaldecoder("utf-8")("replace"), 0

    def __call__(self, entries: list[Entry]) -> list[int]:
        """Those of the next tokens."""
        found = []
        for entry in entries:
            found.append(self.at)
            self.at += 0 if entry.token in self.words.special else len(self.decoder.decode(self.words(entry.token, entry.first)[1]))
        return found


def of_chat(entries: list[Entry], words: Words) -> dict[str, Any]:
    """`logprobs` of a choice of a chat completion."""

    def one(token: int, logprob: float, first: bool) -> dict[str, Any]:
        text, raw = words(token, first)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    content = [one(each.token, each.logprob, each.first) | {"top_logprobs": [one(*other, each.first) for other in each.top]} for each in entries]
    return {"content": content, "refusal": None}


def of_response(entries: list[Entry], words: Words) -> list[dict[str, Any]]:
    """`logprobs` of a text of /v1/responses."""
    return of_chat(entries, words)["content"]


def of_text(entries: list[Entry], places: Places) -> dict[str, Any]:
    """`logprobs` of a choice of a completion, or of its next tokens in a stream."""

    def named(token: int, first: bool) -> str:
        text, raw = places.words(token, first)
        return text if text.encode() == raw else f"bytes:{text}"

    top = [None if each.logprob is None else {named(token, each.first): value for token, value in [*each.top, (each.token, each.logprob)]} for each in entries]
    return {"tokens": [named(each.token, each.first) for each in entries], "token_logprobs": [each.logprob for each in entries],
            "top_logprobs": top, "text_offset": places(entries)}
