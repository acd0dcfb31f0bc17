"""Tools that a request makes the model call, `tool_choice` "required" or one by its name: a grammar (xgrammar's structural tags) of the calls that the model's chat
template writes and transformers' server reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

THINK = "<think>"


def form_of(processor: Any, model: Any) -> str | None:
    """How a model's calls are written, as transformers' server reads them: "json", the calls of Hermes and Qwen; "xml", those of Qwen 3.5; None for another form or none."""
    from transformers.cli.serving import utils

    read = getattr(utils, "get_response_template", None)
    said = json.dumps((read or utils.get_tool_call_config)(processor, model), default=str)
    if "<function=" in said and ("<tool_call>" in said or read is None):  # older versions of transformers: Qwen's alone, without its marks
        return "xml"
    return "json" if "<tool_call>" in said else None


def forgiving(tokenizer: Any) -> Callable[..., Any]:
    """Its `parse_response`, for which an answer that ends in the middle of a call, for want of room, is text; by itself it raises, and there would be no answer."""
    parse = tokenizer.parse_response

    def parsed(response: Any, *args, **kwargs) -> Any:
        try:
            return parse(response, *args, **kwargs)
        except ValueError:
            return {"content": tokenizer.decode(response, skip_special_tokens=True)} if "prefix" in kwargs else []  # of older versions of transformers: of calls alone

    return parsed


def functions_of(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{name: function} of a request's tools, of chats and of responses."""
    found = [tool.get("function", tool) if isinstance(tool, dict) else None for tool in body.get("tools") or []]
    if not all(isinstance(each, dict) and isinstance(each.get("name"), str) and each["name"] for each in found):
        raise ValueError('tools: a forced call is of functions, {"type": "function", "function": {"name": ..., "parameters": {...}}}.')
    return {each["name"]: each for each in found}


def forced(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The functions of which one has to be called; None where none has."""
    choice = body.get("tool_choice")
    if not body.get("tools") or choice in (None, "auto", "none"):
        return None
    functions = functions_of(body)
    if choice == "required":
        return list(functions.values())
    name = choice.get("function", choice).get("name") if isinstance(choice, dict) and isinstance(choice.get("function", choice), dict) else None
    if not isinstance(name, str):
        raise ValueError(f'tool_choice: "none", "auto", "required", or {{"type": "function", "function": {{"name": ...}}}}, got {choice!r}.')
    if name not in functions:
        raise ValueError(f"tool_choice: {name!r} is none of the tools, which are {', '.join(map(repr, functions))}.")
    return [functions[name]]


def calls_one(body: dict[str, Any]) -> bool:
    """Whether of a chat's calls, which the model may write several of, the first one alone is meant."""
    return "messages" in body and bool(body.get("tools")) and body.get("parallel_tool_calls") is False


def check_tools(body: dict[str, Any], template: Any, form: str | None) -> None:
    """ValueError for tools that the model is not shown, or cannot be made to call. template: its chat template; form: of its calls."""
    if body.get("tool_choice") == "none":
        body.pop("tools", None)
    if not body.get("tools"):
        return
    if isinstance(template, str) and "tools" not in template:
        raise ValueError("tools: the chat template of this model does not show it any; leave them out.")
    if forced(body) is None:
        if body.get("parallel_tool_calls") is False and "input" in body:
            raise ValueError("parallel_tool_calls: of responses, this server leaves the number of calls to the model; ask for chat completions, or leave it out.")
        return
    if form is None:
        raise ValueError("tool_choice: 'auto' or 'none'; in which form this model calls tools is not known, and none can be forced.")
    if body.get("response_format") or (body.get("text") or {}).get("format"):
        raise ValueError("tool_choice: a forced call has the form of its tool; leave out response_format.")
    if find_spec("xgrammar") is None:
        raise ValueError("tool_choice: the server needs xgrammar for it, which is not installed: pip install xgrammar")


def tag_of(body: dict[str, Any], form: str, begun: str, thinks: bool, whitespace: int) -> str | None:
    """The structural tag of a request, as JSON; None where no call is forced. begun: the end of its prompt; thinks: whether the model may think before it calls;
    whitespace: how much of it may be between two signs of JSON."""
    functions = forced(body)
    if functions is None:
        return None
    begin, style, end = ('<tool_call>\n{"name": %s, "arguments": ', "json", "}\n</tool_call>") if form == "json" else (
        "<tool_call>\n<function=%s>\n", "qwen_xml", "\n</function>\n</tool_call>")
    tags = []
    for each in functions:
        content = {"type": "json_schema", "json_schema": each.get("parameters") or {"type": "object"}, "style": style, "max_whitespace_cnt": whitespace}
        name = json.dumps(each["name"]) if form == "json" else each["name"]
        tags.append({"type": "tag", "begin": begin % name, "content": content, "end": end})
    one = body.get("parallel_tool_calls") is False or body["tool_choice"] != "required"
    calls = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True, "stop_after_first": one}
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text", "excludes": [THINK, "</think>"]}, "end": "</think>\n\n"}
    if begun.rstrip().endswith(THINK):
        parts = [thought, calls]
    else:
        parts = [{"type": "optional", "content": thought | {"begin": THINK}}, calls] if thinks else [calls]
    return json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": parts}})
