"""Greedy matching: a drafted token is committed where it is the target's argmax."""

from __future__ import annotations

import torch

from ..distributions import Law, LenientGreedyLogitsProcessor
from ..proposal import Proposal, Verdict
from .base import Acceptance, chain_path


class GreedyMatching(Acceptance):
    """Leviathan et al. 2023, section 2.2 (p is one-hot, so a token is accepted with probability 0 or 1); with lenience
    l < 1 also accepted where p(x) >= l * max p (A.5)."""

    samples = False

    def verdict(self, proposal: Proposal, law: Law, coins: torch.Tensor | None = None) -> Verdict:
        tree, tokens = proposal.tree, proposal.tokens
        if len(tree) == 0:
            return Verdict(torch.ones_like(law.argmax, dtype=torch.bool), law.argmax[:, 0])
        if tree.is_chain:
            accepted = self._accepts(law.scores[:, :-1], law.argmax[:, :-1], tokens)
            on_path, last = chain_path(proposal.only_valid(accepted))
        else:
            on_path, last = self._walk(proposal, law)
        return Verdict(on_path, law.argmax.gather(1, last[:, None]).squeeze(1))

    def _accepts(self, scores: torch.Tensor, argmax: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.lenience < 1:
            argmax = LenientGreedyLogitsProcessor(tokens, self.lenience)(None, scores).argmax(-1)
        return tokens == argmax

    def _walk(self, proposal: Proposal, law: Law) -> tuple[torch.Tensor, torch.Tensor]:
        """Follow the first accepted child from the root down; siblings come in rank order, parents before children."""
        parents = torch.tensor(proposal.tree.parents, device=proposal.tokens.device)
        accepted = proposal.only_valid(self._accepts(law.scores[:, parents], law.argmax[:, parents], proposal.tokens))
        on_path = torch.zeros(law.argmax.shape, dtype=torch.bool, device=accepted.device)
        on_path[:, 0] = True
        last = torch.zeros(len(accepted), dtype=torch.long, device=accepted.device)
        for node, parent in enumerate(proposal.tree.parents, start=1):
            step = accepted[:, node - 1] & (last == parent)
            on_path[:, node] = step
            last = torch.where(step, node, last)
        return on_path, last
