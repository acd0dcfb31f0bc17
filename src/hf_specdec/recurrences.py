"""How layers that carry states read a block of tokens, and what makes the state after fewer of them.

transformers has one function for a single token, and another for several, which works on chunks of 64 or 256 tokens and fills a block up to them. In our passes
the latter is asked for chunks that fit the block, and what it was given is kept: the state after the first n tokens follows from the state before the block,
without the rest of the model. The function of Mamba 1 begins with nothing, whatever state there is; there every token goes through the one for a single token.

Known are transformers' functions of these names (5.17 and newer), which a layer's `forward` finds among its global names; for the time of a pass the layer has a
`forward` with other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from math import inf
from threading import RLock
from types import CellType, FunctionType, MethodType

import torch
from torch import nn

After = Callable[[list[int]], torch.Tensor]  # the state [B, ...] after the first n[b] tokens of row b of a block
MOST = 32  # tokens of a chunk on a CPU: work within chunks grows with their square
SHORTEST = 16  # of a chunk elsewhere, where kernels want powers of two


class Block:
    """A pass over a block. before: per layer, the state before it, where there is one. after: per layer, what `After` says; empty where nothing will be rejected.
    heads: per layer whose heads are read one by one, what makes the state of each."""

    def __init__(self, before: dict[int, torch.Tensor], kept: bool):
        self.before, self.kept = before, kept
        self.after: dict[int, After] = {}
        self.heads: dict[int, list[After]] = {}

    def keep(self, layer: int, after: After) -> None:
        if self.kept and layer in self.before:
            self.after[layer] = lambda n: after(n) if any(n) else self.before[layer]


_block: ContextVar[Block | None] = ContextVar("block", default=None)
_lock = RLock()  # who holds it may change the forwards of layers
_readers: dict[int, list] = {}  # by id of a layer: how many passes go through its other forward, and that


class Recurrences:
    """The layers of `model` whose functions are known, and their other forwards."""

    def __init__(self, model: nn.Module):
        self.forwards = {layer: forward for layer in model.modules() if (forward := _other(layer)) is not None}
        self.layers = {layer.layer_idx for layer in self.forwards}

    @contextmanager
    def reading(self, block: Block) -> Iterator[None]:
        """Passes within read `block`; those of other threads are as ever."""
        with _lock:
            for layer, forward in self.forwards.items():
                _, forward = own = _readers.setdefault(id(layer), [0, forward])
                own[0] += 1
                vars(layer).setdefault("forward", forward)
        token = _block.set(block)
        try:
            yield
        finally:
            _block.reset(token)
            with _lock:
                for layer in self.forwards:
                    own = _readers[id(layer)]
                    own[0] -= 1
                    if not own[0] and vars(layer).get("forward") is _readers.pop(id(layer))[1]:
                        del vars(layer)["forward"]


def begins_with_nothing(model: nn.Module) -> bool:
    """Whether layers of Mamba 1 are among those of `model` that cannot be helped."""
    return any("mamba_selective_scan" in global_names(type(layer).forward) and _other(layer) is None for layer in model.modules())


# --- another forward ------------------------------------------------------------------------------------------------------

def global_names(function: Callable) -> tuple[str, ...]:
    """Those that the innermost of the functions that `function` wraps makes use of."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(getattr(function, "__code__", None), "co_names", ())


def with_names(function: FunctionType, others: Callable[[dict], dict]) -> FunctionType | None:
    """`function`, with others(names) in place of global names of the innermost of those that it wraps; None where it cannot be told what is wrapped."""
    inner, names, cells = getattr(function, "__wrapped__", None), function.__globals__, function.__closure__ or ()
    if inner is None:
        names = {**names, **others(names)}
    else:
        other = with_names(inner, others)
        if other is None or not any(cell.cell_contents is inner for cell in cells):
            return None
        cells = tuple(CellType(other) if cell.cell_contents is inner else cell for cell in cells)
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    if inner is not None:
        made.__wrapped__ = other
    return made


def _other(layer: nn.Module) -> MethodType | None:
    """The forward of a layer with functions of ours in place of those over several tokens; None where it has none, or was given a forward of its own (by
    accelerate, say)."""
    known = [name for name in global_names(type(layer).forward) if name in FORMS]
    if not known or not hasattr(layer, "layer_idx") or "forward" in vars(layer) and id(layer) not in _readers:
        return None
    other = with_names(type(layer).forward, lambda names: {name: _ours(layer.layer_idx, FORMS[name], names[name], names) for name in known})
    return other and MethodType(other, layer)


def _ours(layer: int, form: Callable, several: Callable, names: dict) -> Callable:
    def run(*args, **kwargs):
        block = _block.get()
        if block is None or torch.compiler.is_compiling() and form is not _mamba1:  # whose own function would begin with nothing
            return several(*args, **kwargs)
        return form(block, layer, several, names, *args, **kwargs)

    return run


# --- what is known of transformers' functions -----------------------------------------------------------------------------

def _chunk(length: int, most: int, device: torch.device) -> int:
    """Tokens of a chunk such that as few as can be are filled up, of a function whose own are `most` tokens long."""
    if device.type != "cpu":
        return min(max(SHORTEST, 1 << (length - 1).bit_length()), most)
    return -(-length // -(-length // min(most, MOST)))


def _first(n: list[int], part: torch.Tensor, value: float, dim: int = 1) -> torch.Tensor:
    """`part` [B, ..., L, ...] of the first max(n) tokens, which lie along `dim`; `value` in place of those of row b after its first n[b]."""
    most = max(n)
    part = part.narrow(dim, 0, most)
    if min(n) == most:
        return part
    return part.masked_fill(_beyond(tuple(n), part.device).view(len(n), *(most if d == dim else 1 for d in range(1, part.ndim))), value)


@lru_cache(maxsize=8)
def _beyond(n: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Which of max(n) tokens come after the first n[b] of row b, bool [B, max(n)]; made once for all layers."""
    return (torch.arange(max(n), device="cpu") >= torch.tensor(n, device="cpu")[:, None]).to(device)


def _delta_rule(block: Block, layer: int, several: Callable, names: dict, query, key, value, g, beta, chunk_size: int = 64, initial_state=None, **options):
    """Gated delta rules, with a gate a head or a channel; all of [B, L, H, ...]. A token with g = beta = 0 changes nothing."""
    def read(length: int, g, beta, **more):
        size = _chunk(length, chunk_size, query.device)
        return several(query[:, :length], key[:, :length], value[:, :length], g=g, beta=beta, chunk_size=size, initial_state=initial_state, **options | more)

    block.keep(layer, lambda n: read(max(n), _first(n, g, 0), _first(n, beta, 0), output_final_state=True)[1])
    return read(query.shape[1], g, beta)


def _mamba2(block: Block, layer: int, several: Callable, names: dict, hidden_states, dt, A, B, C, chunk_size: int, initial_states=None, dt_softplus: bool = False,
            dt_limit: tuple[float, float] = (0.0, inf), **options):
    """Mamba 2; all but A of [B, L, ...]. A token whose time step is softplus(-inf) = 0 changes nothing."""
    def read(length: int, dt, **more):
        size, limits = _chunk(length, chunk_size, dt.device), dict(dt_softplus=dt_softplus, dt_limit=dt_limit)
        return several(hidden_states[:, :length], dt, A, B[:, :length], C[:, :length], chunk_size=size, initial_states=initial_states, **limits, **options | more)

    if dt_softplus and dt_limit[0] <= 0:
        block.keep(layer, lambda n: read(max(n), _first(n, dt, -inf), return_final_states=True)[1])
    return read(dt.shape[1], dt)


def _mamba1(block: Block, layer: int, several: Callable, names: dict, hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus: bool = False,
            return_last_state: bool = False, **options):
    """Mamba 1; all but A and D of [B, ..., L]. Token by token from the state before the block."""
    before, one = block.before.get(layer), names["mamba_selective_state_update"]
    if before is None:
        return several(hidden_states, dt, A, B, C, D=D, z=z, delta_bias=delta_bias, delta_softplus=delta_softplus, return_last_state=return_last_state, **options)
    heads = block.heads.setdefault(layer, [])
    by_head = before.ndim > hidden_states.ndim  # Zamba
    if by_head:
        before = before[:, len(heads)]

    def read(dt):
        state, bias = before.clone(), dict(dt_bias=delta_bias, dt_softplus=delta_softplus)
        out = [one(state, hidden_states[..., t], dt[..., t], A, B[..., t], C[..., t], D, z=None if z is None else z[..., t], **bias) for t in range(dt.shape[-1])]
        return torch.stack(out, dim=-1), state

    heads.append(lambda n: read(_first(n, dt, -inf, dim=dt.ndim - 1))[1])
    if delta_softplus:
        block.keep(layer, lambda n: torch.stack([state(n) for state in heads], dim=1) if by_head else heads[0](n))
    return read(dt) if return_last_state else read(dt)[0]


FORMS = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}
