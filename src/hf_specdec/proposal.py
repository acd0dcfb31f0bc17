"""What a draft proposes and what the acceptance rule says of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .law import draw
from .tree import MAX_NODES, Tree
from .uploads import upload


@dataclass
class Proposal:
    """Candidate tokens for every row of the batch.

    tokens: int64 [B, N], entry i-1 is the token of node i of `tree`.
    probs:  float [B, N, V] or None. `probs[:, i-1]` is the law node i was really drawn from, given its parent and its earlier siblings; None: each is a point mass.
    sizes:  per row, how many of the N nodes (the first ones) are meant; the rest is padding.
    source: a word for the trace, one for all rows or one per row.
    chances: float [B, N] or None. How likely the draft thinks node i to be right where its parent is; a mixture goes by it, a verdict never does.
    fillers: bool [B, N] or None. Nodes that a row has only because others do: point masses of any token.
    on_host: the tokens as lists, where they are known there (`listed`).
    """

    tree: Tree
    tokens: torch.Tensor
    probs: torch.Tensor | None
    sizes: list[int]
    source: str | list[str] = ""
    chances: torch.Tensor | None = None
    fillers: torch.Tensor | None = None
    on_host: list[list[int]] | None = field(default=None, repr=False, compare=False)

    def listed(self) -> list[list[int]]:
        """The tokens on the host, N a row; from a GPU they are fetched once."""
        if self.on_host is None:
            self.on_host = self.tokens.tolist()
        return self.on_host

    @classmethod
    def chain(cls, tokens: torch.Tensor, probs: torch.Tensor | None = None, sizes: list[int] | None = None, source: str | list[str] = "") -> "Proposal":
        batch, n = tokens.shape
        return cls(Tree.chain(n), tokens, probs, [n] * batch if sizes is None else sizes, source)

    @classmethod
    def from_lists(cls, rows: list[list[int]], device, source: str | list[str] = "", vocab_size: int | None = None) -> "Proposal":
        """Point-mass chains, one list of token ids per row, which an id of `vocab_size` or above ends: the target may read and not write it."""
        if vocab_size is not None:
            rows = [row[: next((i for i, token in enumerate(row) if token >= vocab_size), len(row))] for row in rows]
        width, sizes = max(map(len, rows), default=0), list(map(len, rows))
        padded = [row + [0] * (width - len(row)) for row in rows]
        made = cls.chain(upload(padded, device, torch.long).reshape(len(rows), width), None, sizes, source)
        made.on_host = padded
        return made

    def only_valid(self, accepted: torch.Tensor) -> torch.Tensor:
        """accepted bool [B, N] without the padding."""
        return accepted if min(self.sizes) == len(self.tree) else accepted & self.valid

    @property
    def valid(self) -> torch.Tensor:
        """Bool [B, N]: which nodes are meant."""
        sizes = upload(self.sizes, self.tokens.device)
        return torch.arange(len(self.tree), device=self.tokens.device) < sizes[:, None]

    def within(self, depths: list[int]) -> "Proposal":
        """Every row without what comes after its first node deeper than depths[b], which there is no room to commit."""
        if max(self.tree.depths) <= min(depths):
            return self
        sizes = [next((i for i, depth in enumerate(self.tree.depths[1 : size + 1]) if depth > most), size) for size, most in zip(self.sizes, depths)]
        n = max(sizes)
        probs = None if self.probs is None else self.probs[:, :n]
        fillers = None if self.fillers is None else self.fillers[:, :n]
        known = None if self.on_host is None else [row[:n] for row in self.on_host]
        return Proposal(self.tree.truncate(n), self.tokens[:, :n], probs, sizes, self.source, fillers=fillers, on_host=known)

    def check(self, batch: int, vocab_size: int, draft: str) -> None:
        """Raise ValueError, naming the draft, unless shapes, ids and laws are what they have to be."""
        if not isinstance(self, Proposal) or not torch.is_tensor(self.tokens):
            raise ValueError(f"draft {draft!r} returned {type(self).__name__}, not a Proposal of tensors; a draft must return tokens "
                             f"[{batch}, N] and probs None or [{batch}, N, {vocab_size}] that sum to 1.")
        n = len(self.tree)
        if n > MAX_NODES:
            raise ValueError(f"draft {draft!r} returned {n} nodes; one pass takes at most {MAX_NODES}. Propose what `k` asks for.")

        def wrong(what: str):
            return ValueError(f"draft {draft!r} returned {what}; a draft must return tokens [{batch}, {n}] with ids in "
                              f"0..{vocab_size - 1} and probs None or [{batch}, {n}, {vocab_size}] that sum to 1.")

        if not (self.probs is None or torch.is_tensor(self.probs)) or not all(isinstance(size, int) for size in self.sizes):
            raise wrong(f"probs of type {type(self.probs).__name__} with sizes {self.sizes}")
        if tuple(self.tokens.shape) != (batch, n) or len(self.sizes) != batch:
            raise wrong(f"tokens of shape {tuple(self.tokens.shape)} with {len(self.sizes)} sizes")
        if self.tokens.dtype != torch.long:
            raise wrong(f"tokens of dtype {self.tokens.dtype}")
        if not all(0 <= size <= n for size in self.sizes):
            raise wrong(f"sizes {self.sizes}")
        if n and (int(self.tokens.min()) < 0 or int(self.tokens.max()) >= vocab_size):
            raise wrong(f"token ids from {int(self.tokens.min())} to {int(self.tokens.max())}")
        if n == 0 or self.probs is None:
            return
        if tuple(self.probs.shape) != (batch, n, vocab_size):
            raise wrong(f"probs of shape {tuple(self.probs.shape)}")
        real = self.probs[self.valid]
        if real.numel() and not bool(torch.isfinite(real).all() & (real >= 0).all()):
            raise wrong("probs that are negative, infinite or nan")
        if real.numel() and float((real.sum(-1) - 1).abs().max()) > 1e-3:
            raise wrong(f"probs whose rows sum to between {float(real.sum(-1).min()):.4f} and {float(real.sum(-1).max()):.4f}")
        drawn = self.valid if self.fillers is None else self.valid & ~self.fillers
        if bool((drawn & (self.probs.gather(-1, self.tokens[..., None])[..., 0] <= 0)).any()):
            raise wrong("a token of probability 0 by its own probs, which cannot have been drawn from them")


@dataclass
class Verdict:
    """The outcome of one verification.

    on_path:    bool [B, N+1], the accepted path; the root (node 0) is always on it.
    next_probs: float [B, V], the law of the token that follows (residual after a rejection, else the target's own), or int64 [B], itself, a point mass.
    on_host:    the path as lists of numbers, where it is known there (`paths`).
    """

    on_path: torch.Tensor
    next_probs: torch.Tensor
    on_host: list[list[int]] | None = field(default=None, repr=False, compare=False)

    def paths(self) -> list[list[int]]:
        """The path on the host, N+1 numbers a row, 1 or True for a node that is on it; from a GPU it is fetched once."""
        if self.on_host is None:
            self.on_host = self.on_path.tolist()
        return self.on_host

    def token(self, uniform: torch.Tensor | None) -> torch.Tensor:
        """The token that follows, int64 [B], drawn by float64 [B] in [0, 1); None: it is a point mass. -1: there is no law at all."""
        return self.next_probs if uniform is None else draw(self.next_probs, uniform, none=-1)


def fetched(proposal: Proposal, verdict: Verdict, token: torch.Tensor) -> list[list[int]]:
    """Per row its path, N+1 numbers, its candidates, N, and the token that follows. The one place of a round where numbers travel to the host."""
    width = verdict.on_path.shape[1]
    if token.device.type == "cpu":
        packed = [[*path, *drafted, own] for path, drafted, own in zip(verdict.paths(), proposal.listed(), token.tolist())]
    else:
        packed = torch.cat([verdict.on_path.long(), proposal.tokens, token[:, None]], dim=1).tolist()
    verdict.on_host, proposal.on_host = [row[:width] for row in packed], [row[width:-1] for row in packed]
    return packed
