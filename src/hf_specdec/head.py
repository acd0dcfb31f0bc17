"""The output head over the places of each row that are asked for, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

import torch
from transformers import PreTrainedModel


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
