"""The products of one layer's experts, in terms of tensors (csrc/experts.c)."""

from __future__ import annotations

import ctypes
import struct

import torch

from .cpu import DTYPES, kernel_path, library

_JOB = struct.Struct("4Q 5q").pack  # mx_experts_job


def multiply(layer: int, experts: int, x: torch.Tensor, index: torch.Tensor, n: int) -> torch.Tensor:
    """`[pairs, n]` in x's dtype: for pair i of `index` (int64, any shape) row i // S of x `[rows, K]`, S = pairs / rows, times the weights of expert index[i]; zeros
    where there is no such expert. layer: the address of a `Layer` whose rows are the experts', n each, one expert's after another's.

    Raises MemoryError where there is none for the rows.
    """
    x, index = x.contiguous(), index.contiguous()
    pairs = index.numel()
    out = x.new_empty(pairs, n)
    if pairs == 0:
        return out
    job = _JOB(layer, x.data_ptr(), index.data_ptr(), out.data_ptr(), experts, pairs, pairs // x.shape[0], DTYPES[x.dtype], kernel_path())
    if library().mx_experts(ctypes.c_char_p(job), ctypes.c_int(torch.get_num_threads())):
        raise MemoryError(f"no memory for {pairs} rows of activations.")
    return out
