"""The compiled attention kernel, in terms of tensors (csrc/attention.h)."""

from __future__ import annotations

import struct

import torch

from .cpu import DTYPES, PATHS, current_path, kernel_path, library

_PACK = struct.Struct("6Q 7q 3q 3q 3q 4q 3q 3f 4x").pack  # mx_attention of csrc/mx.h
_BYTES = 3
WIDEST = ("avx512f", "avx512_bf16", "amx")
MASKS = (*DTYPES, torch.bool)


def for_any_number(dtype: torch.dtype) -> bool:
    """Whether the kernel is faster than torch's for any number of queries: in bfloat16 on AVX-512."""
    path = current_path() if torch.compiler.is_compiling() or library() is None else PATHS[kernel_path()]  # chosen before anything is compiled
    return dtype == torch.bfloat16 and path in WIDEST


def takes(*tensors: torch.Tensor) -> bool:
    """Whether there is a kernel for these tensors: one of its dtypes, all alike, on a CPU, and no gradient wanted."""
    dtype = tensors[0].dtype
    return (
        dtype in DTYPES
        and all(tensor.dtype == dtype and tensor.device.type == "cpu" for tensor in tensors)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and library() is not None
    )


def attend(query, key, value, mask, scale: float, causal: bool, softcap: float, sinks, nothing: float) -> torch.Tensor:
    """The kernel's call; arguments as `attention.rows_attention` has checked them, mask `[B, H, Q, S]` (expanded) or None.
    Returns `[B, Q, H, Dv]`."""
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    batch, heads, queries, dk = query.shape
    kv_heads, slots, dv = key.shape[1], key.shape[2], value.shape[3]
    out = query.new_empty((batch, queries, heads, dv))
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    fields = _PACK(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), 0 if mask is None else mask.data_ptr(),
        0 if sinks is None else sinks.data_ptr(), out.data_ptr(),
        batch, heads, kv_heads, queries, slots, dk, dv,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *((0, 0, 0, 0) if mask is None else mask.stride()),
        DTYPES[query.dtype], 0 if mask is None else DTYPES.get(mask.dtype, _BYTES), causal,
        scale, softcap, nothing,
    )  # fmt: skip
    if library().mx_attention_rows(fields, kernel_path(), torch.get_num_threads()):
        raise MemoryError(f"no memory for attention over {slots} slots.")
    return out
