"""Speculative sampling: modified rejection sampling, exact for every draft."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from ..law import Law
from ..lazy_law import LazyLaw, Left
from ..proposal import Proposal, Verdict
from ..uploads import upload
from .base import Acceptance, chain_path
from .primitive import acceptance_probability, residual


class SpeculativeSampling(Acceptance):
    """Leviathan et al. 2023, Algorithm 1: x ~ q is accepted with probability min(1, p(x) / q(x)); after a rejection the
    token comes from the residual norm(max(0, p - q)), after full acceptance from p. A point-mass draft has a one-hot q.
    Siblings of a tree are judged one after another, each against the residual that the one before has left (multi-round
    speculative sampling, SpecInfer, arXiv 2305.09781, Algorithm 2): exact for siblings drawn independently, for siblings drawn without
    replacement, where q of a later one is q without the earlier ones, and for point masses.

    Lenience l (A.5) puts l * q in the place of q: no token is then committed with probability above p(x) / l.
    """

    samples = True
    lenient = True

    def accept(self, p: torch.Tensor, q: torch.Tensor | float) -> torch.Tensor:
        """`primitive.acceptance_probability` with the rule's lenience."""
        return acceptance_probability(p, q, self.lenience)

    def residual(self, p: torch.Tensor, q: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """`primitive.residual` with the rule's lenience: weights [..., V]."""
        return residual(p, q, x, self.lenience)

    def verdict(self, proposal: Proposal, law: Law, coins: torch.Tensor | None) -> Verdict:
        if len(proposal.tree) == 0:
            if law.on_host:
                return self._row_by_row(proposal, law, proposal.tokens)
            node = torch.zeros(len(proposal.tokens), dtype=torch.long, device=proposal.tokens.device)
            return Verdict(torch.ones((len(node), 1), dtype=torch.bool, device=node.device), law.probs_at(node))
        return self._chain(proposal, law, coins) if proposal.tree.is_chain else self._walk(proposal, law, coins)

    def _chain(self, proposal: Proposal, law: Law, coins: torch.Tensor) -> Verdict:
        if law.on_host:
            return self._row_by_row(proposal, law, coins)
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

    def _walk(self, proposal: Proposal, law: Law, coins: torch.Tensor) -> Verdict:
        if law.on_host:
            return self._row_by_row(proposal, law, coins)
        tokens, probs, valid = proposal.tokens, proposal.probs, proposal.valid
        rows = torch.arange(len(tokens), device=tokens.device)
        last, going = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
        on_path = torch.nn.functional.pad(torch.zeros_like(valid), (1, 0), value=True)
        p, children = law.probs_at(last), upload(proposal.tree.children, tokens.device)
        for width in proposal.tree.widest:  # the children of the last node; which those are is not asked of a GPU, which would have to be waited for
            parent, advanced = last, torch.zeros_like(going)
            for rank in range(width):
                node = children[parent, rank]
                at = (node - 1).clamp(min=0)
                x, q = tokens[rows, at], None if probs is None else probs[rows, at]
                judged = going & ~advanced & (node > 0) & valid[rows, at]
                if tokens.device.type == "cpu" and not bool(judged.any()):  # spares the work over the vocabulary
                    continue
                accepted = judged & (coins[rows, at] < self.accept(p[rows, x], 1.0 if q is None else q[rows, x]))
                last, advanced = torch.where(accepted, node, last), advanced | accepted
                on_path[rows, torch.where(accepted, node, 0)] = True
                left = self.residual(p, q, x)
                left = torch.where((judged & ~accepted)[:, None], left / left.sum(-1, keepdim=True), p)
                p = torch.where(accepted[:, None], law.probs_at(last), left)
            going = advanced
        return Verdict(on_path, p)

    def _row_by_row(self, proposal: Proposal, law: LazyLaw, coins: torch.Tensor) -> Verdict:
        """The same, chains and trees, on the host and one row after another: laws are asked for along the path alone, and where a token is
        accepted, for its probability."""
        on_path, following = np.zeros((len(proposal.sizes), len(proposal.tree) + 1), dtype=bool), []
        on_path[:, 0] = True
        for b, (tokens, coin, size) in enumerate(zip(proposal.listed(), coins.tolist(), proposal.sizes)):
            last, left = 0, None  # left: what earlier siblings have left of the law at the last node
            for node, parent in enumerate(proposal.tree.parents[:size], start=1):
                if parent != last:
                    continue
                x, q = tokens[node - 1], None if proposal.probs is None else proposal.probs[b, node - 1]
                p_x = law.prob(b, last, x) if left is None else left.prob(x)
                if coin[node - 1] * self.lenience * (1.0 if q is None else float(q[x])) < p_x:  # r < p / (l q)
                    last, left, on_path[b, node] = node, None, True
                elif left is None:
                    exact = q is not None or not proposal.tree.is_chain or law.tied(b, last, x)
                    left = Left(law, b, last, exact).without(x, q, self.residual)
                else:
                    left.weights /= left.weights.sum()
                    left.without(x, q, self.residual)
            following.append(left or Left(law, b, last))
        return HostVerdict(torch.from_numpy(on_path), following)


class HostVerdict(Verdict):
    """The law that follows is known by the few tokens that it leaves, and made when it is asked for."""

    def __init__(self, on_path: torch.Tensor, following: list[Left]):
        self.on_path, self.following = on_path, following

    @cached_property
    def next_probs(self) -> torch.Tensor:
        return torch.stack([left.dense() for left in self.following])

    def token(self, uniform: torch.Tensor | None) -> torch.Tensor:
        return torch.tensor([left.draw(u) for left, u in zip(self.following, uniform.tolist())], dtype=torch.long, device="cpu")
