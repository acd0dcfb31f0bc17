"""The output head over the places of each row that are asked for, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

import torch
from transformers import PreTrainedModel

READ = 2**26  # most numbers of logits that are computed of a prompt for a draft that reads them


@contextmanager
def head_at(model: PreTrainedModel, places: torch.Tensor | None) -> Iterator[None]:
    """Within it, a forward of `model` in this thread computes the logits of row b at places[b] alone, int64 [B, m], counted among those
    that it keeps: [B, m, V]. (transformers' `logits_to_keep` names the same places for all rows: in a ragged batch that is nearly every
    row's last place for every row.) None changes nothing, and neither does it for a model that has no head, or does not call it."""
    head = None if places is None else model.get_output_embeddings()
    if head is None:
        yield
        return
    thread = get_ident()

    def pick(module, inputs):
        if get_ident() == thread and inputs and inputs[0].ndim == 3:
            at = places.to(inputs[0].device)
            return inputs[0][torch.arange(len(at), device=at.device)[:, None], at], *inputs[1:]

    hook = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        hook.remove()


def places_of(columns: torch.Tensor, width: int, most: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of a block of `width` tokens that logits are computed of, int64 [n] ascending, and where `columns` int64 [B, m] are among them: no others, or,
    with `most`, the block's last places, of which the first may be cut so that they are at most so many."""
    if most is None:
        return columns.unique(return_inverse=True)
    first = min(int(columns.min()), max(width - most, 0))
    return torch.arange(first, width, device=columns.device), columns - first
