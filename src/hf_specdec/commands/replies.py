"""Answers put together: several of transformers' server in one, with what it leaves out of them."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

from .logprobs import Entry


def best(entries: list[list[Entry] | None], n: int, of: int) -> list[int]:
    """Which answers are given, n of every `of`: those with the highest log-probability per token, the best first; all of them, as they are, where there is no choice."""
    if n == of:
        return list(range(len(entries)))
    scores = [sum(each.logprob for each in own) / max(len(own), 1) for own in entries]
    return [place for start in range(0, len(scores), of) for place in sorted(range(start, start + of), key=lambda place: -scores[place])[:n]]


def joined(answers: list[dict[str, Any]], kept: list[int], of_a_prompt: int, more: dict[str, Any]) -> dict[str, Any]:
    """One answer with the choices of those that are `kept`. usage: of all; more: of it."""
    usage = {"prompt_tokens": sum(each["usage"]["prompt_tokens"] for each in answers[::of_a_prompt]),
             "completion_tokens": sum(each["usage"]["completion_tokens"] for each in answers)}
    choices = [choice | {"index": index} for index, place in enumerate(kept) for choice in answers[place]["choices"]]
    return answers[0] | {"choices": choices, "usage": usage | {"total_tokens": sum(usage.values())} | more}


def details(askeds: list[Any], response: bool = False) -> dict[str, Any]:
    """What `usage` says beside the sums: tokens of prompts that were known, and with a prediction, how many of its tokens are in the answers and how many are not."""
    found: dict[str, Any] = {"input_tokens_details" if response else "prompt_tokens_details": {"cached_tokens": sum(asked.report.known for asked in askeds)}}
    counts = [(of_prediction(asked.predicted, asked.report.tokens), len(asked.predicted)) for asked in askeds if asked.predicted is not None]
    if counts:
        accepted = sum(each for each, _ in counts)
        found["completion_tokens_details"] = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": sum(size for _, size in counts) - accepted}
    return found


def of_prediction(predicted: list[int], tokens: list[int]) -> int:
    """How many of the predicted tokens are in the answer, in their order."""
    return sum(block.size for block in SequenceMatcher(None, predicted, tokens, autojunk=False).get_matching_blocks())


def in_response(answer: dict[str, Any], logprobs: list[dict[str, Any]]) -> None:
    """Put log-probabilities where /v1/responses has them: into the text of the message."""
    for part in (part for item in answer["output"] if item["type"] == "message" for part in item["content"] if logprobs):
        part["logprobs"] = logprobs
