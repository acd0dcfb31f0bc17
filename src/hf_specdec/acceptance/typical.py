"""Typical acceptance: what the target finds likely enough for its own entropy is committed. Lossy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..law import Law
from .threshold import ThresholdAcceptance

if TYPE_CHECKING:
    from ..config import SpeculativeConfig


class TypicalAcceptance(ThresholdAcceptance):
    """Medusa (Cai et al. 2024, arXiv 2401.10774), section 2.3.1: x is committed where p(x) > min(epsilon, delta exp(-H(p))), H the
    entropy of p in nats; of siblings the first that passes; the token after the path is drawn from p.

    LOSSY, without a bound that says much: no drafted token is committed that the target gives min(epsilon, delta exp(-H)) or less, but
    a draft that always proposes the same passing token gets it every time, a total variation of up to 1 - min(epsilon, delta exp(-H)).
    """

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3):
        super().__init__(epsilon)
        self.delta = delta

    @classmethod
    def from_config(cls, config: SpeculativeConfig) -> TypicalAcceptance:
        cls.check(config.lenience)
        return cls(config.typical_epsilon, config.typical_delta)

    def passes(self, law: Law, p_x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        log_p = law.scores.float().log_softmax(-1)
        entropy = torch.special.entr(log_p.exp()).sum(-1).gather(1, before)
        return p_x > (self.delta * (-entropy).exp()).clamp(max=self.threshold)
