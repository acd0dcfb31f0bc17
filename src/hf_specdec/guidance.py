"""Classifier-free guidance (Sanchez et al. 2023, arXiv 2306.17806): the target is asked twice, about its text and about the unconditional one, the negative
prompt (without one, the last token of the prompt) with the same tokens behind it, and what follows has the scores of

    log p(x | unconditional) + guidance_scale * (log p(x | text) - log p(x | unconditional)).

In transformers a logits processor, the first of all, runs the model on the unconditional text, token by token. Here both texts have a cache of the target, and the
candidates of a round go through both: what comes behind every one of them is what the processor would have made of it. Drafts are not guided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, UnbatchedClassifierFreeGuidanceLogitsProcessor

from . import compat, lengths
from .caches import CACHE
from .cached_model import CachedModel
from .kinds import COUNTS_BY_MASK, GUIDED_OTHERWISE, LOOKS_AT_PADDING
from .law import wide
from .probe import check_tokens
from .proposal import Proposal
from .signatures import taken_by
from .tree import Tree

if TYPE_CHECKING:
    from .elsewhere import Elsewhere

_REFUSED = "is not there with speculative=True"


@dataclass
class Guidance:
    """scale: guidance_scale. texts: per row, the negative prompt without padding. ahead: per row, how much padding stands before it, which transformers counts in its
    positions."""

    scale: float
    texts: list[list[int]]
    ahead: list[int]


def without_guidance(processors: LogitsProcessorList) -> tuple[UnbatchedClassifierFreeGuidanceLogitsProcessor | None, LogitsProcessorList]:
    """The first processor, where it is the one that guides, and the rest. (Behind others, it is refused with those that keep a state.)"""
    if not len(processors) or type(processors[0]) is not UnbatchedClassifierFreeGuidanceLogitsProcessor:
        return None, processors
    return processors[0], type(processors)(processors[1:])


def guidance_of(processor: Any, model: PreTrainedModel, prompts: list[list[int]], traits: compat.ModelTraits, generation, shown: bool, most: int) -> Guidance | None:
    """What a processor of `without_guidance` asks for; None without one. prompts: the rows without padding; shown: whether something stands beside their
    text; most: tokens that a row may get. ValueError for what cannot be guided."""
    if processor is None:
        return None
    _check(processor, model, traits, generation, shown)
    given = processor.unconditional_context
    ids, mask = given["input_ids"], given["attention_mask"]
    if ids is None:
        ids = torch.tensor([row[-1:] for row in prompts], device="cpu")
    if not torch.is_tensor(ids) or ids.ndim != 2 or len(ids) != len(prompts) or ids.shape[1] == 0:
        raise ValueError(f"negative_prompt_ids: expected token ids int64 [{len(prompts)}, L], a negative prompt per row (num_return_sequences makes rows, too), got "
                         f"{list(ids.shape) if torch.is_tensor(ids) else type(ids).__name__}. Repeat it for every row, or leave it out.")
    if mask is not None and (not torch.is_tensor(mask) or mask.shape != ids.shape):
        raise ValueError(f"negative_prompt_attention_mask: expected the shape of negative_prompt_ids, {list(ids.shape)}, got "
                         f"{list(mask.shape) if torch.is_tensor(mask) else type(mask).__name__}. Give one number per token, 0 for padding, or leave it out.")
    real = torch.ones(ids.shape, dtype=torch.long, device="cpu") if mask is None else mask.cpu().long()
    if not torch.equal(real, real.bool().long().cummax(-1).values) or not real[:, -1].all():
        raise ValueError("negative_prompt_attention_mask: expected 1 for a token and 0 for padding, which is on the left, and a token in every row. Pad the negative "
                         'prompts with tokenizer.padding_side = "left".')
    pads = (ids.shape[1] - real.sum(-1)).tolist()
    texts = [row[pad:] for row, pad in zip(ids.tolist(), pads)]
    check_tokens(model, ids, texts, "negative_prompt_ids")
    if traits.max_positions and ids.shape[1] > traits.max_positions:
        raise ValueError(f"negative_prompt_ids: the negative prompt has {ids.shape[1]} tokens and the target's context is {traits.max_positions}. Shorten it.")
    for check in (lengths.check_rope, lengths.check_selection):
        check(compat.unwrap(model), ids.shape[1] + most, "target")
    kind = compat.unwrap(model).config.model_type
    if any(pads) and kind in LOOKS_AT_PADDING:
        raise ValueError(f"negative_prompt_attention_mask: {type(compat.unwrap(model)).__name__} looks at the padding of a negative prompt. Pass rows whose negative prompts have as many "
                         "tokens, or one row at a time.")
    return Guidance(processor.guidance_scale, texts, [0] * len(pads) if kind in COUNTS_BY_MASK else pads)


def _check(processor: Any, model: PreTrainedModel, traits: compat.ModelTraits, generation, shown: bool) -> None:
    """ValueError for a call that cannot be guided, whatever the negative prompt."""
    scale, kind = processor.guidance_scale, type(compat.unwrap(model)).__name__
    if not isinstance(scale, Real) or not isfinite(scale):
        raise ValueError(f"guidance_scale={scale!r}: expected a number, 1 for no guidance.")
    if compat.unwrap(processor.model) is not compat.unwrap(model) or not processor.unconditional_context["first_pass"]:
        raise ValueError("logits_processor: this UnbatchedClassifierFreeGuidanceLogitsProcessor asks another model, or goes on from an earlier call. Pass guidance_scale "
                         "(and negative_prompt_ids) to generate() in its place, or use speculative=False.")
    if (generation.num_beams or 1) > 1:
        raise ValueError(f"guidance_scale={scale}: guidance of num_beams={generation.num_beams} beams {_REFUSED}. Use num_beams=1, or speculative=False.")
    if shown:
        raise ValueError(f"guidance_scale={scale}: guidance of prompts with images, sounds or embeddings, or that are read in both directions, {_REFUSED}. Drop it, or use "
                         f"speculative=False.")
    if traits.encoder != "none" or traits.own_cache or CACHE not in taken_by(compat.unwrap(model), CACHE):
        raise ValueError(f"guidance_scale={scale}: guidance of {kind}, which looks at an encoder or has a cache of its own kind, {_REFUSED}. Drop it, or use speculative=False.")
    if traits.states and CACHE != "cache" or compat.unwrap(model).config.model_type in GUIDED_OTHERWISE:
        why = "carries states (with transformers before 5.24)" if traits.states and CACHE != "cache" else "reads a text otherwise in the passes that guide plain generate()"
        raise ValueError(f"guidance_scale={scale}: guidance of {kind}, which {why}, {_REFUSED}. Drop it, or use speculative=False.")


class Guided(CachedModel):
    """A target whose logits, those of `score`, are guided: what the processor would have made of them, in float32 where the model has 16 bits.

    beside:  the target once more, with the unconditional texts in its cache.
    begins:  per row, the unconditional text, and how many tokens of the row, its prompt, it takes the place of.
    """

    def __init__(self, guidance: Guidance, prompts: list[list[int]], model: PreTrainedModel, limit: int, role: str, traits: compat.ModelTraits, compile: bool | str,
                 elsewhere: Elsewhere | None = None):
        super().__init__(model, limit, role, traits, compile=compile, elsewhere=elsewhere)
        self.scale, self.begins = guidance.scale, list(zip(guidance.texts, map(len, prompts)))
        if traits.max_positions and any(guidance.ahead):  # padding takes up positions
            traits = replace(traits, max_positions=traits.max_positions - max(guidance.ahead))
        self.beside = CachedModel(model, limit + max(map(len, guidance.texts)) - max(map(len, prompts)), role, traits, compile=compile)
        self.beside.ahead = guidance.ahead if any(guidance.ahead) else []

    def _unconditional(self, rows: list[list[int]]) -> list[list[int]]:
        return [[*text, *row[prompt:]] for (text, prompt), row in zip(self.begins, rows)]

    @property
    def new(self) -> bool:
        return CachedModel.new.fget(self) or self.beside.new

    def room(self, rows: list[list[int]], room: list[int]) -> list[int]:
        return self.beside.room(self._unconditional(rows), super().room(rows, room))

    def together(self, rows: list[list[int]], k: list[int]) -> list[int]:
        return self.beside.together(self._unconditional(rows), super().together(rows, k))

    def look(self, media, chunk: int | None = None) -> None:
        super().look(media, chunk)
        self.beside.look(None, chunk)

    def score(self, rows: list[list[int]], proposal: Proposal | None = None) -> torch.Tensor:
        """As `CachedModel.score`, guided, after a pass more over the unconditional texts."""
        calls, seconds = self.beside.calls, self.beside.seconds
        self.conditional, unconditional = super().score(rows, proposal), self.beside.score(self._unconditional(rows), proposal)
        self.calls, self.seconds = self.calls + self.beside.calls - calls, self.seconds + self.beside.seconds - seconds
        self.told |= self.beside.told
        scores, unconditional = wide(self.conditional).log_softmax(-1), unconditional.log_softmax(-1)
        return self.scale * (scores - unconditional) + unconditional

    def raw(self, logits: torch.Tensor) -> torch.Tensor:
        return self.conditional.to(logits.device)

    def commit(self, advance: list[int], tree: Tree | None = None, on_path: torch.Tensor | None = None) -> None:
        super().commit(advance, tree, on_path)
        self.beside.commit(advance, tree, on_path)

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.beside.keep(rows)
        self.begins = [self.begins[row] for row in rows]

    def release(self) -> None:
        super().release()
        self.beside.release()
