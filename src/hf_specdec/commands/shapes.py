"""What the fields of a request to `hf-specdec serve` have to be, before anything is read out of them: what transformers' server fails at is refused by name."""

from __future__ import annotations

import json
from typing import Any

from ..hints import many

OBJECT, LIST, TEXT = (dict, "an object"), (list, "a list"), (str, "a text")
SHAPES = {"tools": LIST, "include": LIST, "instructions": TEXT, "text": OBJECT, "stream_options": OBJECT, "chat_template_kwargs": OBJECT, "generation_config": TEXT}
OURS = {"add_generation_prompt", "load_audio_from_video", "return_dict", "return_tensors", "tokenize", "tools"}  # what the server says to a chat template
TEXTS = ("text", "input_text", "output_text")  # types of a content's parts
ANSWERS, ALL = 128, 2048  # to a prompt, as in the API, and to all prompts of a request, as many as the API takes: each waits in memory for its turn
LEAST, MOST = 1e-30, 1e30  # of temperatures above 0: below, float32 logits become infinite


def is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def check_shapes(body: dict[str, Any]) -> None:
    """ValueError for a field of another kind than the API's, and for numbers that no generator and no float takes."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("the request holds half a character (a surrogate such as \\ud83d by itself), as texts do that were cut in the middle of one. Cut them between characters.") from None
    for name, (kind, said) in SHAPES.items():
        if body.get(name) is None:
            body.pop(name, None)
        elif not isinstance(body[name], kind):
            raise ValueError(f"{name}: expected {said}, got {body[name]!r}.")
    if taken := OURS & {*body.get("chat_template_kwargs", ())}:
        raise ValueError(f"chat_template_kwargs: {', '.join(sorted(taken))} is said by the server itself; leave it out.")
    if not _is_object(body.get("generation_config", "{}")):
        raise ValueError(f"generation_config: expected a JSON object as text, got {body['generation_config']!r}.")
    seed, temperature = body.get("seed") or 0, body.get("temperature") or 0
    if is_number(seed, int) and not -2**63 <= seed < 2**63:
        raise ValueError(f"seed: expected an int of 64 bits, from {-2**63} to {2**63 - 1}, got {seed}.")
    if is_number(temperature, int, float) and (temperature > MOST or 0 < temperature < LEAST):
        raise ValueError(f"temperature: expected a number of 0 or more, and if it is more, from {LEAST} to {MOST}, got {temperature}.")


def check_content(name: str, content: Any) -> None:
    """ValueError for what is no content of a message. name: of the field that it is in."""
    if not (content is None or isinstance(content, str) or isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)):
        raise ValueError(f"{name}: a content is a text, or a list of parts, each an object with its type.")
    for part in content if isinstance(content, list) else ():
        if part["type"] in TEXTS and not isinstance(part.get("text"), str):
            raise ValueError(f"{name}: a part of the type {part['type']!r} has a text, got {part.get('text')!r}.")


def check_count(count: int, prompts: int) -> None:
    """ValueError for too many answers."""
    if count > ANSWERS or count * prompts > ALL:
        raise ValueError(f"n: {count} answers to each of {many(prompts, 'prompt')} are more than a request gets: {ANSWERS} to a prompt and {ALL} in all. Ask in several requests.")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
