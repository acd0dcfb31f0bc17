"""The kernels of layers that carry states, as operators where torch's compiler looks on: eager passes call them without this detour."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .kernels import recurrence

_library = torch.library.Library("hf_specdec", "FRAGMENT")


def _kernel(schema: str, run: Callable, shaped: Callable) -> Callable:
    """The function `run`, under the name in `schema` for the compiler, to which shaped(*arguments) shows what comes out. Arguments by name are for eager passes alone."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"hf_specdec::{name}", shaped, lib=_library)
    operator = getattr(torch.ops.hf_specdec, name).default
    return lambda *arguments, **more: operator(*arguments) if torch.compiler.is_compiling() else run(*arguments, **more)


_delta = _kernel("mx_delta(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor? state, bool norm) -> (Tensor, Tensor)", recurrence.delta_rule,
                 lambda query, key, value, gate, beta, state, norm: (value.new_empty(value.shape), _state(value, key)))
_space = _kernel("mx_space(Tensor x, Tensor step, Tensor decay, Tensor b, Tensor c, Tensor? skip, Tensor? state) -> (Tensor, Tensor)", recurrence.state_space,
                 lambda x, step, decay, b, c, skip, state: (x.new_empty(x.shape), x.new_empty((x.shape[0], *x.shape[2:], b.shape[-1]), dtype=torch.float32)))
_conv = _kernel("mx_conv(Tensor x, Tensor weight, Tensor? bias, bool silu) -> Tensor", recurrence.convolved,
                lambda x, weight, bias, silu: x.new_empty(x.shape))


def _state(value: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return value.new_empty((value.shape[0], value.shape[2], key.shape[-1], value.shape[-1]), dtype=torch.float32)


def delta_rule(query, key, value, gate, beta, state, norm: bool, **more) -> tuple[torch.Tensor | None, torch.Tensor]:
    return _delta(query, key, value, gate.float(), beta, _numbers(state), norm, **more)


def state_space(x, step, decay, b, c, skip, state, **more) -> tuple[torch.Tensor | None, torch.Tensor]:
    return _space(x, _numbers(step), _numbers(decay), b, c, _numbers(skip), _numbers(state), **more)


def convolution(x, weight, bias, silu: bool) -> torch.Tensor:
    """As `convolved`, of x [B, C, T]."""
    x = x.transpose(1, 2)
    return _conv(x if x.stride(2) == 1 else x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), silu).transpose(1, 2)


def _numbers(part: torch.Tensor | None) -> torch.Tensor | None:
    return None if part is None else part.float().contiguous()


delta_rule.__doc__, state_space.__doc__ = recurrence.delta_rule.__doc__, recurrence.state_space.__doc__
