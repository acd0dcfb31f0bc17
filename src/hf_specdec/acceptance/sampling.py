"""Speculative sampling: modified rejection sampling, exact for every draft."""

from __future__ import annotations

import torch

from ..distributions import Law
from ..proposal import Proposal, Verdict
from .base import Acceptance, chain_path


class SpeculativeSampling(Acceptance):
    """Leviathan et al. 2023, Algorithm 1: x ~ q is accepted with probability min(1, p(x) / q(x)); after a rejection the
    token comes from the residual norm(max(0, p - q)), after full acceptance from p. A point-mass draft has a one-hot q.
    Siblings of a tree are judged one after another, each against the residual that the one before has left.

    Lenience l (A.5) puts l * q in the place of q: no token is then committed with probability above p(x) / l.
    """

    samples = True

    def accept(self, p: torch.Tensor, q: torch.Tensor | float) -> torch.Tensor:
        """Acceptance probability of x, min(1, p(x) / (l q(x))); compared with a coin r by r < it, since r can be 0."""
        return (p / (self.lenience * q)).clamp(max=1)

    def residual(self, p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Weights of the residual law, max(0, p - l q), [B, V]; q None stands for the one-hot of x [B]. Where nothing is
        left (p equals q up to rounding, and the rejection was rounding too) it is p itself."""
        if q is None:
            taken = p.gather(-1, x[:, None])
            left = p.scatter(-1, x[:, None], (taken - self.lenience).clamp(min=0))
        else:
            left = (p - self.lenience * q).clamp(min=0)
        return torch.where(left.sum(-1, keepdim=True) > 0, left, p)

    def verdict(self, proposal: Proposal, law: Law, coins: torch.Tensor | None) -> Verdict:
        if len(proposal.tree) == 0:
            node = torch.zeros(len(law.scores), dtype=torch.long, device=law.scores.device)
            return Verdict(torch.ones((len(node), 1), dtype=torch.bool, device=node.device), law.probs_at(node))
        return self._chain(proposal, law, coins) if proposal.tree.is_chain else self._walk(proposal, law, coins)

    def _chain(self, proposal: Proposal, law: Law, coins: torch.Tensor | None) -> Verdict:
        tokens, q, n = proposal.tokens, proposal.probs, len(proposal.tree)
        p_x = law.prob_of_next(tokens)
        q_x = 1.0 if q is None else q.gather(-1, tokens[..., None]).squeeze(-1)
        valid = proposal.valid
        on_path, last = chain_path((coins < self.accept(p_x, q_x)) & valid)
        p = law.probs_at(last)
        first_rejected = last.clamp(max=n - 1)
        rejected = (last < n) & valid.gather(1, first_rejected[:, None]).squeeze(1)
        rows = torch.arange(len(tokens), device=tokens.device)
        left = self.residual(p, None if q is None else q[rows, first_rejected], tokens[rows, first_rejected])
        return Verdict(on_path, torch.where(rejected[:, None], left, p))

    def _walk(self, proposal: Proposal, law: Law, coins: torch.Tensor | None) -> Verdict:
        tokens, valid = proposal.tokens, proposal.valid
        rows = torch.arange(len(tokens), device=tokens.device)
        last = torch.zeros_like(rows)
        on_path = torch.zeros((len(rows), len(proposal.tree) + 1), dtype=torch.bool, device=tokens.device)
        on_path[:, 0] = True
        p = law.probs_at(last)
        for node, parent in enumerate(proposal.tree.parents, start=1):
            x, judged = tokens[:, node - 1], valid[:, node - 1] & (last == parent)
            q = None if proposal.probs is None else proposal.probs[:, node - 1]
            accepted = judged & (coins[:, node - 1] < self.accept(p[rows, x], 1.0 if q is None else q[rows, x]))
            left = self.residual(p, q, x)
            p = torch.where((judged & ~accepted)[:, None], left / left.sum(-1, keepdim=True), p)
            last = torch.where(accepted, node, last)
            p = torch.where(accepted[:, None], law.probs_at(last), p)
            on_path[:, node] = accepted
        return Verdict(on_path, p)
