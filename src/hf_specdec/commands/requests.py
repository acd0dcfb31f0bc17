"""What a request to `hf-specdec serve` says and transformers' server passes over, or fails at: refused by name before any work, or made an argument of
`generate()`. The fields are those of the OpenAI API (https://platform.openai.com/docs/api-reference/chat/create)."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from math import inf, isfinite
from typing import Any

import torch
from transformers import LogitsProcessor

from .logprobs import check_logprobs
from .shapes import check_content, check_count, check_shapes, is_number
from .tools import check_tools, tag_of

NOT_DONE = {"suffix": "", "audio": "", "web_search_options": "", "background": "", "conversation": ": send the whole of it as input",
            "previous_response_id": ": send the whole conversation as input", "functions": ": say tools"}  # and what to do instead
COUNTS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of")
RANGES = {"temperature": (0, float("inf")), "top_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2)}
STOPS = 1000  # characters of stop strings: before it writes, transformers spends 7 s on so many and 49,000 tokens of a vocabulary
WHITESPACE = 32  # between two signs of JSON: enough to indent it; small models write it without end where they may
OURS = ("frequency_penalty", "logit_bias")  # which transformers' server reads otherwise than the API means them


# --- bad requests -----------------------------------------------------------------------------------------------------


def check(body: dict[str, Any], template: Any, form: str | None = None, size: int | None = None) -> None:
    """ValueError for a request that cannot be answered as it is meant. template: the model's chat template, or None; form: in which it calls tools; size: of its vocabulary."""
    check_shapes(body)
    for name, instead in NOT_DONE.items():
        if body.get(name):
            raise ValueError(f"{name}: this server does not do that{instead or '; leave it out'}.")
    for name in COUNTS:
        if not is_number(value := 1 if body.get(name) is None else body[name], int) or value < 1:
            raise ValueError(f"{name}: expected a number of 1 or more, got {value!r}.")
    for name, (least, most) in RANGES.items():
        if not is_number(value := least if body.get(name) is None else body[name], int, float) or not least <= value <= most:
            raise ValueError(f"{name}: expected a number {f'of {least} or more' if most == float('inf') else f'from {least} to {most}'}, got {value!r}.")
    if not is_number(body.get("seed") or 0, int):
        raise ValueError(f"seed: expected an int, got {body['seed']!r}.")
    check_best_of(body), predicted_of(body)
    if not all(isinstance(text, str) and text for text in stops_of(body)):
        raise ValueError(f"stop: expected a text or a list of texts, none of them empty, got {body['stop']!r}.")
    if (length := sum(map(len, stops_of(body)))) > STOPS:
        raise ValueError(f"stop: texts of {length} characters, {STOPS} at most; every token of the vocabulary is compared with each place in them.")
    check_count(best_of(body), len(prompts_of(body)))
    for (token,) in bias_of(body) if size else ():
        if not 0 <= token < size:
            raise ValueError(f"logit_bias: token id {token} is not from 0 to {size - 1}, as this model's are.")
    schema_of(body), check_logprobs(body)
    check_tools(body, template, form)


def check_best_of(body: dict[str, Any]) -> None:
    """ValueError for a choice among answers that there cannot be."""
    n, of = body.get("n") or 1, body.get("best_of")
    if of is not None and of < n:
        raise ValueError(f"best_of: it is at least n, got {of} for n={n}.")
    if best_of(body) > n and (body.get("stream") or "prompt" not in body):
        raise ValueError("best_of: more than n, of completions without a stream alone; which answers are best is known at the end. Leave out best_of, or stream.")


def check_messages(body: dict[str, Any]) -> None:
    """ValueError for what is no conversation."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
        raise ValueError("messages: expected a list of one message or more, each an object with a role and a content.")
    for each in messages:
        check_content("messages", each.get("content"))
    for calls in (each.get("tool_calls") or [] for each in messages):
        if not isinstance(calls, list) or not all(is_call(call.get("function", call) if isinstance(call, dict) else None) for call in calls):
            raise ValueError('messages: tool_calls are objects with {"function": {"name": ..., "arguments": ...}}, whose arguments are a JSON object as text.')


def is_call(function: Any) -> bool:
    try:
        return isinstance(function["name"], str) and isinstance(json.loads(said) if isinstance(said := function["arguments"], str) else said, dict)
    except (KeyError, TypeError, ValueError):
        return False


def check_input(body: dict[str, Any]) -> None:
    """ValueError for what is no input of /v1/responses, of which a stream is made where one is asked for alone."""
    body.setdefault("stream", False)
    said = body.get("input")
    if not said or not (isinstance(said, str) or isinstance(said, list) and all(isinstance(each, dict) for each in said)):
        raise ValueError("input: expected a text, or a list of messages and other items, not an empty one.")
    for each in said if isinstance(said, list) else ():
        check_content("input", each.get("content"))


def check_prompt(body: dict[str, Any], size: int) -> None:
    """ValueError for what is no prompt of /v1/completions: a text, one of token ids below `size`, or a list of either."""
    prompts = prompts_of(body)
    if not prompts or not all(prompts) or not (all(isinstance(each, str) for each in prompts) or all(is_ids(each) for each in prompts)):
        raise ValueError("prompt: expected a text, a list of token ids, or a list of either, none of them empty.")
    for token in (token for each in prompts if isinstance(each, list) for token in each):
        if not 0 <= token < size:
            raise ValueError(f"prompt: token id {token} is not from 0 to {size - 1}, as this model's are.")


def is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(is_number(token, int) for token in prompt)


# --- what is asked for ------------------------------------------------------------------------------------------------


def prompts_of(body: dict[str, Any]) -> list[Any]:
    """One or more prompts of /v1/completions; [None] of a request that has another kind."""
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, list) and not (prompt and is_ids(prompt)) else [prompt]


def best_of(body: dict[str, Any]) -> int:
    """Answers that are written to every prompt."""
    return max(body.get("best_of") or 1, body.get("n") or 1)


def predicted_of(body: dict[str, Any]) -> str | None:
    """The text that `prediction` says much of the answer will be; None without one."""
    if (said := body.get("prediction")) is None:
        return None
    content = said.get("content") if isinstance(said, dict) and said.get("type") == "content" else None
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if "messages" not in body or not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise ValueError('prediction: of chat completions, {"type": "content", "content": a text, or a list of {"type": "text", "text": ...}}.')
    return "".join(part["text"] for part in parts)


def stops_of(body: dict[str, Any]) -> list[Any]:
    said = body.get("stop")
    return said if isinstance(said, list) else [] if said is None else [said]


def bias_of(body: dict[str, Any]) -> dict[tuple[int], float]:
    """`logit_bias` as generate()'s sequence_bias."""
    try:
        found = {(int(token),): float(value) for token, value in (body.get("logit_bias") or {}).items()}
    except (AttributeError, OverflowError, TypeError, ValueError):
        found = {(): inf}
    if not all(map(isfinite, found.values())):
        raise ValueError(f"logit_bias: expected an object of token ids and finite numbers, got {body['logit_bias']!r}.")
    return found


def schema_of(body: dict[str, Any]) -> str | None:
    """The JSON schema of the answer, as text, "{}" for any object; None where it may be any text."""
    said = body.get("response_format") or (body.get("text") or {}).get("format") or {"type": "text"}
    kind = said.get("type") if isinstance(said, dict) else None
    schema = said.get("json_schema", said).get("schema") if kind == "json_schema" and isinstance(said.get("json_schema", said), dict) else None
    if kind == "text":
        return None
    if kind != "json_object" and not isinstance(schema, dict):
        raise ValueError('response_format: {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.')
    if find_spec("xgrammar") is None:
        raise ValueError("response_format: the server needs xgrammar for it, which is not installed: pip install xgrammar")
    return json.dumps({"type": "object"} if schema is None else schema)


def configured(config: Any, body: dict[str, Any]) -> Any:
    """A generation config that transformers' server has made of a request, with what it passes over."""
    temperature, top_p = body.get("temperature"), body.get("top_p")
    if temperature or temperature is None and top_p is not None and top_p < 1:
        config.do_sample = True
    if bias := bias_of(body):
        config.sequence_bias = bias
    if not stops_of(body):
        config.stop_strings = None
    return config


def singles(body: dict[str, Any]) -> list[dict[str, Any]]:
    """One request for each of the answers that are written: n to every prompt, or best_of, each with a seed of its own."""
    shared, seed, count = {name: value for name, value in body.items() if name not in ("n", "best_of", "prediction")}, body.get("seed"), best_of(body)
    return [shared | ({} if prompt is None else {"prompt": prompt}) | ({} if seed is None else {"seed": seed + place}) for prompt in prompts_of(body) for place in range(count)]


class Penalties(LogitsProcessor):
    """Of the logits [B, V] of a token `frequency` is taken for each time that the answer has it, and `presence` once."""

    def __init__(self, prompt: int, presence: float, frequency: float):
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        written = input_ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Grammars:
    """Makes logits processors of JSON schemas, and of calls of tools, by xgrammar. form: in which the model calls them; thinks: whether it may think before."""

    def __init__(self, model: Any, tokenizer: Any, form: str | None = None, thinks: bool = False):
        self.model, self.tokenizer, self.form, self.thinks, self.compiler = model, tokenizer, form, thinks, None

    def of_schema(self, schema: str) -> Any:
        return self._made("response_format: xgrammar makes no grammar of this schema", lambda compiler: compiler.compile_json_schema(schema, max_whitespace_cnt=WHITESPACE))

    def of_calls(self, body: dict[str, Any], prompt: torch.Tensor) -> Any:
        """prompt: int64 [P]. None where no call is forced."""
        tag = self.form and tag_of(body, self.form, self.tokenizer.decode(prompt[-16:].tolist()), self.thinks, WHITESPACE)
        return tag and self._made("tools: xgrammar makes no grammar of their parameters", lambda compiler: compiler.compile_structural_tag(tag))

    def _made(self, failing: str, grammar_by: Callable[[Any], Any]) -> Any:
        import xgrammar

        if self.compiler is None:
            ends, size = self.model.generation_config.eos_token_id, self.model.config.get_text_config().vocab_size
            info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=size, stop_token_ids=ends)
            self.compiler = xgrammar.GrammarCompiler(info)
        try:
            return xgrammar.contrib.hf.LogitsProcessor(grammar_by(self.compiler))
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{failing}: {error}") from error


def processors_of(body: dict[str, Any], ids: torch.Tensor, grammars: Grammars) -> list[LogitsProcessor]:
    """Those of a request to a prompt ids, int64 [P]."""
    presence, frequency, schema = body.get("presence_penalty") or 0, body.get("frequency_penalty") or 0, schema_of(body)
    found = [Penalties(len(ids), presence, frequency)] if presence or frequency else []
    found += [] if schema is None else [grammars.of_schema(schema)]
    return found + ([] if not body.get("tools") or (calls := grammars.of_calls(body, ids)) is None else [calls])
