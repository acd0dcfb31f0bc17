"""RecurrentGemma's blocks with a recurrence (RG-LRU, behind a short convolution), as passes of ours read them.

transformers (5.24) keeps their states in attributes of the modules, and begins the convolution of a block of several tokens with nothing. Gates and recurrence go on from the
state there is, and begin anew at position 0, so that padding before a text leaves nothing behind. Here states are in the cache, a convolution over several tokens
multiplies and adds as that of one token does, and the state after every token of a block is at hand. All else is transformers' own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from .recurrences import READERS, Block, blocks

KIND = "RecurrentGemmaRecurrentBlock"


def cannot_be_lent(model: nn.Module) -> bool:
    """Whether a block, or a part of it whose place is taken, was given a forward of its own (by accelerate, say), or is not given the cache (before transformers 5.24)."""
    found = blocks(model, KIND).values()
    own = (vars(part).get("forward") for block in found for part in (block, block.conv_1d, block.rg_lru))
    given = "cache" in inspect.signature(model.forward).parameters
    return bool(found) and not (given and all(forward is None or hasattr(forward, "reads") for forward in own))


def reader(index: int, block: nn.Module, reading: Callable[[], Block | None]) -> Callable:
    """A forward for the block of layer `index`; reading(): the pass that this thread reads, None outside of ours."""

    def forward(*args, **kwargs):
        now = reading()
        if now is None:
            return type(block).forward(block, *args, **kwargs)
        layer = kwargs["cache"].layers[index]
        lent = Lent(block, conv_1d=lambda inputs: _convolved(block.conv_1d, layer, inputs), rg_lru=lambda *given: _recurrent(block.rg_lru, layer, now, index, *given))
        return type(block).forward(lent, *args, **{**kwargs, "use_cache": False})  # with which it calls these two, and keeps nothing

    forward.reads = index
    return forward


class Lent:
    """A module with something else in the place of some attributes."""

    def __init__(self, of: nn.Module, **others):
        vars(self).update(others, of=of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)


def _convolved(conv: nn.Conv1d, layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """What a convolution makes of inputs [B, C, L] behind those that the layer holds, [B, C, L]."""
    before, width = layer.has_previous_state[0], conv.weight.shape[-1]
    inputs, length = layer.update_conv_state(inputs, conv_kernel_size=width - 1), inputs.shape[-1]
    if not before:
        return conv(inputs)[..., :length]
    inputs = pad(inputs, (max(length + width - 1 - inputs.shape[-1], 0), 0))[..., 1 - width - length :]
    return torch.sum(inputs.unfold(-1, width, 1) * conv.weight, dim=-1) + conv.bias[:, None]


def _recurrent(rg_lru: nn.Module, layer: Any, now: Block, index: int, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What a recurrence makes of inputs [B, L, C] behind the state that the layer holds."""
    before, states = layer.recurrent_states.get(0), []

    def scan(hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, reset: torch.Tensor, **_) -> tuple[torch.Tensor, torch.Tensor]:
        gates, hidden = (recurrent_gate * ~reset).float(), hidden_states.float()
        state = torch.zeros_like(hidden[:, 0]) if before is None else before
        for t in range(hidden.shape[1]):
            state = gates[:, t] * state + hidden[:, t]
            states.append(state)
        return torch.stack(states, dim=1).to(hidden_states.dtype), state

    out = type(rg_lru).forward(Lent(rg_lru, recurrent_states=before, _rnn_scan=scan), inputs, positions)
    layer.update_recurrent_state(states[-1])
    now.keep(index, lambda n: torch.stack([states[own - 1][b] if own else before[b] for b, own in enumerate(n)]))
    return out


READERS[KIND] = reader, cannot_be_lent
