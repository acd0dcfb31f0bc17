"""The compiled recurrences of layers that carry states, in terms of tensors (csrc/recurrence.c)."""

from __future__ import annotations

import struct

import torch

from .cpu import kernel_path, library, there

MOST, TAPS = 256, 16  # numbers of a key, or of a row of a state space; inputs that a convolution sees
_DELTA = struct.Struct("8Q 6q 4q 4q 4q 3q 4q 3q 2f").pack  # mx_delta_job
_SPACE = struct.Struct("9Q 6q 4q 4q 4q 2q").pack  # mx_space_job
_CONV = struct.Struct("4Q 4q 2q 3q").pack  # mx_conv_job


def takes(*tensors: torch.Tensor | None) -> bool:
    """Whether there is a kernel for these tensors: of float32 or bfloat16, on a CPU, with no gradient wanted."""
    if torch.is_grad_enabled():
        return False
    return all(part is None or part.dtype in (torch.float32, torch.bfloat16) and part.device.type == "cpu" for part in tensors) and there()


def _address(part: torch.Tensor | None) -> int:
    return 0 if part is None else part.data_ptr()


def delta_rule(query, key, value, gate, beta, state, norm: bool, heard: bool = True) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Gated delta rule (arXiv 2412.06464, equation 10), token by token: out [B, L, H, V] in the dtype of `value`, and the state float32 [B, H, K, V] after the last token.
    Without `heard` the state alone.

    query, key: [B, L, KH, K], where H is a multiple of KH, in the dtype of `value` [B, L, H, V]; beta: [B, L, H]. gate: logarithm of the decay, float32 [B, L, H], or
    [B, L, H, K] for one per number of a key. state: None, or that before the first token, contiguous. norm: divide queries and keys by their lengths.
    """
    batch, length, heads, nv = value.shape
    out = value.new_empty(value.shape) if heard else None
    after = value.new_empty((batch, heads, key.shape[-1], nv), dtype=torch.float32)
    job = _DELTA(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), beta.data_ptr(), gate.data_ptr(), _address(state), after.data_ptr(), _address(out),
        batch, length, key.shape[2], heads, key.shape[-1], nv, *query.stride(), *key.stride(), *value.stride(), *beta.stride(), *(*gate.stride(), 0)[:4],
        value.dtype == torch.bfloat16, beta.dtype == torch.bfloat16, kernel_path(), key.shape[-1] ** -0.5, 1e-6 if norm else -1.0,
    )  # fmt: skip
    library().mx_delta(job, torch.get_num_threads())
    return out, after


def state_space(x, step, decay, b, c, skip, state, heard: bool = True) -> tuple[torch.Tensor | None, torch.Tensor]:
    """State spaces of Mamba 2 (arXiv 2405.21060, section 6), token by token: out [B, L, H, P] in the dtype of `x`, and the state float32 [B, H, P, N] after the last token.
    Without `heard` the state alone.

    x: [B, L, H, P]; b, c: [B, L, G, N], where H is a multiple of G, in its dtype. step: [B, L, H]; decay: [H], below 0; skip: [H], or None. state: None, or that before
    the first token. But for the first three, float32 and contiguous.
    """
    batch, length, heads, p = x.shape
    out, after = x.new_empty(x.shape) if heard else None, x.new_empty((batch, heads, p, b.shape[-1]), dtype=torch.float32)
    job = _SPACE(
        x.data_ptr(), b.data_ptr(), c.data_ptr(), step.data_ptr(), decay.data_ptr(), _address(skip), _address(state), after.data_ptr(),
        _address(out), batch, length, heads, b.shape[2], p, b.shape[-1], *x.stride(), *b.stride(), *c.stride(), x.dtype == torch.bfloat16, kernel_path(),
    )  # fmt: skip
    library().mx_space(job, torch.get_num_threads())
    return out, after


def convolved(x, weight, bias, silu: bool) -> torch.Tensor:
    """Every channel of x [B, T, C] convolved with weight [C, n] over its last n inputs, plus bias [C] or None, and `silu` of it; all in one dtype, and the channels
    of a token side by side in memory."""
    batch, length, channels = x.shape
    out = x.new_empty(x.shape)
    job = _CONV(
        x.data_ptr(), weight.data_ptr(), _address(bias), out.data_ptr(), batch, channels, length, weight.shape[1], *x.stride()[:2],
        x.dtype == torch.bfloat16, silu, kernel_path(),
    )  # fmt: skip
    library().mx_conv(job, torch.get_num_threads())
    return out
