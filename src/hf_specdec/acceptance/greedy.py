"""Greedy matching: a drafted token is committed where it is the target's argmax."""

from __future__ import annotations

import torch

from ..distributions import LenientGreedyLogitsProcessor
from ..law import Law
from ..proposal import Proposal, Verdict
from .base import Acceptance, first_path


class GreedyMatching(Acceptance):
    """Leviathan et al. 2023, section 2.2 (p is one-hot, so a token is accepted with probability 0 or 1); with lenience
    l < 1 also accepted where p(x) >= l * max p (A.5). Of a tree, the branch that follows the argmax."""

    samples = False
    lenient = True

    def verdict(self, proposal: Proposal, law: Law, coins: torch.Tensor | None = None) -> Verdict:
        tree, tokens = proposal.tree, proposal.tokens
        if len(tree) == 0:
            return Verdict(torch.ones_like(law.argmax, dtype=torch.bool), law.argmax[:, 0])
        before = slice(-1) if tree.is_chain else torch.tensor(tree.parents, device=tokens.device)
        accepted = self._accepts(law, before, tokens)
        on_path, last = first_path(tree, proposal.only_valid(accepted))
        return Verdict(on_path, law.argmax.gather(1, last[:, None]).squeeze(1))

    def _accepts(self, law: Law, before: slice | torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Bool [B, N]; before: the nodes that the tokens follow."""
        if self.lenience < 1:
            return tokens == LenientGreedyLogitsProcessor(tokens, self.lenience)(None, law.scores[:, before]).argmax(-1)
        return tokens == law.argmax[:, before]
