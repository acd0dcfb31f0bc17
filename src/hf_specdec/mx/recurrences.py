"""Layers that carry states, in models with MX layers on a CPU: kernels in place of transformers' functions, with their arguments. A token's state does not depend
on how many others a pass has read. A layer gets a class beneath its own (`beneath`), whose `forward` is its own with other global names
(`hf_specdec.recurrences`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import inf

import torch
from torch import nn
from torch.nn import functional

from ..recurrences import global_names, with_names
from .beneath import Beneath, put_beneath
from .kernels.recurrence import MOST, TAPS, takes
from .linear import MXMatrix
from .readers import SHORT_CUTS
from .recurrence_ops import convolution, delta_rule, state_space

WHOLE = 64  # numbers that torch takes at once, or a multiple of them


def use_kernel_recurrences(model: nn.Module) -> None:
    """Give the layers of a model that carry states the kernels, where it has MX layers. They run on a CPU with kernels; everywhere else the model's own functions do,
    but for those that take weights out of layers."""
    if not any(isinstance(module, MXMatrix) for module in model.modules()):
        return
    for module in model.modules():
        if not isinstance(module, KernelStates) and hasattr(module, "layer_idx") and _forward(type(module)) is not None:
            put_beneath(module, KernelStates)


class KernelStates(Beneath):
    """Beneath the class of a layer that carries states."""

    mx_by_kernels = False

    def __init_subclass__(cls, **given):
        super().__init_subclass__(**given)
        if "mx_own" in vars(cls):
            cls.forward = _forward(cls.mx_own)


@lru_cache(maxsize=None)
def _forward(own: type) -> Callable | None:
    known = [name for name in global_names(own.forward) if name in OTHERS]
    return with_names(own.forward, lambda names: {name: OTHERS[name](names[name]) for name in known}) if {*known} - {"F"} else None


def _delta(original: Callable) -> Callable:
    def rule(query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, heard=True, **more):
        if not takes(query, key, value, g, beta, initial_state) or not query.dtype == key.dtype == value.dtype or key.shape[-1] > MOST:
            given = dict(initial_state=initial_state, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
            return original(query, key, value, g=g, beta=beta, **given, **more)
        out, state = delta_rule(query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel, heard=heard)
        return out, state if output_final_state else None

    rule.for_states = partial(rule, heard=False)
    return rule


def _chunk_scan(original: Callable) -> Callable:
    def scan(x, dt, A, B, C, D=None, dt_bias=None, initial_states=None, dt_softplus=False, dt_limit=(0.0, inf), return_final_states=False, z=None,
             heard=True, **more):
        if z is not None or not takes(x, dt, A, B, C, D, initial_states) or not x.dtype == B.dtype == C.dtype or B.shape[-1] > MOST:
            given = dict(D=D, dt_bias=dt_bias, initial_states=initial_states, dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=return_final_states, z=z)
            return original(x, dt, A, B, C, **given, **more)
        out, state = state_space(x, _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit), A, B, C, D, initial_states, heard=heard)
        return (out, state) if return_final_states else out

    scan.for_states = partial(scan, heard=False)
    return scan


def _update(original: Callable) -> Callable:
    def step(state, x, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **more):
        alike = A.ndim == 3 and all(part is None or part.stride(-1) == 0 for part in (dt, A, D, dt_bias))  # Mamba 2: one number a head
        if not alike or state.dtype != torch.float32 or not takes(state, x, dt, A, B, C, D) or not x.dtype == B.dtype == C.dtype or B.shape[-1] > MOST:
            return original(state, x, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **more)
        steps = _steps(dt[..., 0], None if dt_bias is None else dt_bias[..., 0], dt_softplus)
        out, after = state_space(x[:, None], steps[:, None], A[:, 0, 0], B[:, None], C[:, None], None if D is None else D[..., 0], state)
        state.copy_(after)
        return out[:, 0] if z is None else out[:, 0] * functional.silu(z)

    return step


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, soft: bool) -> torch.Tensor:
    """Time steps, rounded where transformers rounds them."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return steady_softplus(dt) if soft else dt


def steady_softplus(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """torch's softplus, with the same bits for a number whatever is around it: torch has another function for the last numbers of a tensor, and for few."""
    if not takes(x):
        return functional.softplus(x, *args, **kwargs)
    return functional.softplus(functional.pad(x.flatten(), (0, -x.numel() % WHOLE)), *args, **kwargs)[: x.numel()].view(x.shape)


class _Functional:
    """torch.nn.functional, but for its softplus."""

    softplus = staticmethod(steady_softplus)

    def __getattr__(self, name: str):
        return getattr(functional, name)


def _conv(original: Callable) -> Callable:
    def conv(hidden_states, weight, bias=None, activation=None, **more):
        alike = all(part is None or part.dtype == hidden_states.dtype for part in (weight, bias))
        if not alike or activation not in (None, "silu", "swish") or not takes(hidden_states, weight, bias) or weight.shape[-1] > TAPS:
            return original(hidden_states, weight, bias, activation=activation, **more)
        return convolution(hidden_states, weight, bias, activation is not None)

    return conv


def _conv_update(original: Callable) -> Callable:
    conv = _conv(None)

    def update(hidden_states, conv_state, weight, bias=None, activation=None):
        alike = all(part is None or part.dtype == hidden_states.dtype for part in (conv_state, weight, bias))
        if not alike or activation not in (None, "silu", "swish") or not takes(hidden_states, conv_state, weight, bias) or weight.shape[-1] > TAPS:
            return original(hidden_states, conv_state, weight, bias, activation)
        seen = torch.cat([conv_state, hidden_states], dim=-1)
        conv_state.copy_(seen[..., -conv_state.shape[-1] :])
        return conv(seen, weight, bias, activation=activation)[..., -hidden_states.shape[-1] :]

    return update


def _no_short_cut(original: Callable) -> Callable:
    """transformers goes on without, if such a function returns None."""
    return lambda *args, **kwargs: None


OTHERS = {
    "torch_chunk_gated_delta_rule": _delta,
    "torch_recurrent_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "recurrent_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _chunk_scan,
    "mamba2_selective_state_update": _update,
    "causal_conv1d_fn": _conv,
    "causal_conv1d_update": _conv_update,
    **dict.fromkeys(SHORT_CUTS, _no_short_cut),
    "F": lambda original: _Functional() if original is functional else original,
}
