"""A matrix in an MX format, in the stored order: `quantize` makes it, `dequantize` undoes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..hints import what
from . import codec
from .formats import BLOCK, DEFAULT_FORMAT, DEFAULT_RULE, Format, check_rule, get_format
from .kernels import cpu, weights
from .packing import pack, unpack


@dataclass(frozen=True)
class PackedMatrix:
    """`codes` uint8 `[N, K * bits / 8]`, least significant bit first, and E8M0 `scales` uint8 `[N, K/32]`."""

    codes: torch.Tensor
    scales: torch.Tensor
    format: Format

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.format.bits

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.numel() + self.scales.numel()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """`[N, K]` in `dtype`."""
        if self.format.is_dense:
            return self.codes.view(self.format.dtype).to(dtype)
        return codec.decode(unpack(self.codes, self.format.bits), self.scales, self.format, dtype)


def check_own(known: int | None, weight: torch.Tensor) -> None:
    """RuntimeError if a layer's bytes, which lay at the address `known`, are others: nobody but the layer knows their order."""
    if known not in (None, weight.data_ptr()) and weight.device.type == "cpu":
        raise RuntimeError("packed MX weights were replaced from outside, by merging adapters or by offloading: they are no numbers that could be added to, and stay where they "
                           "are. Load the model again, and call mx.dequantize(model) first.")


def quantize(
    weight: torch.Tensor, format: str | Format = DEFAULT_FORMAT, scale_rule: str = DEFAULT_RULE
) -> PackedMatrix:
    """`weight [N, K]`, floating point, in an MX format: blocks of 32 along K share a power-of-two scale.

    Raises ValueError for an unknown format or scale rule, for K that is no multiple of 32, and for weights that hold a NaN
    or an infinity; TypeError for a tensor that is not floating point or not two-dimensional.
    """
    fmt = get_format(format)
    check_rule(scale_rule)
    _check(weight)
    if fmt.is_dense:
        bytes_ = weight.detach().to(fmt.dtype).contiguous().view(torch.uint8)
        return PackedMatrix(bytes_, bytes_.new_empty(weight.shape[0], 0), fmt)
    if weight.device.type == "cpu" and weight.dtype in cpu.DTYPES and cpu.library() is not None:
        codes, scales = weights.quantize(weight, fmt, scale_rule)
    else:
        finite = weight.isfinite().all(-1)
        if not finite.all():
            row = int((~finite).nonzero()[0])
            raise ValueError(f"row {row} holds a NaN or an infinity, which MX blocks cannot keep.")
        codes, scales = codec.encode(weight, fmt, scale_rule)
        codes = pack(codes, fmt.bits)
    return PackedMatrix(codes, scales, fmt)


def _check(weight: torch.Tensor) -> None:
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weight: expected a tensor [N, K], got {what(weight)}; of a layer pass layer.weight.")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise TypeError(f"weight must be a floating-point matrix [N, K], not {weight.dtype} {tuple(weight.shape)}.")
    if not weight.numel():
        raise ValueError(f"weight has shape {list(weight.shape)}: there is no number in it.")
    if weight.shape[1] % BLOCK:
        raise ValueError(f"weight has {weight.shape[1]} inputs, which is no multiple of the MX block of {BLOCK}.")
