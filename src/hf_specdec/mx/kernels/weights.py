"""Weights as the kernels store them: quantised, and in the order in which a product reads them."""

from __future__ import annotations

import torch

from ..formats import BLOCK, SCALE_RULES, Format
from . import cpu


def quantize(weight: torch.Tensor, fmt: Format, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes uint8 `[N, K * bits / 8]` and scales uint8 `[N, K/32]`, as `codec.encode` and `packing.pack` make them.

    Raises ValueError that names the first row with a NaN or an infinity.
    """
    weight = weight.detach().contiguous()
    n, k = weight.shape
    threads = torch.get_num_threads()
    codes = weight.new_empty(n, k * fmt.bits // 8, dtype=torch.uint8)
    scales = weight.new_empty(n, k // BLOCK, dtype=torch.uint8)
    scratch = weight.new_empty(threads * 6 * k, dtype=torch.uint8)
    bad = cpu.library().mx_quantize(
        weight.data_ptr(), cpu.DTYPES[weight.dtype], n, k, cpu.NUMBERS[fmt.name], SCALE_RULES.index(rule),
        cpu.values_of(fmt.name).data_ptr(), codes.data_ptr(), scales.data_ptr(), scratch.data_ptr(), threads,
    )  # fmt: skip
    if bad >= 0:
        raise ValueError(f"row {bad} holds a NaN or an infinity, which MX blocks cannot keep.")
    return codes, scales


def tile(codes: torch.Tensor, scales: torch.Tensor, bits: int, back: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and scales of `16 * n` rows in tile order (csrc/mx.h), as new tensors of the same shape; `back` undoes it."""
    codes, scales = codes.contiguous(), scales.contiguous()
    new_codes, new_scales = torch.empty_like(codes), torch.empty_like(scales)
    k = codes.shape[1] * 8 // bits
    cpu.library().mx_tile(
        codes.data_ptr(), cpu.address_of(scales), new_codes.data_ptr(), new_scales.data_ptr(), codes.shape[0], k, bits, back,
        torch.get_num_threads(),
    )  # fmt: skip
    return new_codes, new_scales
