"""What the target samples from at every drafted position, and how a token is drawn from it.

Glossary: p is the target's law, q the draft's, x a drafted token, V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from .devices import has_float64

LONG, BLOCK = 4096, 256  # a vocabulary that is drawn from block by block, and its blocks
INFINITE = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # the bits of infinity


class Law:
    """The target's laws at n nodes of B rows.

    scores: float [B, n, V], processed logits; p = softmax(scores) when sampling, the one-hot of the argmax when greedy
            (Leviathan et al. 2023, section 2.2: greedy decoding is sampling from a one-hot law).
    gumbel: noise(b, i), what is added to the scores [V] of a node in coupled sampling; None: nothing.
    on_host: whether a node's law can be asked for alone, at little cost (`lazy_law.LazyLaw`).
    """

    on_host = False

    def __init__(self, scores: torch.Tensor, gumbel: Callable[[int, int], torch.Tensor | float] | None = None):
        self.scores, self.gumbel = scores, gumbel

    @cached_property
    def ranking(self) -> torch.Tensor:
        """float [B, n, V]: what the argmax is taken of."""
        if self.gumbel is None:
            return self.scores
        rows, nodes, _ = self.scores.shape
        return torch.stack([torch.stack([self._ranking(b, i) for i in range(nodes)]) for b in range(rows)])

    def _ranking(self, b: int, i: int) -> torch.Tensor:
        return self.scores[b, i] if self.gumbel is None else self.scores[b, i] + self.gumbel(b, i)

    @cached_property
    def argmax(self) -> torch.Tensor:
        """int64 [B, n]: the most likely token at every node; in coupled sampling, the token drawn."""
        return likeliest(self.ranking)

    @cached_property
    def _words(self) -> np.ndarray | None:
        """int16 [B, n, V]: the scores of 16 bits as integers, on a CPU; None elsewhere, and of others."""
        plain = self.gumbel is None and self.scores.device.type == "cpu" and self.scores.dtype in INFINITE
        return self.scores.detach().view(torch.int16).numpy() if plain else None

    def best(self, b: int, i: int) -> int:
        """The argmax at node i of row b alone."""
        found = None if self._words is None else _by_words(self._words[b, i], INFINITE[self.scores.dtype])
        return int(likeliest(self._ranking(b, i))) if found is None else int(found)

    @cached_property
    def log_norm(self) -> torch.Tensor:
        """float [B, n]: log of the sum of exp(scores)."""
        return self.scores.logsumexp(-1)

    def prob_of_next(self, tokens: torch.Tensor) -> torch.Tensor:
        """float [B, m]: p(tokens[b, j]) at node j, for the first m nodes (a chain: token j follows node j)."""
        m = tokens.shape[1]
        return (self.scores[:, :m].gather(-1, tokens[..., None]).squeeze(-1) - self.log_norm[:, :m]).exp()

    def prob_of(self, tokens: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        """float32 [B, m]: p(tokens[b, j]) at node nodes[b, j], both int64 [B, m]; the softmax in greedy decoding, too."""
        rows = torch.arange(len(nodes), device=nodes.device)[:, None]
        return (self.scores[rows, nodes, tokens].float() - self.scores.float().logsumexp(-1)[rows, nodes]).exp()

    def probs_at(self, node: torch.Tensor) -> torch.Tensor:
        """float [B, V]: the law at node[b] of row b (node int64 [B])."""
        rows = torch.arange(len(node), device=node.device)
        return self.scores[rows, node].softmax(-1)


def wide(logits: torch.Tensor) -> torch.Tensor:
    """In float32 where they have 16 bits, as in transformers' own loops."""
    return logits.float() if logits.dtype in INFINITE else logits


def likeliest(scores: torch.Tensor) -> torch.Tensor:
    """int64 [...]: the first index of the largest of scores [..., V], as torch.argmax has it (the first nan, where there is one). On a CPU
    by NumPy: five times as fast as torch in 16 bit, mostly twenty times, ten times in 32."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    scores = scores.detach() if scores.requires_grad else scores
    if scores.dtype in INFINITE:
        found = _by_words(scores.view(torch.int16).numpy(), INFINITE[scores.dtype])
        if found is not None:
            return torch.from_numpy(found)
    return torch.from_numpy(np.asarray(wide(scores).numpy().argmax(-1)))


def _by_words(words: np.ndarray, infinite: int) -> np.ndarray | None:
    """`likeliest` of 16-bit numbers as integers [..., V], which are in the same order where they are positive; None where a largest one is not, or
    there is a nan."""
    if not words.size or int(words.view(np.uint16).max()) > 0x8000 + infinite:
        return None
    rows = words.reshape(-1, words.shape[-1])
    found = rows.argmax(-1)
    good = all(0 < row[best] <= infinite for row, best in zip(rows, found.tolist()))
    return found.reshape(words.shape[:-1]) if good else None


def draw(law: torch.Tensor, uniform: torch.Tensor, none: int = 0) -> torch.Tensor:
    """Tokens int64 [B] from weights float [B, V] (need not sum to 1) by inverse CDF in float64; point masses int64 [B] stay.

    uniform: float64 [B] in [0, 1). A token of zero weight is never drawn. none: the token of a row whose weights are all 0, or not numbers.
    """
    if not law.is_floating_point():
        return law
    if not has_float64(law.device):
        return draw(law.cpu(), uniform.cpu().double(), none).to(law.device)
    if law.device.type == "cpu" and law.shape[-1] >= LONG and law.dtype not in INFINITE and not torch.compiler.is_compiling():
        return torch.tensor([drawn(weights, u, none) for weights, u in zip(law.detach().numpy(), uniform.tolist())], dtype=torch.long, device="cpu")
    cdf = law.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cdf, target, right=True).clamp(max=law.shape[-1] - 1)
    return torch.where(total > 0, token, none).squeeze(-1)


def drawn(weights: np.ndarray, u: float, none: int) -> int:
    """`draw` of one row of weights [V]: first a block of tokens by its sum, then a token of the block."""
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64))
    if not sums[-1] > 0:
        return none
    target = min(u * sums[-1], np.nextafter(sums[-1], 0.0))
    block = int(np.searchsorted(sums, target, side="right"))
    own = np.cumsum(weights[block * BLOCK : (block + 1) * BLOCK], dtype=np.float64)
    rest = target - (sums[block - 1] if block else 0.0)
    return block * BLOCK + int(np.searchsorted(own, min(rest, np.nextafter(own[-1], 0.0)), side="right"))
