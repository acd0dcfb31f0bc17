"""The interface of an acceptance rule, and the walk down the tree that the rules share."""

from __future__ import annotations

import torch

from ..distributions import Law
from ..proposal import Proposal, Verdict


class Acceptance:
    """Judges a proposal against the target's laws.

    lenience: l of Leviathan et al. 2023, A.5, in (0, 1]; 1.0 is exact.
    samples:  whether the rule draws from p (True) or follows its argmax (False).
    """

    samples: bool

    def __init__(self, lenience: float = 1.0):
        self.lenience = lenience

    @property
    def lossless(self) -> bool:
        """Whether the committed tokens follow the target's own law exactly."""
        return self.lenience == 1.0

    def verdict(self, proposal: Proposal, law: Law, coins: torch.Tensor | None) -> Verdict:
        """law: p at the nodes 0..N; coins: float64 [B, N] in [0, 1), one per drafted token (None for a rule
        that does not draw, or for an empty proposal)."""
        raise NotImplementedError


def chain_path(accepted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """accepted: bool [B, N], each token judged alone. Returns on_path [B, N+1] and the last node [B] of the path."""
    prefix = accepted.cumprod(-1)
    return torch.nn.functional.pad(prefix.bool(), (1, 0), value=True), prefix.sum(-1)
