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
from functools import lru_cache, partial
from math import inf
from threading import RLock
from types import CellType, FunctionType, MethodType
from typing import NamedTuple

import torch
from torch import nn

MOST = 32  # tokens of a chunk on a CPU: work within chunks grows with their square
SHORTEST = 16  # of a chunk elsewhere, where kernels want powers of two
READERS: dict[str, tuple[Callable, Callable]] = {}  # by the class of blocks that have no such function: what makes their other forward, and whether a model's cannot be (`rglru`)


class Block:
    """A pass over a block. before: per layer, the state before it, where there is one. after: per layer, what makes the state after some of it; empty where nothing will
    be rejected. heads: per layer whose heads are read one by one, what makes the state of each."""

    def __init__(self, before: dict[int, torch.Tensor], kept: bool):
        self.before, self.kept = before, kept
        self.after: dict[int, Callable[[list[int]], torch.Tensor]] = {}
        self.heads: dict[int, list[Callable[[list[int]], torch.Tensor]]] = {}

    def keep(self, layer: int, after: Callable[[list[int]], torch.Tensor]) -> None:
        if self.kept and layer in self.before:
            self.after[layer] = after


class Told(NamedTuple):
    """What a layer's function over several tokens was given in a compiled pass, in the place of the state after them, of which `Recurrences.after` makes any."""

    args: tuple
    options: dict

    def to(self, *args) -> Told:
        """Some layers keep their state in float32."""
        return self


_block: ContextVar[Block | None] = ContextVar("block", default=None)
_ours_compiled: list[bool] = []  # not empty where the compiler, in whatever thread, is told of a pass of ours (`telling`); outside of what it traces always empty
_lock = RLock()  # who holds it may change the forwards of layers
_readers: dict[int, list] = {}  # by id of a layer: how many passes go through its other forward, and that


class Recurrences:
    """The layers of `model` whose functions are known, and their other forwards."""

    def __init__(self, model: nn.Module):
        with _lock:  # another thread may be putting forwards in place
            found = {layer: other for layer in model.modules() if (other := _other(layer)) is not None}
        self.forwards = {layer: MethodType(function, layer) for layer, (function, _, _) in found.items()}
        self.forms = {layer.layer_idx: other[1:] for layer, other in found.items()}
        others = {index: block for kind in READERS for index, block in blocks(model, kind).items()}
        self.forwards |= {block: READERS[type(block).__name__][0](index, block, _block.get) for index, block in others.items()}
        self.layers = {*self.forms, *others}

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

    def after(self, layer: int, told: Told, before: torch.Tensor) -> Callable[[list[int]], torch.Tensor]:
        """What makes the state after the first tokens of a block of which a function was `told`."""
        return partial(after, *self.forms[layer], told.args, told.options, before)


def telling(run: Callable, *args, **kwargs):
    """run(*args, **kwargs), within a function that is compiled: what functions are `Told` is put in the place of states. The compiler follows this without doing it, so
    that what other threads compile meanwhile is none of ours."""
    _ours_compiled.append(True)
    done = run(*args, **kwargs)
    _ours_compiled.clear()
    return done


def begins_with_nothing(model: nn.Module) -> bool:
    """Whether layers of Mamba 1, or blocks of READERS, are among those of `model` that cannot be helped."""
    return any(cannot(model) for _, cannot in READERS.values()) or any("mamba_selective_scan" in global_names(type(layer).forward) and _other(layer) is None for layer in model.modules())


def blocks(model: nn.Module, kind: str) -> dict[int, nn.Module]:
    """By the number of its layer, every block of `model` that is of this class."""
    return {int(name.split(".")[-2]): module for name, module in model.named_modules() if type(module).__name__ == kind}


# --- another forward ------------------------------------------------------------------------------------------------------

def global_names(function: Callable) -> tuple[str, ...]:
    """Those that the innermost of the functions that `function` wraps makes use of."""
    return getattr(getattr(_innermost(function), "__code__", None), "co_names", ())


def _innermost(function: Callable) -> Callable:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def with_names(function: FunctionType, others: Callable[[dict], dict]) -> FunctionType | None:
    """`function`, with others(names) in place of global names of the innermost of those that it wraps; None where it cannot be told what is wrapped."""
    inner, names, cells = getattr(function, "__wrapped__", None), function.__globals__, function.__closure__ or ()
    if inner is None:
        names = {name: part for name, part in {**names, **others(names)}.items() if name != "__name__"}  # by it torch's compiler would find the other ones
    else:
        other = with_names(inner, others)
        if other is None or not any(cell.cell_contents is inner for cell in cells):
            return None
        cells = tuple(CellType(other) if cell.cell_contents is inner else cell for cell in cells)
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, made.__module__ = function.__kwdefaults__, function.__module__
    if inner is not None:
        made.__wrapped__ = other
    return made


def _other(layer: nn.Module) -> tuple[FunctionType, Callable, Callable] | None:
    """The forward of a layer with a function of ours in place of the one over several tokens, that one's form, and it; None where there is none that is known,
    or the layer was given a forward of its own (by accelerate, say)."""
    if not hasattr(layer, "layer_idx") or "forward" in vars(layer) and id(layer) not in _readers:
        return None
    forward = type(layer).forward
    known = [name for name in global_names(forward) if name in FORMS]
    return _with_ours(forward, layer.layer_idx, tuple((name, _innermost(forward).__globals__[name]) for name in known)) if known else None


@lru_cache(maxsize=None)  # compiled functions are checked for being given the same ones
def _with_ours(forward: FunctionType, layer: int, known: tuple[tuple[str, Callable], ...]) -> tuple[FunctionType, Callable, Callable] | None:
    other = with_names(forward, lambda names: {name: _ours(layer, FORMS[name], several, names) for name, several in known})
    (name, several), *_ = known
    return other and (other, FORMS[name], several)


def _ours(layer: int, form: Callable, several: Callable, names: dict) -> Callable:
    one = names.get(ONE)

    def run(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling() and form is not _mamba1:  # whose own function would begin with nothing
            return _told(form, several, args, kwargs) if _ours_compiled else several(*args, **kwargs)
        block = _block.get()
        if block is None:
            return several(*args, **kwargs)
        if form is _mamba1:
            return form(block, layer, several, one, *args, **kwargs)
        if _can_be_cut(form, kwargs) and layer in block.before:
            options = {name: part for name, part in kwargs.items() if name not in (*ENDS, BEFORE[form])}
            block.keep(layer, partial(after, form, several, args, options, block.before[layer]))
        return form(several, *args, **kwargs)

    return run


def _told(form: Callable, several: Callable, args: tuple, options: dict) -> tuple[torch.Tensor, Told]:
    """What a layer is given in a compiled pass: what the function puts out, and what it was told but for the state before."""
    if not _can_be_cut(form, options):
        raise NotImplementedError("a state that does not follow from what its function was told")
    options = {name: part for name, part in options.items() if name not in ENDS}
    out = form(several, *args, **options)
    return out[0] if isinstance(out, tuple) else out, Told(args, {name: part for name, part in options.items() if name != BEFORE[form]})


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


def _delta_rule(several: Callable, query, key, value, g, beta, chunk_size: int = 64, n: list[int] | None = None, **options):
    """Gated delta rules, with a gate a head or a channel; all of [B, L, H, ...]. A token with g = beta = 0 changes nothing. n: of the state after so many tokens."""
    if n is not None:
        query, key, value = (part[:, : max(n)] for part in (query, key, value))
        g, beta, options = _first(n, g, 0), _first(n, beta, 0), options | {"output_final_state": True}
        several = getattr(several, "for_states", several)  # one that need not put anything out
    return several(query, key, value, g=g, beta=beta, chunk_size=_chunk(query.shape[1], chunk_size, query.device), **options)


def _mamba2(several: Callable, hidden_states, dt, A, B, C, chunk_size: int, n: list[int] | None = None, **options):
    """Mamba 2; all but A of [B, L, ...]. A token whose time step is softplus(-inf) = 0 changes nothing. n: of the state after so many tokens."""
    if n is not None:
        hidden_states, B, C = (part[:, : max(n)] for part in (hidden_states, B, C))
        dt, options = _first(n, dt, -inf), options | {"return_final_states": True}
        several = getattr(several, "for_states", several)
    return several(hidden_states, dt, A, B, C, chunk_size=_chunk(dt.shape[1], chunk_size, dt.device), **options)


def _mamba1(block: Block, layer: int, several: Callable, one: Callable, hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus: bool = False,
            return_last_state: bool = False, **options):
    """Mamba 1; all but A and D of [B, ..., L]. Token by token from the state before the block."""
    before = block.before.get(layer)
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

    heads.append(lambda n: read(_first(n, dt, -inf, dim=dt.ndim - 1))[1] if any(n) else before)
    if delta_softplus:
        block.keep(layer, lambda n: torch.stack([state(n) for state in heads], dim=1) if by_head else heads[0](n))
    return read(dt) if return_last_state else read(dt)[0]


def after(form: Callable, several: Callable, args: tuple, options: dict, before: torch.Tensor, n: list[int]) -> torch.Tensor:
    """The state [B, ...] after the first n[b] tokens of row b of a block, of which a function was told `args` and `options`; `before`: the one before the block."""
    return form(several, *args, n=n, **options, **{BEFORE[form]: before})[1] if any(n) else before


def _can_be_cut(form: Callable, options: dict) -> bool:
    """Whether some token changes nothing."""
    return form is _delta_rule or bool(options.get("dt_softplus")) and options.get("dt_limit", (0.0, inf))[0] <= 0


FORMS = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}
ONE = "mamba_selective_state_update"  # what Mamba 1 has for a single token
BEFORE = {_delta_rule: "initial_state", _mamba2: "initial_states"}  # the argument that is the state before a block
ENDS = ("output_final_state", "return_final_states")  # those that ask for the one after it
