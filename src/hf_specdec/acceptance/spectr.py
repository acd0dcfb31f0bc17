"""K-sequential selection: several independent draws for one place, judged with one common discount."""

from __future__ import annotations

import torch

from ..law import Law
from ..proposal import Proposal, Verdict
from ..uploads import upload
from .sampling import SpeculativeSampling

HALVINGS = 24


class KSequentialSelection(SpeculativeSampling):
    """SpecTr (Sun et al. 2023, arXiv 2310.15141), Algorithm 2, exact: of k siblings drawn independently from one q, the first is taken
    that passes with probability min(1, p(x) / (rho q(x))); after none, the token comes from the residual
    p - min(q, p / rho) (1 - (1 - beta)^k) / beta, beta = sum_x min(q, p / rho). rho is the smallest for which that is nowhere
    negative, 1 - (1 - beta)^k <= rho beta. A place with one drafted token has rho = 1: speculative sampling. Siblings of a row that do not
    share one law (drawn without replacement, or not drawn at all) are judged one after another, as speculative sampling does.
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
            children = upload([node for node, own in enumerate(tree.parents, start=1) if own == parent], tokens.device)
            meant = valid[:, children - 1] & (last == parent)[:, None]
            if not bool(meant.any()):
                continue
            p = law.probs_at(torch.full_like(last, parent))
            taken, left = self._drawn_alike(proposal, children, meant, p, coins)
            others = meant.any(-1) & ~alike(proposal, children, meant)
            if bool(others.any()):
                taken_too, left_too = self._one_by_one(proposal, children, meant & others[:, None], p, coins)
                taken, left = torch.where(others, taken_too, taken), torch.where(others[:, None], left_too, left)
            last = torch.where(taken > 0, taken, last)
            on_path[rows, last] = True
            following = torch.where((taken > 0)[:, None], law.probs_at(last), torch.where(meant.any(-1)[:, None], left, following))
        return Verdict(on_path, following)

    def _drawn_alike(self, proposal: Proposal, children: torch.Tensor, meant: torch.Tensor, p: torch.Tensor,
                     coins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The child taken, int64 [B], or 0, and what follows then, [B, V], by Algorithm 2 with the first child's law."""
        q = None if proposal.probs is None else proposal.probs[:, children[0] - 1]
        x, k = proposal.tokens[:, children - 1], meant.sum(-1)
        rho = smallest_discount(p, q, k)
        chance = p.gather(1, x) / (rho[:, None] * q.gather(1, x)) if q is not None else p.gather(1, x)
        passed = meant & (coins[:, children - 1] < chance)
        taken = torch.where(passed.any(-1), children[passed.int().argmax(-1)], 0)
        return taken, self.residual(p, None, x[:, 0]) if q is None else leftover(p, q, k, rho)

    def _one_by_one(self, proposal: Proposal, children: torch.Tensor, meant: torch.Tensor, p: torch.Tensor,
                    coins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by `SpeculativeSampling`, each sibling against what the ones before have left."""
        rows, taken = torch.arange(len(p), device=p.device), torch.zeros(len(p), dtype=torch.long, device=p.device)
        for rank, node in enumerate(children.tolist()):
            x, judged = proposal.tokens[:, node - 1], meant[:, rank] & (taken == 0)
            q = None if proposal.probs is None else proposal.probs[:, node - 1]
            accepted = judged & (coins[:, node - 1] < self.accept(p[rows, x], 1.0 if q is None else q[rows, x]))
            taken = torch.where(accepted, node, taken)
            left = self.residual(p, q, x)
            p = torch.where((judged & ~accepted)[:, None], left / left.sum(-1, keepdim=True), p)
        return taken, p


def alike(proposal: Proposal, children: torch.Tensor, meant: torch.Tensor) -> torch.Tensor:
    """Bool [B]: whether the row's meant children were drawn independently from one law, the first child's; of point masses one is."""
    one = meant.sum(-1) <= 1
    if proposal.probs is None:
        return one & (meant[:, 0] | ~meant.any(-1))
    laws = proposal.probs[:, children - 1]
    return ((laws == laws[:, :1]).all(-1) | ~meant).all(-1)


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
