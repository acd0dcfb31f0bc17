"""Confidence threshold: what the target gives at least so much probability is committed. Lossy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..law import Law
from ..proposal import Proposal, Verdict
from ..uploads import upload
from .base import Acceptance, first_path

if TYPE_CHECKING:
    from ..config import SpeculativeConfig


class ThresholdAcceptance(Acceptance):
    """x is committed where p(x) >= t; of siblings the first that passes; the token after the path is drawn from p.

    LOSSY: no drafted token is committed that the target gives less than t, so that a token comes with probability p(x) at most where
    p(x) < t, and is within 1 - t of its own p(x) where it is above. The law of one token is therefore within a total variation of
    1 - t of p, which a draft that always proposes the same token of probability t attains.
    """

    samples = True

    def __init__(self, threshold: float = 0.3):
        super().__init__(1.0)
        self.threshold = threshold

    @classmethod
    def from_config(cls, config: SpeculativeConfig) -> ThresholdAcceptance:
        cls.check(config.lenience)
        return cls(config.threshold)

    @property
    def lossless(self) -> bool:
        return False

    def passes(self, law: Law, p_x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Bool [B, N] for tokens of probability p_x [B, N] that follow the nodes `before` [B, N]."""
        return p_x >= self.threshold

    def verdict(self, proposal: Proposal, law: Law, coins: torch.Tensor | None) -> Verdict:
        tokens = proposal.tokens
        before = upload(proposal.tree.parents, tokens.device, torch.long).expand(len(law.scores), -1)
        accepted = self.passes(law, law.prob_of(tokens, before), before)
        on_path, last = first_path(proposal.tree, proposal.only_valid(accepted))
        return Verdict(on_path, law.probs_at(last))
