"""Forks: where two greedy outputs of one target part, and whether rounding explains it.

In 16 bit the logits depend on how many tokens share a forward pass, so that two sound decoders may break a near-tie
differently. The judge is the same target in the next wider precision: a fork is a near-tie if the two tokens lie closer
together there than twice the rounding error of the target's own logits at that very position.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from functools import cached_property

import torch

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True)
class Fork:
    """position: index of the first differing new token (0 = the first after the prompt).
    plain, ours: the two tokens; None where that output had ended.
    top2_gap: logit of the most likely token minus that of the second, in the wider precision.
    distance: distance of the two tokens' logits, in the wider precision.
    rounding: largest error of the target's own logits there against the wider precision.
    """

    position: int
    plain: int | None
    ours: int | None
    top2_gap: float
    distance: float
    rounding: float

    @property
    def near_tie(self) -> bool:
        return self.distance <= 2 * self.rounding

    def to_dict(self) -> dict:
        return asdict(self) | {"near_tie": self.near_tie}

    def explain(self, tokenizer) -> str:
        """One line for a person."""
        plain, ours = (
            repr(tokenizer.decode([token])) if token is not None else "(end)" for token in (self.plain, self.ours)
        )
        verdict = "a near-tie: rule sound, arithmetic differs" if self.near_tie else "NOT explained by rounding"
        return (
            f"token {self.position + 1}: plain {plain}, speculative {ours}; top-2 gap {self.top2_gap:.4f}, "
            f"distance of the two {self.distance:.4f}, rounding error of the logits {self.rounding:.4f}: {verdict}"
        )


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first difference, None if the lists are equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class Judge:
    """Explains forks of `model`. The wider copy is made when the first fork appears."""

    def __init__(self, model):
        self.model = model

    @cached_property
    def reference(self):
        return copy.deepcopy(self.model).to(WIDER.get(self.model.dtype, torch.float64))

    @torch.no_grad()
    def fork(self, prompt: list[int], plain: list[int], ours: list[int]) -> Fork | None:
        """The fork between two outputs (new tokens only) for one prompt, None if they are equal."""
        position = first_difference(plain, ours)
        if position is None:
            return None
        tokens = [output[position] if position < len(output) else None for output in (plain, ours)]
        logits = _next_logits(self.reference, prompt, plain[:position])
        own = _next_logits(self.model, prompt, plain[:position]).to(logits.dtype)
        best, second = logits.topk(2).values.tolist()
        distance = float("inf") if None in tokens else abs(float(logits[tokens[0]] - logits[tokens[1]]))
        return Fork(position, *tokens, best - second, distance, float((own - logits).abs().max()))


def _next_logits(model, prompt: list[int], text: list[int]) -> torch.Tensor:
    """[V] after the prompt and the text; of an encoder-decoder, after the text that its decoder has written to the prompt."""
    if not model.config.is_encoder_decoder:
        return model(input_ids=torch.tensor([prompt + text], device=model.device), use_cache=False).logits[0, -1]
    start = model.generation_config.decoder_start_token_id
    start = model.config.decoder_start_token_id if start is None else start
    ids, own = (torch.tensor([row], device=model.device) for row in (prompt, [start, *text]))
    return model(input_ids=ids, decoder_input_ids=own, use_cache=False).logits[0, -1]
