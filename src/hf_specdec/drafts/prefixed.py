"""Heads that know the tokens before, on a layer of attention over the target's states (Hydra++: Ankner et al. 2024, arXiv 2402.05109)."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..proposal import Proposal
from ..uploads import upload
from .base import Context
from .feature import FeatureDraft
from .sequential import check, said


class PrefixedDraft(FeatureDraft):
    """Drafts with `model.heads`, as in `SequentialDraft`, from what `model`, whose place t sees the target's states up to t, puts out at the last place before the root.

    model:  one that reads the target's states, with `heads` (`training.load_drafter` makes the whole draft).
    target: as in `FeatureDraft`. Raises ValueError as it does, and for a model without heads.
    """

    name = "prefixed"
    alone = False
    learns = False

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel, **options):
        check(getattr(model, "heads", None))
        super().__init__(model, target, **options)

    def propose(self, context: Context, k: list[int]) -> Proposal:
        return super().propose(context, [min(own, self.model.heads.depth) for own in k])

    def _several(self, context: Context, tokens: list[torch.Tensor], k: list[int], step: int) -> None:
        return None

    def _scores(self, context: Context, tokens: list[torch.Tensor], k: list[int], step: int) -> torch.Tensor:
        if step == 0:
            self.first = True
            self.cached.score(self._known(context))
            self.cached.commit([1] * len(k))
            states = self._shown()
            last = upload(self.cached.fresh, states.device) - 1
            self.output = self.model.heads.begin(states[torch.arange(len(last), device=states.device), last])
        logits, self.output = said(self.model.heads, step, self.output, tokens, context)
        return logits

    def relative_cost(self, target: PreTrainedModel) -> float:
        """c by size: a proposal reads the model once, and each of its heads."""
        return super().relative_cost(target) / self.model.heads.depth
