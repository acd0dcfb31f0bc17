"""The contestants: every way of decoding is an `Arm`, a function from prompts to new tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import compat
from ..assistants import kind_of
from ..drafts import Draft
from ..proposal import Proposal
from ..standing import said
from ..trace import SpeculationTrace

PLAIN = "plain generate"
PLAIN_COMPILED = "plain generate, compiled"


@dataclass
class Answer:
    """tokens: new tokens per row, padding cut off. trace: what our loop recorded, None for the others."""

    tokens: list[list[int]]
    trace: SpeculationTrace | None = None


@dataclass
class Arm:
    """run(prompts, max_new_tokens) -> Answer. draft: a model whose forwards are watched. k: drafted per round, if fixed. compiled: whether passes are
    compiled, so that no hook may watch them. target: the model that decodes; None: the benchmark's own."""

    name: str
    run: Callable[[list[list[int]], int], Answer]
    draft: Any = None
    k: int | None = None
    max_batch: int | None = None
    compiled: bool = False
    target: Any = None


def padded(model, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, padded on the left, or on the right for an encoder, which may count positions from the left."""
    width, pad = max(map(len, prompts)), pad_token(model)

    def rows(filler: int, parts: list[list[int]]) -> torch.Tensor:
        fill = [[filler] * (width - len(part)) for part in parts]
        return torch.tensor([own + part if not model.config.is_encoder_decoder else part + own for own, part in zip(fill, parts)], device=model.device)

    return {"input_ids": rows(pad, prompts), "attention_mask": rows(0, [[1] * len(row) for row in prompts])}


def columns_before(model, inputs: dict[str, torch.Tensor]) -> int:
    """Columns of the sequences that `generate` returns before the new tokens: the prompt, or the token that an encoder-decoder's decoder starts with."""
    return 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]


def new_tokens(model, sequences: torch.Tensor, width: int) -> list[list[int]]:
    """What follows the prompt of `width` columns, up to and including the first end-of-sequence token."""
    eos = set(eos_tokens(model))
    rows = []
    for row in sequences[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        rows.append(row[:end])
    return rows


def eos_tokens(model) -> list[int]:
    """The tokens that end a text, [] for none."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def answered(model, prompts: list[list[int]], max_new_tokens: int, **options) -> Answer:
    """What `model.generate(**options)` says to the prompts, greedily and without beams where the options do not say otherwise."""
    inputs = padded(model, prompts)
    out = model.generate(**inputs, **{"do_sample": False, "num_beams": 1} | options, max_new_tokens=max_new_tokens, pad_token_id=pad_token(model),
                         return_dict_in_generate=True)
    return Answer(new_tokens(model, out.sequences, columns_before(model, inputs)), getattr(out, "speculation", None))


def generate_arm(name: str, model, draft=None, k: int | None = None, max_batch: int | None = None, compiled: bool = False, **kwargs) -> Arm:
    """An arm that calls `answered(model, ..., **kwargs)`."""
    return Arm(name, lambda prompts, max_new_tokens: answered(model, prompts, max_new_tokens, **kwargs), draft, k, max_batch, compiled, model)


def standard_arms(model, draft=None, k: int | str = "auto", stock_k: int = 5, lookup_k: int = 10, compile: bool = False) -> list[Arm]:
    """Plain generate; stock assisted generation by lookup and by draft model; ours by lookup and by draft model. A `Draft`, which stock
    generation does not know, is ours alone, but for that of an assistant which transformers knows.

    compile: whether ours run passes compiled as a whole, and plain generate stands there once more, compiled over a static cache (what gpt-fast
        does); its first call compiles, and one with a longer text does again.
    k: ours. With a number, the stock arm with a draft model drafts the same number; with "auto" it drafts `stock_k`.
    """
    fixed = None if k == "auto" else k
    ours = {"speculative": {"compile": compile and "model"}, "num_assistant_tokens": k, "compiled": compile}
    what = ", compiled" if compile else ""
    stock = {} if said(model).speculative is None else {"speculative": False}  # of a model whose calls speculate where they say nothing
    arms = [
        generate_arm(PLAIN, model, **stock),
        generate_arm("stock lookup", model, k=fixed or lookup_k, max_batch=1, prompt_lookup_num_tokens=fixed or lookup_k, **stock),
        generate_arm(f"ours lookup{what}", model, k=fixed, **ours),
    ]
    if compile:
        arms.insert(1, generate_arm(PLAIN_COMPILED, model, compiled=True, **compat.compiled_decoding(), **stock))
    if isinstance(draft, Draft):
        if kind_of(model_of(draft)):
            arms.insert(-1, _stock_assistant_arm(model, model_of(draft), fixed or stock_k, **stock))
        arms.append(generate_arm(f"ours {draft.name}{what}", model, model_of(draft), fixed, assistant_model=draft, **ours))
    elif draft is not None:
        arms.insert(-1, _stock_draft_arm(model, draft, fixed or stock_k, **stock))
        arms.append(generate_arm(f"ours draft model{what}", model, draft, fixed, assistant_model=draft, **ours))
    return arms


KERNELS = ", kernels"


def kernel_arms(model, draft=None, k: int | str = "auto", compile: bool = False) -> list[Arm]:
    """Plain generate and ours with `model`, whose weights are those of the benchmark's own in the layout of mx's kernels."""
    arms = [arm for arm in standard_arms(model, draft, k, compile=compile) if not arm.name.startswith("stock") and arm.name != PLAIN_COMPILED]
    return [replace(arm, name=f"{arm.name}{KERNELS}") for arm in arms]


def model_of(draft) -> torch.nn.Module | None:
    """The model whose forwards are those of the draft, if it has one."""
    own = draft if isinstance(draft, torch.nn.Module) else getattr(draft, "model", None)
    return own if isinstance(own, torch.nn.Module) else None


def _stock_assistant_arm(model, assistant, k: int, **stock) -> Arm:
    """Stock generation with an assistant that a family ships, in the way that transformers has for its kind: k tokens a round, or its whole block."""
    if kind_of(assistant) == "dflash":
        return generate_arm("stock assistant", model, assistant, None, 1, assistant_model=assistant, speculation_type="dflash", **stock)
    return _stock_draft_arm(model, assistant, k, **stock)


def _stock_draft_arm(model, draft, k: int, **stock) -> Arm:
    """Stock assisted generation with exactly k tokens a round: constant schedule, no early stop on low confidence."""
    arm = generate_arm("stock draft model", model, draft, k, 1, assistant_model=draft, **stock)

    def run(prompts: list[list[int]], max_new_tokens: int) -> Answer:
        with generation_settings(draft, num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0):
            return arm.run(prompts, max_new_tokens)

    return replace(arm, run=run)


def twin(model):
    """A second tree of modules on the same tensors: layers that are swapped in one stay in the other."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


@contextmanager
def generation_settings(model, **settings):
    """The model's generation config with these settings while the block runs."""
    old = {name: getattr(model.generation_config, name) for name in settings}
    try:
        model.generation_config.update(**settings)
        yield
    finally:
        model.generation_config.update(**old)


def pad_token(model) -> int:
    """What fills up short rows."""
    pad = model.generation_config.pad_token_id
    return next(iter(eos_tokens(model)), 0) if pad is None else pad


class Nothing(Draft):
    """Proposes nothing: the loop at K = 0."""

    name = "nothing"

    def propose(self, context, k):
        return Proposal.from_lists([[] for _ in k], context.device, self.name)
