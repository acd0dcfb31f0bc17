"""Error-compensating rounding to MX formats: GPTQ (Frantar et al. 2022, arXiv 2210.17323) with the scales of MX blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import codec
from .formats import BLOCK, SCALE_BIAS, Format
from .packed import PackedMatrix
from .packing import pack

DAMPING = 0.3  # of the mean of the diagonal


@dataclass(frozen=True)
class Inputs:
    """What rounding has to know of a layer's inputs: `order`, int64 `[K]`, in which the columns of the weights are rounded, and `factor`, float32
    `[K, K]`, in that order: upper triangular U such that U^T U is the inverse of the damped Gram matrix."""

    order: torch.Tensor
    factor: torch.Tensor

    @classmethod
    def of(cls, gram: torch.Tensor) -> Inputs:
        """From `gram [K, K]`, floating point, the sum of x x^T over inputs x. Raises ValueError for one with a NaN or an infinity.

        Blocks of large inputs come first, and so do large ones within a block: many columns are left to make up for them (the paper's
        act_order, with the blocks kept). The damping is 0.3 of the mean of the diagonal, more than the paper's 0.01, because weights that
        fit a few texts closely lose on others; and ten times more as long as there is no factor. Inputs that were always zero get that
        mean on the diagonal: their weights are rounded to nearest.
        """
        if not bool(gram.isfinite().all()):
            raise ValueError("the Gram matrix of a layer's inputs holds a NaN or an infinity.")
        order, damping = _order(gram.diagonal()), DAMPING
        gram = gram[order][:, order].double()
        diagonal, one = gram.diagonal(), torch.eye(len(gram), dtype=torch.float64, device=gram.device)
        mean = float(diagonal.abs().mean()) or 1.0
        diagonal[diagonal == 0] = mean
        while True:
            lower, failed = torch.linalg.cholesky_ex((gram + damping * mean * one).flip(0, 1))
            if not failed:  # reversed twice, the lower factor is an upper one; its inverse is U
                return cls(order, torch.linalg.solve_triangular(lower.flip(0, 1), one, upper=True).float())
            damping *= 10


def _order(diagonal: torch.Tensor) -> torch.Tensor:
    blocks = diagonal.double().unflatten(0, (-1, BLOCK))
    first = blocks.sum(1).argsort(descending=True, stable=True)
    within = blocks[first].argsort(dim=1, descending=True, stable=True)
    return (first[:, None] * BLOCK + within).flatten()


def compensated(weight: torch.Tensor, fmt: Format, rule: str, inputs: Inputs) -> PackedMatrix:
    """`weight [N, K]`, floating point and finite, in an MX format, so that the layer's outputs for its inputs change little.

    The scale of a block of 32 columns follows `rule`, from the weights as they are when its turn comes; then column after column is
    rounded to nearest, and the columns after it make up for its error. Where the factor is diagonal the result is that of `quantize`,
    bit for bit. Raises ValueError for an unknown rule.
    """
    rest, factor = weight.detach().float()[:, inputs.order], inputs.factor
    codes = torch.empty_like(rest, dtype=torch.uint8)
    scales = codes.new_empty(rest.shape[0], rest.shape[1] // BLOCK)
    for start in range(0, rest.shape[1], BLOCK):
        columns, after = slice(start, start + BLOCK), slice(start + BLOCK, None)
        exponent, own = codec.shared_exponent(rest[:, columns], fmt, rule), inputs.order[columns]
        codes[:, own], errors = _round_block(rest[:, columns], exponent, fmt, factor[columns, columns])
        scales[:, own[0] // BLOCK] = (exponent.squeeze(-1) + SCALE_BIAS).to(torch.uint8)
        rest[:, after] -= errors @ factor[columns, after]
    return PackedMatrix(pack(codes, fmt.bits), scales, fmt)


def _round_block(block: torch.Tensor, exponent: torch.Tensor, fmt: Format, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 `[N, 32]`, and each column's error over the factor's diagonal, float32 `[N, 32]`."""
    block, values, scale = block.clone(), fmt.values.to(block.device), torch.exp2(exponent.double())
    codes, errors = torch.empty_like(block, dtype=torch.uint8), torch.empty_like(block)
    for i in range(BLOCK):
        column, own = block[:, i : i + 1], slice(i, i + 1)
        codes[:, own] = code = codec.nearest(column, exponent, fmt)
        errors[:, own] = (column - values[code.int()] * scale).float() / factor[i, i]
        block[:, i + 1 :] -= errors[:, own] * factor[i, i + 1 :]
    return codes, errors
