"""A small bidirectional drafter that fills a block of masked places in one pass, from the target's hidden states.

After DFlash (Chen, Liang and Liu 2026, arXiv 2602.06036): one denoising step, the target's states as keys and values of every layer.
Here the states are those of the last `window` places, and the places of window and block are told apart by a bias on the attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .medusa import MedusaDraft, linear_of
from ..uploads import upload


class BlockLayer(nn.Module):
    """Attention from the places of a block to a window of states and to one another, then a gated feed-forward layer. New ones pass
    on what they get: the two layers that write start at zero.

    bias: [heads, K + 1, window + K + 1], added to the attention's scores: what tells the places apart.
    """

    def __init__(self, width: int, heads: int, places: int, window: int, like: torch.Tensor, generator: torch.Generator):
        super().__init__()
        self.heads = heads
        sizes = {"query": (width, width), "key": (width, width), "value": (width, width), "gate": (2 * width, width), "up": (2 * width, width)}
        for name, (rows, columns) in sizes.items():
            setattr(self, name, linear_of(random(rows, columns, like, generator)))
        self.out, self.down = linear_of(like.new_zeros(width, width)), linear_of(like.new_zeros(width, 2 * width))
        self.bias = nn.Parameter(like.new_zeros(heads, places, window + places))

    def forward(self, x: torch.Tensor, context: torch.Tensor, where: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """x [N, P, H], the block; context [M, H], of which block n looks at places where[n, j] if seen[n, j], both [N, W]."""
        own = _normed(x)
        keys, values = (torch.cat([linear(context)[where], linear(own)], dim=1) for linear in (self.key, self.value))
        hidden = torch.zeros_like(where, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
        mask = self.bias.to(x.dtype) + nn.functional.pad(hidden, (0, x.shape[1]))[:, None, None]
        query, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query(own), keys, values))
        mixed = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask.to(query.dtype))
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        own = _normed(x)
        return x + self.down(nn.functional.silu(self.gate(own)) * self.up(own))


class BlockDrafter(nn.Module):
    """K masked places, each with an embedding of its own that is added to the target's last state, behind the root token. A new one says
    at every place what the target says next.

    tokens: K. reads: the target's layers whose states it sees, the last of them what its head reads. like: a tensor [.., H] of the dtype and
    on the device that it is to have. embedding, output: the target's own, not part of this module's state; an output with `linear` and
    `ids` (a pruned head) is asked for logits of `ids` only. rates: as in `MedusaHeads`.
    """

    def __init__(self, tokens: int, layers: int, reads: Sequence[int], like: torch.Tensor, heads: int, embedding: nn.Module, output: nn.Module,
                 window: int = 16, rates: Sequence[Sequence[float]] = (), seed: int = 0):
        super().__init__()
        width, generator = like.shape[-1], torch.Generator().manual_seed(seed)
        heads = next(n for n in range(heads, 0, -1) if width % n == 0)
        self.fuse = linear_of(random(width, width * len(reads), like, generator))
        self.masks = nn.Parameter(like.new_zeros(tokens, width))
        self.layers = nn.ModuleList(BlockLayer(width, heads, tokens + 1, window, like, generator) for _ in range(layers))
        self.reads, self.window, self.rates = tuple(reads), window, rates
        self.shared, self.embedding = (output,), (embedding,)  # in tuples: another's modules

    @property
    def depth(self) -> int:
        """K, the tokens that one pass proposes."""
        return len(self.masks)

    @property
    def about(self) -> dict:
        """What it takes to make another one, as JSON has it."""
        return {"kind": "parallel", "heads": self.depth, "blocks": len(self.layers), "reads": list(self.reads), "window": self.window}

    @property
    def ids(self) -> torch.Tensor | None:
        """int64 [V'], the tokens that the logits stand for, None for all."""
        return getattr(self.shared[0], "ids", None)

    def forward(self, states: torch.Tensor, roots: torch.Tensor, where: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """What the head reads [N, K, H], for N blocks. states [M, len(reads) * H]: the target's, in any order; where int64 [N, W]: those before
        block n, the last one that of the token before the root; seen bool [N, W]: which are there; roots int64 [N]: the tokens that the
        target has chosen there."""
        parts = states.unflatten(-1, (len(self.reads), -1))
        context = self.fuse(_normed(parts).flatten(-2))
        last, root = parts[:, -1][where[:, -1]], self.embedding[0](roots)
        x = torch.cat([_normed(root)[:, None].to(last.dtype), last[:, None] + self.masks], dim=1)
        for layer in self.layers:
            x = layer(x, context, where, seen)
        return x[:, 1:]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., V'] from [.., H]."""
        return getattr(self.shared[0], "linear", self.shared[0])(hidden)

    def predict(self, states: torch.Tensor, roots: torch.Tensor, known: list[int]) -> torch.Tensor:
        """Logits [B, K, V'] after the tokens `roots` [B], from the last states [B, window, F] before them, known[b] of which are there."""
        places = torch.arange(self.window, device=states.device)
        where = torch.arange(len(roots), device=states.device)[:, None] * self.window + places
        seen = places >= self.window - upload(known, states.device)[:, None]
        return self.logits(self(states.flatten(0, 1), roots, where, seen))


def random(rows: int, columns: int, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Weights that keep the size of what goes through them."""
    return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(like)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:])


class ParallelDraft(MedusaDraft):
    """Drafts with a `BlockDrafter`: K tokens in one small pass over the target's last states and the root token.

    heads:  made by `training` (`training.load_drafter` makes the whole draft). target: as in `MedusaDraft`.
    tree:   as in `OnePassDraft`. Without one, a chain; where the target samples, its tokens are drawn each from the law of its place.

    It has nothing to propose before the target has read the prompt. Raises ValueError as `MedusaDraft` does.
    """

    name = "parallel"
    drawn = True

    def check(self, heads: nn.Module) -> None:
        if type(heads) is not BlockDrafter:
            raise ValueError(f"heads: {type(heads).__name__} is not BlockDrafter; load one with training.load_drafter.")
