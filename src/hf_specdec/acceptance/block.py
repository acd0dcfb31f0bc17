"""Block verification: the drafted tokens of a chain are accepted jointly, at least as many as one by one."""

from __future__ import annotations

import torch

from ..law import Law
from ..proposal import Proposal, Verdict
from ..uploads import upload
from .primitive import residual
from .sampling import SpeculativeSampling


class BlockVerification(SpeculativeSampling):
    """Sun et al. 2024 (arXiv 2403.10444), Algorithm 2, exact: the longest prefix is committed that passes its own coin.

    With w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)), prefix i passes with probability h_i = s_i / (s_i + 1 - w_i), where
    s_i = sum_x max(0, w_i p(x | x_1..i) - q(x | x_1..i)), the whole block with h = w. After prefix i, the next token comes from
    norm(max(0, w_i p - q)), after the block from p. The expected number of accepted tokens is that of token-wise verification
    or more (their Theorem 2), no rule that is exact exceeds it.

    A tree has no block: its siblings are judged one after another as in `SpeculativeSampling`, which is exact too.
    """

    lenient = False

    def _chain(self, proposal: Proposal, law: Law, coins: torch.Tensor) -> Verdict:
        tokens, n = proposal.tokens, len(proposal.tree)
        sizes = upload(proposal.sizes, tokens.device)
        weight = self._weights(proposal, law)  # of the prefixes 0..N
        s = self._excess(proposal, law, weight[:, 1:n])
        rest = s + 1 - weight[:, 1:n]
        passes = torch.where(rest > 0, s / rest, 1.0)
        steps = torch.arange(1, n + 1, device=tokens.device)
        chance = torch.where(steps == sizes[:, None], weight[:, 1:], torch.nn.functional.pad(passes, (0, 1)))
        passed = (coins < chance) & proposal.valid
        last = (passed * steps).amax(-1)
        on_path = torch.arange(n + 1, device=tokens.device) <= last[:, None]
        return Verdict(on_path, self._next(proposal, law, weight, last, last < sizes))

    def _weights(self, proposal: Proposal, law: Law) -> torch.Tensor:
        """w float64 [B, N+1]."""
        tokens, q = proposal.tokens, proposal.probs
        p_x = law.prob_of_next(tokens).double()
        ratio = p_x if q is None else p_x / q.gather(-1, tokens[..., None]).squeeze(-1).double()
        weight = [torch.ones_like(p_x[:, 0])]
        for step in range(tokens.shape[1]):
            weight.append((weight[-1] * ratio[:, step]).nan_to_num(0.0).clamp(max=1))
        return torch.stack(weight, dim=1)

    def _excess(self, proposal: Proposal, law: Law, weight: torch.Tensor) -> torch.Tensor:
        """s float64 [B, N-1] of the prefixes 1..N-1."""
        if proposal.probs is None:
            return weight * (1 - law.prob_of_next(proposal.tokens)[:, 1:].double()).clamp(min=0)
        p = law.scores[:, 1 : len(proposal.tree)].softmax(-1)
        return (weight[..., None] * p - proposal.probs[:, 1:]).clamp(min=0).sum(-1)

    def _next(self, proposal: Proposal, law: Law, weight: torch.Tensor, last: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        rows, following = torch.arange(len(last), device=last.device), last.clamp(max=len(proposal.tree) - 1)
        p = law.probs_at(last)
        q = None if proposal.probs is None else proposal.probs[rows, following]
        left = residual(weight[rows, last][:, None] * p, q, proposal.tokens[rows, following])
        return torch.where(rejected[:, None], left, p.to(left.dtype))
