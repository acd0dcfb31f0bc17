"""Vocabularies of another size than the target's: padded otherwise, pruned, or in part another one. Only ids that both have are drafted."""

from __future__ import annotations

import torch


def fitted(logits: torch.Tensor, vocab_size: int, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [.., vocab_size] from those of the tokens `ids`, int64 [n], each below vocab_size, or of the tokens 0 .. n - 1: [.., n]. Minus
    infinity for the others, so that they are never drafted; what lies beyond is cut off."""
    if ids is None and logits.shape[-1] >= vocab_size:
        return logits[..., :vocab_size]
    if ids is None:
        return torch.nn.functional.pad(logits.float(), (0, vocab_size - logits.shape[-1]), value=-torch.inf)
    every = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return every.index_copy_(-1, ids.to(logits.device), logits)


def readable(rows: list[list[int]], own: int, vocab_size: int) -> list[list[int]]:
    """The rows, of tokens below vocab_size, for a model that has `own` tokens: ids beyond are replaced, which makes a worse guess, not a wrong
    output."""
    return rows if own >= vocab_size else [[min(token, own - 1) for token in row] for row in rows]
