"""A layer's weights on a GPU: the Triton kernel for a few rows, decompression and the library's product for many."""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch
from torch.nn import functional as F

from ..formats import Format, get_format
from ..packed import PackedMatrix

FEW_ROWS = 32
OLDEST = (3, 5)  # Triton that torch 2.9 brings: the ones before make no products of eight columns


def has_kernel(fmt: Format) -> bool:
    """Whether Triton is there and has a kernel for this format (MXFP6 and MXFP4). Where it is not, or too old, one warning says so."""
    return fmt.name in _formats()


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    try:
        from . import triton_mx

        version = triton_mx.triton.__version__
        if tuple(map(int, version.split(".")[:2])) >= OLDEST:
            return tuple(triton_mx.FORMATS)
        why = f"their kernel needs Triton {'.'.join(map(str, OLDEST))} or newer, as torch 2.9 brings it, and here is {version}"
    except ImportError as error:
        why = str(error)
    warnings.warn(f"MX weights on a GPU are decompressed once and multiplied by torch, in the memory of dense ones: {why}.", stacklevel=4)
    return ()


def to_planes(packed: PackedMatrix):
    """The weights as the kernel reads them (triton_mx.Planes): as many bytes, in another order."""
    from . import triton_mx

    return triton_mx.to_planes(packed.codes, packed.scales, packed.format.name)


def from_planes(planes, fmt: Format) -> PackedMatrix:
    """The inverse of `to_planes`."""
    from . import triton_mx

    return PackedMatrix(*triton_mx.from_planes(planes, fmt.name), fmt)


def multiply(x: torch.Tensor, planes, format: str, bias: torch.Tensor | None) -> torch.Tensor:
    """`[..., N]` from `x [..., K]`: by the kernel up to 32 rows of 16-bit numbers, else by the weights in x's dtype."""
    from . import triton_mx

    bias = None if bias is None else bias.to(x.dtype)
    rows = x.numel() // x.shape[-1]
    if x.dtype in triton_mx.DTYPES and 0 < rows <= FEW_ROWS:
        return triton_mx.linear(x, planes, format, bias)
    return F.linear(x, from_planes(planes, get_format(format)).dequantize(x.dtype), bias)
