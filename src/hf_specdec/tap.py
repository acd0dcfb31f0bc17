"""What layers of a model put out in its passes: how drafts get to see hidden states. Hooks, on one model, for the length of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident

import torch
from torch import nn

SHOWN: list[torch.Tensor] = []  # of a pass that is being compiled: a compiled function leaves it empty


class Tap:
    """The states that some layers of a `CachedModel` put out, pass by pass (`CachedModel.watch`).

    layers: numbers of decoder layers; the model's own count stands for what comes after the final norm.
    passes: since they were last taken, of every pass states [B, L, len(layers) * H], layer after layer along the last dimension, and the position of
            every row's first one.
    """

    def __init__(self, layers: tuple[int, ...]):
        self.layers = tuple(layers)
        self.passes: list[tuple[torch.Tensor, list[int]]] = []

    def take(self, batch: int) -> list[tuple[torch.Tensor, list[int]]]:
        """The passes of `batch` rows since the last call. Those of more rows were of rows that have ended since."""
        taken = [(states, starts) for states, starts in self.passes if len(starts) == batch]
        self.passes.clear()
        return taken


def layers_of(taps: list[Tap]) -> tuple[int, ...]:
    """All the layers that are watched, ascending."""
    return tuple(sorted({layer for tap in taps for layer in tap.layers}))


def show(taps: list[Tap], states: list[torch.Tensor], starts: list[int]) -> None:
    """Tell `taps` of a pass: the outputs [B, L, H] of `layers_of(taps)`, and the rows' first positions."""
    found = dict(zip(layers_of(taps), states))
    for tap in taps:
        firsts, seen = without_padding(starts, torch.cat([found[layer] for layer in tap.layers], dim=-1))
        tap.passes.append((seen, firsts))


def without_padding(starts: list[int], block: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """The first position of every row of a block [B, L, ...], which may be one of padding before the text (below 0), and the block, such that it begins with the text
    and the padding comes last."""
    if min(starts) < 0:
        block = torch.stack([own.roll(min(start, 0), 0) for own, start in zip(block, starts)])
    return [max(start, 0) for start in starts], block


def note(module: nn.Module, args: tuple, output) -> None:
    """A forward hook that adds what a layer puts out to SHOWN."""
    SHOWN.append(hidden_of(output))


def hidden_of(output) -> torch.Tensor:
    """[B, L, H] from what a decoder layer, or a model without its head, returns."""
    hidden = getattr(output, "last_hidden_state", output)
    return hidden[0] if isinstance(hidden, (tuple, list)) else hidden


@contextmanager
def watched(modules: list[nn.Module], hook: Callable | None = None) -> Iterator[list[torch.Tensor]]:
    """Inside, a forward of this thread adds what these modules put out to the list, in the order in which they run, or any forward calls `hook` with it."""
    found: list[torch.Tensor] = []
    thread = get_ident()
    hook = hook or (lambda module, args, output: found.append(hidden_of(output)) if get_ident() == thread else None)
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
