"""Greedy matching: a drafted token is committed where it is the target's argmax."""

from __future__ import annotations

import numpy as np
import torch

from ..distributions import LenientGreedyLogitsProcessor
from ..law import Law
from ..proposal import Proposal, Verdict
from ..uploads import upload
from .base import Acceptance, first_path


class GreedyMatching(Acceptance):
    """Leviathan et al. 2023, section 2.2 (p is one-hot, so a token is accepted with probability 0 or 1); with lenience
    l < 1 also accepted where p(x) >= l * max p (A.5). Of a tree, the branch that follows the argmax."""

    samples = False
    lenient = True

    def verdict(self, proposal: Proposal, law: Law, coins: torch.Tensor | None = None) -> Verdict:
        tree, tokens = proposal.tree, proposal.tokens
        if tokens.device.type == "cpu" and self.lenience == 1:
            return self._row_by_row(proposal, law)
        if len(tree) == 0:
            return Verdict(torch.ones_like(law.argmax, dtype=torch.bool), law.argmax[:, 0])
        before = slice(-1) if tree.is_chain else upload(tree.parents, tokens.device)
        accepted = self._accepts(law, before, tokens)
        on_path, last = first_path(tree, proposal.only_valid(accepted))
        return Verdict(on_path, law.argmax.gather(1, last[:, None]).squeeze(1))

    def _row_by_row(self, proposal: Proposal, law: Law) -> Verdict:
        """The same on the host: only the argmax of nodes on the path is looked for."""
        on_path, token = np.zeros((len(proposal.sizes), len(proposal.tree) + 1), dtype=bool), []
        on_path[:, 0] = True
        for b, (tokens, size) in enumerate(zip(proposal.listed(), proposal.sizes)):
            last, best = 0, self._best(law, b, 0)
            for node, parent in enumerate(proposal.tree.parents[:size], start=1):
                if parent == last and tokens[node - 1] == best:
                    last, best, on_path[b, node] = node, self._best(law, b, node), True
            token.append(best)
        return Verdict(torch.from_numpy(on_path), torch.tensor(token, device="cpu"))

    def _best(self, law: Law, b: int, node: int) -> int:
        """The token of the target's at this node, below 0 where it has none."""
        return law.best(b, node)

    def _accepts(self, law: Law, before: slice | torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Bool [B, N]; before: the nodes that the tokens follow."""
        if self.lenience < 1:
            return tokens == LenientGreedyLogitsProcessor(tokens, self.lenience)(None, law.scores[:, before]).argmax(-1)
        return tokens == law.argmax[:, before]
