"""K-sequential selection: several independent draws for one place, judged with one common discount."""

from __future__ import annotations

import torch

from ..distributions import Law
from ..proposal import Proposal, Verdict
from .sampling import SpeculativeSampling

HALVINGS = 24


class KSequentialSelection(SpeculativeSampling):
    """SpecTr (Sun et al. 2023, arXiv 2310.15141), Algorithm 2, exact: of k siblings drawn independently from one q, the first is taken
    that passes with probability min(1, p(x) / (rho q(x))); after none, the token comes from the residual
    p - min(q, p / rho) (1 - (1 - beta)^k) / beta, beta = sum_x min(q, p / rho). rho is the smallest for which that is nowhere
    negative, 1 - (1 - beta)^k <= rho beta. A place with one drafted token has rho = 1: speculative sampling.

    Raises ValueError at siblings that do not share one law (drawn without replacement, or not drawn at all), which it cannot judge.
    """

    lenient = False

    def _walk(self, proposal: Proposal, law: Law, coins: torch.Tensor) -> Verdict:
        tree, tokens = proposal.tree, proposal.tokens
        valid = proposal.valid if proposal.fillers is None else proposal.valid & ~proposal.fillers  # these are of no draft's law
        rows = torch.arange(len(tokens), device=tokens.device)
        last = torch.zeros_like(rows)
        on_path = torch.zeros((len(rows), len(tree) + 1), dtype=torch.bool, device=tokens.device)
        on_path[:, 0] = True
        following = law.probs_at(last)
        for parent in sorted(set(tree.parents)):
            children = torch.tensor([node for node, own in enumerate(tree.parents, start=1) if own == parent], device=tokens.device)
            meant = valid[:, children - 1] & (last == parent)[:, None]
            if not bool(meant.any()):
                continue
            p, q = law.probs_at(torch.full_like(last, parent)), self._shared_law(proposal, children, meant)
            x, k = tokens[:, children - 1], meant.sum(-1)
            rho = smallest_discount(p, q, k)
            chance = p.gather(1, x) / (rho[:, None] * q.gather(1, x)) if q is not None else p.gather(1, x)
            passed = meant & (coins[:, children - 1] < chance)
            taken = children[passed.int().argmax(-1)]
            last = torch.where(passed.any(-1), taken, last)
            on_path[rows, last] = True
            left = self.residual(p, None, x[:, 0]) if q is None else leftover(p, q, k, rho)
            following = torch.where(passed.any(-1)[:, None], law.probs_at(last), torch.where(meant.any(-1)[:, None], left, following))
        return Verdict(on_path, following)

    def _shared_law(self, proposal: Proposal, children: torch.Tensor, meant: torch.Tensor) -> torch.Tensor | None:
        """q [B, V] of the siblings; None for a point mass that has none."""
        q = None if proposal.probs is None else proposal.probs[:, children[0] - 1]
        for rank, node in enumerate(children.tolist()):
            if rank and bool(meant[:, rank].any()):
                if q is None or not torch.equal(q[meant[:, rank]], proposal.probs[meant[:, rank], node - 1]):
                    raise ValueError('acceptance="spectr" judges siblings that were drawn independently from one law; the draft '
                                     f'{proposal.source!r} draws them without replacement, or does not draw them at all. Let it draw with '
                                     'replacement, or use acceptance="speculative_sampling".')
        return q


def smallest_discount(p: torch.Tensor, q: torch.Tensor | None, k: torch.Tensor) -> torch.Tensor:
    """rho [B] in [1, k] for k int64 [B] draws, by bisection from above: what it returns is always on the side that is exact.
    SpecTr, Lemma 3; p, q: float [B, V]."""
    low, high = torch.ones_like(p[:, 0]), k.to(p.dtype).clamp(min=1)
    if q is None or int(k.max()) <= 1:
        return low
    for _ in range(HALVINGS):
        rho = (low + high) / 2
        beta = torch.minimum(q, p / rho[:, None]).sum(-1)
        enough = 1 - (1 - beta) ** k <= rho * beta
        low, high = torch.where(enough, low, rho), torch.where(enough, rho, high)
    return high


def leftover(p: torch.Tensor, q: torch.Tensor, k: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """Weights [B, V] of the law after k rejections; p itself where nothing is left."""
    taken = torch.minimum(q, p / rho[:, None])
    beta = taken.sum(-1).clamp(max=1)
    share = torch.where(beta > 0, (1 - (1 - beta) ** k) / beta, k.to(p.dtype))
    left = (p - taken * share[:, None]).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)
