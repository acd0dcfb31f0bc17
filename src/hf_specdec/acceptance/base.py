"""The interface of an acceptance rule, and the walk down the tree that the rules share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..law import Law
from ..proposal import Proposal, Verdict
from ..tree import Tree

if TYPE_CHECKING:
    from ..config import SpeculativeConfig


class Acceptance:
    """Judges a proposal against the target's laws.

    lenience: l of Leviathan et al. 2023, A.5, in (0, 1]; 1.0 is exact.
    samples:  whether the rule draws from p (True) or follows an argmax (False).
    coupled:  whether that argmax is one of p with Gumbel noise by (row seed, position), which is how the rule samples.
    lenient:  whether the rule knows what a lenience below 1 means.
    """

    samples: bool
    coupled = False
    lenient = False

    def __init__(self, lenience: float = 1.0):
        self.check(lenience)
        self.lenience = lenience

    @classmethod
    def check(cls, lenience: float) -> None:
        """ValueError for a lenience below 1 where the rule has no meaning for it."""
        if lenience != 1 and not cls.lenient:
            raise ValueError(f"lenience={lenience!r} means nothing to the acceptance rule {cls.__name__}; leave it at 1.0, or "
                             f'use acceptance="auto".')

    @classmethod
    def from_config(cls, config: SpeculativeConfig) -> Acceptance:
        """The rule with the options of a call. ValueError where it has no use for one that was set."""
        return cls(config.lenience)

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


def first_path(tree: Tree, accepted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same down a tree, along the first accepted child of every node; siblings come in rank order, parents before children."""
    if tree.is_chain:
        return chain_path(accepted)
    on_path = torch.zeros((len(accepted), len(tree) + 1), dtype=torch.bool, device=accepted.device)
    on_path[:, 0] = True
    last = torch.zeros(len(accepted), dtype=torch.long, device=accepted.device)
    for node, parent in enumerate(tree.parents, start=1):
        step = accepted[:, node - 1] & (last == parent)
        on_path[:, node] = step
        last = torch.where(step, node, last)
    return on_path, last
