"""`Recipe`: a pair of models, its prompts and its settings, as plain data; and the names of the four runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

BASELINE, MX, SPECULATION, BOTH = "baseline", "MXFP6", "speculation", "MXFP6 + speculation"
RUNS = (BASELINE, MX, SPECULATION, BOTH)
PLAIN_OF = {SPECULATION: BASELINE, BOTH: MX}  # whose output a speculative run has to repeat

ARTICLE = "Qualcomm's article on MX formats and speculative decoding on Cloud AI 100"
ARTICLE_SPEED_UP = {BASELINE: 1.0, MX: 2.0, BOTH: 4.0}  # "about"; it has no figure for speculation alone
GOAL = ARTICLE_SPEED_UP[BOTH]
LOOKUP = "prompt lookup"


class RecipeError(ValueError):
    """Something the user can mend; the message says how."""


@dataclass(frozen=True)
class Recipe:
    """One pair.

    target, draft: hub ids; target "smollm2" is the embedded model; draft None means prompt lookup if `lookup`, else that
    `--draft` has to name one (`draft_missing` says what it is). licence: where a gated target's licence is accepted. code: the target
    writes Python, so that HumanEval can be asked of it.
    prompts: name -> text, or a function that gives both. configs: scale -> function making (target config, draft config,
    None for lookup, or a function that makes the draft of the target), for the scales with random weights.
    """

    name: str
    title: str
    target: str
    prompts: dict[str, str] | Callable[[], dict[str, str]]
    prompt_tokens: int
    new_tokens: int
    draft: str | None = None
    lookup: bool = False
    draft_missing: str = ""
    licence: str = ""
    chat: bool = False
    code: bool = False
    in_article: bool = False
    configs: dict[str, Callable[[], tuple[Any, Any]]] = field(default_factory=dict)

    @property
    def scales(self) -> list[str]:
        return ["full", *self.configs]

    def texts(self) -> dict[str, str]:
        return self.prompts() if callable(self.prompts) else self.prompts


def token_prompts(names: list[str], length: int, vocabulary: int) -> dict[str, list[int]]:
    """For random weights: a prompt of random tokens for every name."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(vocabulary, (length,), generator=generator).tolist() for name in names}


def text_prompts(recipe: Recipe, names: list[str], tokenizer) -> dict[str, list[int]]:
    """Token ids of the prompts, with the chat template where the recipe says so."""
    from hf_specdec.bench.prompts import Prompt

    texts = recipe.texts()
    return {name: list(Prompt(name, recipe.name, texts[name], recipe.chat).ids(tokenizer)) for name in names}
