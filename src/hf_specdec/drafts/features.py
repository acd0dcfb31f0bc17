"""The target's hidden states: how a draft that reads them gets to see them, and the two layers that bring them into a model.

After EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import compat
from ..parts import read_at
from ..tap import Tap, watched
from ..uploads import upload
from .base import Context


class EachNorm(nn.Module):
    """An RMS norm with a weight of its own for each of several states (vLLM's `fc_norm`)."""

    def __init__(self, weights: list[torch.Tensor], eps: float):
        super().__init__()
        self.weights, self.eps = nn.ParameterList([nn.Parameter(weight.clone()) for weight in weights]), eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """states [.., n, H] -> the same shape."""
        return nn.functional.rms_norm(states, states.shape[-1:], eps=self.eps) * torch.stack(list(self.weights)).to(states.dtype)


class JointNorm(nn.Module):
    """One RMS norm over several states side by side (vLLM's `norm_before_fc`)."""

    def __init__(self, weight: torch.Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight.clone()), eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """states [.., n, H] -> the same shape."""
        flat = states.flatten(-2)
        return (nn.functional.rms_norm(flat, flat.shape[-1:], eps=self.eps) * self.weight.to(states.dtype)).view_as(states)


def tapped(target: PreTrainedModel, layers: tuple[int, ...], context: Context) -> Tap:
    """What `layers` of `target` put out in the call. ValueError if the draft drafts for another model, which would show it nothing."""
    if compat.unwrap(context.target.model).base_model is not compat.unwrap(target).base_model:
        raise ValueError("target: the draft was made to read the states of another model than the one that it drafts for now. Make it for that one, with "
                         "training.load_drafter(folder, model) for instance.")
    check_streams(target, layers)
    return context.target.watch(layers)


def check_streams(target: PreTrainedModel, layers: tuple[int, ...]) -> None:
    """Refuse `layers` below the last of a target whose layers put out several states per token (Gemma 3n, and models with hyper-connections)."""
    config = target.config.get_text_config()
    name = next((name for name in ("altup_num_inputs", "hc_mult", "hc_count") if (getattr(config, name, None) or 1) > 1), "")
    if name and min(layers) < config.num_hidden_layers:
        raise ValueError(f"target: the layers of {type(target).__name__} put out several states per token ({name}), which no draft reads yet. Use a draft "
                         f"that reads the last state alone, or none.")


def check_embedding(target: PreTrainedModel) -> None:
    """Refuse a target whose layers look tokens up themselves (Gemma 3n, Gemma 4's small ones): a drafter of such layers would have to be told more than states."""
    if target.config.model_type == "cpmant":
        raise ValueError(f"target: {type(target).__name__} takes no inputs_embeds, so none of its layers can be a drafter that reads hidden states. Make one that reads none, or use "
                         f"another draft.")
    if getattr(target.config.get_text_config(), "hidden_size_per_layer_input", 0):
        raise ValueError(f"target: the layers of {type(target).__name__} read a second embedding of every token (hidden_size_per_layer_input), so none of them can be a drafter "
                         f"that reads hidden states. Make one that reads none, or use another draft.")


@contextmanager
def hidden_states(model: PreTrainedModel, layers: tuple[int, ...]) -> Iterator[Callable[[], torch.Tensor]]:
    """Inside, one forward of `model`; the function then gives its hidden states [B, L, len(layers) * H]."""
    ascending = tuple(sorted(set(layers)))
    with watched(read_at(model, ascending)) as found:
        yield lambda: torch.cat([found[-len(ascending):][ascending.index(layer)] for layer in layers], dim=-1)


def attach(draft: PreTrainedModel, reads: tuple[int, ...]) -> None:
    """Make a feature drafter of a draft model: `feature_fuse` brings the target's states [.., len(reads) * H] to width H, and
    `feature_join` what comes of them, beside a token's embedding, to the input of the first layer. Both start as what passes
    the last of the states, and the sum of state and embedding."""
    weight = draft.get_input_embeddings().weight
    width = weight.shape[1]
    eye, zeros = torch.eye(width), torch.zeros(width, width)
    for name, parts in (("feature_fuse", [zeros] * (len(reads) - 1) + [eye]), ("feature_join", [eye, eye])):
        linear = nn.Linear(width * len(parts), width, bias=False, device="meta")
        linear.weight = nn.Parameter(torch.cat(parts, dim=1).to(weight))
        setattr(draft, name, linear)
    draft.reads = tuple(reads)


@torch.no_grad()
def start_blind(draft: PreTrainedModel) -> None:
    """Let `feature_join` pass the embedding alone, at about the scale that it has in the model."""
    width = draft.feature_join.weight.shape[0]
    scale = draft.get_input_embeddings().weight.float().square().mean(-1).sqrt().mean()
    draft.feature_join.weight[:, :width] = 0
    draft.feature_join.weight[:, width:] = scale * torch.eye(width).to(scale)


def rows_at(states: torch.Tensor, places: list[int]) -> torch.Tensor:
    """states[places] of [n, H], ascending; along a chain they are neighbours, and no indices are needed."""
    if places and places[-1] - places[0] + 1 == len(places):
        return states[places[0] : places[-1] + 1]
    return states[upload(places, states.device, torch.long)]


def fused(draft: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    """[.., H] from the target's states [.., len(reads) * H], those of each layer brought to a root mean square of 1: the layers of a
    model differ in scale by orders of magnitude. A draft with `scaled` = False, as published ones are, takes them as they are."""
    parts = states.to(draft.dtype).unflatten(-1, (len(draft.reads), -1))
    norm = getattr(draft, "feature_norm", None)
    return draft.feature_fuse((_scaled(draft, parts) if norm is None else norm(parts)).flatten(-2))


def inputs(draft: PreTrainedModel, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The first layer's input [B, L, H] from states [B, L, H] (fused, or the draft's own) and the tokens [B, L] that follow them, both
    brought to a root mean square of 1 as in `fused`."""
    embedded = draft.get_input_embeddings()(tokens)
    parts = (_scaled(draft, part.to(embedded.dtype)) for part in (states, embedded))
    return draft.feature_join(torch.cat(list(parts), dim=-1))


def _scaled(draft: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(states, states.shape[-1:]) if getattr(draft, "scaled", True) else states
