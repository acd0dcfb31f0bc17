"""Jump-forward decoding: what a grammar leaves hardly a choice about is drafted, without a model.

Keys and brackets of JSON that is held to a schema, for one. SGLang (Zheng et al. 2024, arXiv 2312.07104, section 4) writes such tokens unasked; here
they are candidates, judged like any other, so that the text is the target's own to the last token.
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from .base import Context, Guess
from .growth import GrownDraft

FEW = 8  # allowed tokens that are hardly a choice
Place = tuple[int, tuple[int, ...]]  # a row, and the tokens drafted behind it


class JumpForwardDraft(GrownDraft):
    """Proposes what `logits_processor` and `prefix_allowed_tokens_fn` leave to choose from, where that is at most 8 tokens. How often such a guess is right is
    measured during the call. Where nothing restricts the text, nothing is proposed. Every place asked about costs a call of the processors.

    tokenizer: the target's: of several tokens the longest goes first, which is how most texts are written. Without one, the highest id.
    branches:  most tokens tried after each one; 1 proposes a chain.
    """

    name = "jump_forward"
    trusted = True
    cost_ratio = 0.0

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None, branches: int = 1):
        super().__init__(branches, FEW)
        if tokenizer is not None and not hasattr(tokenizer, "convert_ids_to_tokens"):
            raise TypeError(f"tokenizer: expected the target's tokenizer, got {type(tokenizer).__name__}.")
        words = [] if tokenizer is None else tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.lengths = [len(word or "") for word in words]
        self.allowed: dict[Place, np.ndarray | None] = {}  # of the places asked about since the rows grew

    def strengths(self, context: Context) -> list[int]:
        """Per row: how many tokens are allowed, or -1 where they are not few."""
        self.allowed = {}
        return [len(self.guesses((b, ()))) or -1 for b in range(len(context.rows))]

    def place(self, b: int) -> Place | None:
        return (b, ()) if self.context.sampler.restricts(b) else None

    def guesses(self, place: Place) -> list[Guess]:
        allowed = self._allowed(place)
        few = np.flatnonzero(allowed).tolist() if allowed is not None and np.count_nonzero(allowed) <= FEW else []
        few.sort(key=lambda token: (self.lengths[token] if token < len(self.lengths) else 0, token), reverse=True)
        return [(token, (len(few), rank), _rate(len(few), rank)) for rank, token in enumerate(few)]

    def step(self, place: Place, token: int) -> Place | None:
        allowed = self._allowed(place)
        return (place[0], (*place[1], token)) if allowed is not None and allowed[token] else None

    def _allowed(self, place: Place) -> np.ndarray | None:
        """Bool [V], or None where the text is at its end, or anything may follow."""
        if place not in self.allowed:
            b, drafted = place
            text = self.context.text(b, list(drafted)) if self.context.sampler.restricts(b) else None
            self.allowed[place] = None if text is None else self.context.sampler.leaves(b, text, self.context.vocab_size).cpu().numpy()
        return self.allowed[place]

    def prior(self, strength: int) -> tuple[float, float]:
        return _rate(strength, 0), 0.7

    def finish(self) -> None:
        self.allowed = {}
        super().finish()


def _rate(few: int, rank: int) -> float:
    """How often a guess is right before anything is measured."""
    return 1.0 if few == 1 else 0.7 if rank == 0 else 0.3 / (few - 1)
