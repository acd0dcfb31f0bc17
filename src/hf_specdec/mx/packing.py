"""The stored order of codes: a row's codes follow one another, least significant bit first (as ONNX packs 4 and 6 bits)."""

from __future__ import annotations

import torch


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Uint8 `[N, K * bits / 8]` from codes uint8 `[N, K]`: code k holds bits `k * bits ..` of its row."""
    if bits == 8:
        return codes.contiguous()
    per_group, width = _group(bits)
    groups = codes.unflatten(-1, (-1, per_group)).int()
    word = sum(groups[..., i] << (bits * i) for i in range(per_group))
    return torch.stack([(word >> (8 * i)) & 0xFF for i in range(width)], -1).to(torch.uint8).flatten(-2)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 `[N, K]` from packed bytes uint8 `[N, K * bits / 8]`: the inverse of `pack`."""
    if bits == 8:
        return packed.contiguous()
    per_group, width = _group(bits)
    groups = packed.unflatten(-1, (-1, width)).int()
    word = sum(groups[..., i] << (8 * i) for i in range(width))
    return torch.stack([(word >> (bits * i)) & (2**bits - 1) for i in range(per_group)], -1).to(torch.uint8).flatten(-2)


def _group(bits: int) -> tuple[int, int]:
    """The fewest codes that fill whole bytes, and how many bytes they fill."""
    return {4: (2, 1), 6: (4, 3)}[bits]
