"""Coupled sampling: the draft and the target draw with the same random numbers, one set for every place of the text."""

from __future__ import annotations

import torch

from ..law import Law
from ..proposal import Proposal, Verdict
from .greedy import GreedyMatching


class CoupledSampling(GreedyMatching):
    """The token at position t of a row is argmax_x (log p(x) + g_t(x)) with Gumbel noise g_t that is a function of the row's seed and
    of t alone (`hf_specdec.noise.Gumbel`), which is a draw from p: lossless. The draft takes the argmax of its own log q + g_t, and a
    drafted token is committed where the two agree, so that the noise has to be the same and q need not be known.

    Drafter-invariant: the same seed gives the same text, token for token, with any draft, any K, any tree and any batch, and
    without a draft, as long as the target's logits are the same (in float32; in 16 bit near-ties can fork, as in greedy decoding). The
    price: P(accepted) is sum_x 1 / sum_y max(p(y) / p(x), q(y) / q(x)), at least (1 - d) / (1 + d) with d the total variation, where
    speculative sampling has 1 - d. Daliri, Musco, Suresh 2024 (arXiv 2408.07978), section 3.
    """

    coupled = True
    lenient = False

    def verdict(self, proposal: Proposal, law: Law, coins: torch.Tensor | None = None) -> Verdict:
        """Where there is no law (nan, or no token is left) nothing is accepted, and the token is -1, as in sampling."""
        found = super().verdict(proposal, law, coins)
        if proposal.tokens.device.type == "cpu":
            return found
        last = (found.on_path * torch.arange(found.on_path.shape[1], device=found.on_path.device)).amax(-1, keepdim=True)
        drawn = self._possible(law, last, found.next_probs[:, None])[:, 0]
        return Verdict(found.on_path, torch.where(drawn, found.next_probs, -1))

    def _best(self, law: Law, b: int, node: int) -> int:
        token = law.best(b, node)
        return token if law.scores[b, node, token] > -torch.inf else -1

    def _accepts(self, law: Law, before: slice | torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        nodes = torch.arange(law.ranking.shape[1], device=tokens.device)[before].expand(tokens.shape)
        return super()._accepts(law, before, tokens) & self._possible(law, nodes, tokens)

    @staticmethod
    def _possible(law: Law, nodes: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Whether tokens[b, j] has a chance at node nodes[b, j]: bool [B, m]."""
        rows = torch.arange(len(nodes), device=nodes.device)[:, None]
        return law.ranking[rows, nodes, tokens] > -torch.inf
