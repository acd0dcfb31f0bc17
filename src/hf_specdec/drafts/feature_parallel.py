"""A feature drafter that drafts all K tokens in one pass, over masked places behind the committed text (P-EAGLE, Amazon 2026; speculators and SpecForge train such ones)."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..proposal import Proposal
from ..uploads import upload
from .base import Context
from .feature import FeatureDraft
from .features import fused

TOKENS = 5  # that a pass drafts, where K is not known


class ParallelFeatureDraft(FeatureDraft):
    """Drafts with a feature drafter that has learned masked places: behind the text come K - 1 of them, which see the text and the ones before, each with one and the same token and
    states. Where the target samples, every token is drawn from the law of its place, which knows none of the others.

    model:  the feature drafter, with `mask_token` (its id) and `mask_states` [len(reads) * H], in the place of the target's states (`training.load_drafter` makes the whole draft).
    target: as in `FeatureDraft`.
    """

    name = "feature_parallel"
    alone = False

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel, **options):
        if getattr(model, "mask_states", None) is None:
            raise ValueError(f"model: {type(model).__name__} has no masked places; load a P-EAGLE drafter with training.load_drafter, or pass FeatureDraft(model, target).")
        super().__init__(model, target, **options)

    def start(self, context: Context) -> None:
        super().start(context)
        self.masked = None if context.stock else fused(self.model, self.model.mask_states.to(self.model.device))
        self.block: torch.Tensor | None = None

    def _several(self, context: Context, tokens: list[torch.Tensor], k: list[int], step: int) -> None:
        return None

    def _scores(self, context: Context, tokens: list[torch.Tensor], k: list[int], step: int) -> torch.Tensor:
        if step == 0:
            self.first = True
            places = torch.full((len(k), max(k) - 1), self.model.mask_token, device=self.cached.device)
            masks = Proposal.chain(places, None, [max(own - 1, 0) for own in k], self.name) if max(k) > 1 else None
            logits = self.cached.score(self._known(context), masks)
            self.cached.commit([1] * len(k))
            self._shown()
            self.block = self._common_vocabulary(logits.to(context.device), context)
        return self.block[:, step : step + 1]

    def _ahead(self, width: int) -> torch.Tensor:
        """As in `FeatureDraft`; masked places have states of their own."""
        starts, known = upload([self.cached.lengths, self.known], self.states.device)
        places = starts[:, None] + torch.arange(width, device=self.states.device)
        return torch.where((places < known[:, None])[..., None], super()._ahead(width), self.masked)

    def relative_cost(self, target: PreTrainedModel) -> float:
        """c by size: a pass reads the drafter once, for K tokens; TOKENS of them, before any is timed."""
        return super().relative_cost(target) / TOKENS

    def finish(self) -> None:
        self.masked, self.block = None, None
        super().finish()
