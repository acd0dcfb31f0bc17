"""MX by the words of the specification, written again without the package: integers, fractions and sorted tables, in float64.

Numbers of the formats: OCP Microscaling v1.0, tables 1 to 6. A scale is the exponent e of 2^e here, not its byte.
"""

from __future__ import annotations

import math
import os
import random
from fractions import Fraction

import torch

FULL = os.environ.get("HF_SPECDEC_FULL") == "1"

# name: bits, exponent bits, exponent bias, largest finite magnitude code, its value, emax
TABLE = {
    "mxfp8_e4m3": (8, 4, 7, 0b1111110, 448, 8),
    "mxfp8_e5m2": (8, 5, 15, 0b1111011, 57344, 15),
    "mxfp6_e3m2": (6, 3, 3, 0b11111, 28, 4),
    "mxfp6_e2m3": (6, 2, 1, 0b11111, Fraction(15, 2), 2),
    "mxfp4_e2m1": (4, 2, 1, 0b111, 6, 2),
    "mxint8": (8, 0, None, 127, Fraction(127, 64), 0),
}
NAMES = list(TABLE)
RULES = ("floor", "even", "ceil", "mse")


def meaning(name: str, code: int) -> Fraction | None:
    """The number a code stands for; None for the codes that stand for none (infinities, NaNs)."""
    bits, exponent_bits, bias, largest, _, _ = TABLE[name]
    if name == "mxint8":
        return Fraction(code - 256 if code > 127 else code, 64)
    mantissa_bits = bits - 1 - exponent_bits
    negative, magnitude = divmod(code, 2 ** (bits - 1))
    if magnitude > largest:
        return None
    exponent, mantissa = divmod(magnitude, 2**mantissa_bits)
    significand = Fraction(mantissa, 2**mantissa_bits) + (1 if exponent else 0)
    return (-1) ** negative * significand * Fraction(2) ** (max(exponent, 1) - bias)


def magnitudes(name: str) -> torch.Tensor:
    """Float64, ascending: the value of each finite magnitude code."""
    return torch.tensor([float(meaning(name, code)) for code in range(TABLE[name][3] + 1)], dtype=torch.float64)


def nearest(name: str, x: torch.Tensor) -> torch.Tensor:
    """Codes of finite float64 `x`: the nearest value, of two equally near the even code; beyond the largest, the largest."""
    values, largest = magnitudes(name), TABLE[name][3]
    middles = (values[1:] + values[:-1]) / 2
    below = torch.searchsorted(middles, x.abs(), right=False)
    tie = (below < largest) & (middles[below.clamp(max=largest - 1)] == x.abs())
    code = torch.where(tie & (below % 2 == 1), below + 1, below)
    if name == "mxint8":
        return torch.where(x < 0, -code, code) % 256
    return code + torch.signbit(x) * 2 ** (TABLE[name][0] - 1)


def values_of(name: str, codes: torch.Tensor) -> torch.Tensor:
    """Float64 values of finite codes."""
    table = [meaning(name, code) for code in range(2 ** TABLE[name][0])]
    return torch.tensor([float("nan") if entry is None else float(entry) for entry in table], dtype=torch.float64)[codes.long()]


def blocks_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.double().unflatten(-1, (-1, 32))


def power(exponents: torch.Tensor) -> torch.Tensor:
    """Float64 2^e."""
    return torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents)


def shared_exponent(name: str, amax: float, rule: str) -> int:
    """The exponent of a block's scale, kept in -127 .. 127, for the rules that look at the largest magnitude only."""
    bits, exponent_bits, _, _, _, emax = TABLE[name]
    if amax == 0:
        return -127
    mantissa, above = math.frexp(amax)  # amax = mantissa * 2^above, exactly; mantissa from 1/2 to 1
    log = above - 1
    kept = 6 if name == "mxint8" else bits - 1 - exponent_bits  # digits after the leading one
    if rule == "even" and 2 * mantissa >= 2 - 0.5 ** (kept + 1):
        log += 1
    if rule == "ceil" and 2 * mantissa > 1:
        log += 1
    return max(-127, min(127, log - emax))


def errors(name: str, blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Squared error of each block at each exponent."""
    scale = power(exponents).unsqueeze(-1)
    return (values_of(name, nearest(name, blocks / scale)) * scale - blocks).square().sum(-1)


def quantise(name: str, weight: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale bytes of a finite weight by a rule other than mse."""
    blocks = blocks_of(weight)
    amax = blocks.abs().amax(-1)
    exponents = torch.tensor([shared_exponent(name, value, rule) for value in amax.flatten().tolist()]).view(amax.shape)
    return nearest(name, blocks / power(exponents).unsqueeze(-1)).flatten(-2), exponents + 127


def stored(codes: list[list[int]], bits: int) -> torch.Tensor:
    """Rows of codes as one big integer each, code k at bit `k * bits`, written out from its lowest byte."""
    rows = [sum(code << (bits * k) for k, code in enumerate(row)).to_bytes(len(row) * bits // 8, "little") for row in codes]
    return torch.tensor([list(row) for row in rows], dtype=torch.uint8)


def tiny_integers(name: str, rule: str, weight: torch.Tensor) -> torch.Tensor:
    """Blocks whose scale `even` and `ceil` may take one too high: MXINT8's with no magnitude of 2^-126 or more. They round the bits
    of a float32, and the bits of its subnormals are counted from a fixed place; every other format's scale is at its end there."""
    amax = blocks_of(weight).abs().amax(-1)
    return (amax > 0) & (amax < 2.0**-126) if name == "mxint8" and rule in ("even", "ceil") else torch.zeros_like(amax, dtype=bool)


def nasty(dtype: torch.dtype, rows: int = 64, blocks: int = 4, seed: int = 0) -> torch.Tensor:
    """Weights `[rows, 32 * blocks]` in `dtype`, all finite: every size of number there is, ties of every format, zeros of both
    signs, subnormals, the largest and the smallest."""
    generator = torch.Generator().manual_seed(seed)
    draw = random.Random(seed)
    info = torch.finfo(dtype)
    smallest = 2.0**-149 if dtype == torch.float32 else info.smallest_normal * info.eps
    shape = (rows, blocks, 32)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    # the scale of a block anywhere in the dtype's range, and within a block numbers of nearby and of far sizes
    low, high = torch.tensor([smallest, info.max], dtype=torch.float64).log2().tolist()
    weight *= power(torch.empty(rows, blocks, 1, dtype=torch.float64).uniform_(low, high, generator=generator).round().long())
    weight *= power(-torch.randint(0, 8, shape, generator=generator) * torch.randint(0, 3, (rows, blocks, 1), generator=generator))
    # a quarter of the rows: multiples of 1/32 of the scale's powers, where the formats' ties are
    ties = torch.randint(-64, 65, (rows // 4, blocks, 32), generator=generator) / 32.0
    weight[: rows // 4] = ties * power(torch.randint(int(low) + 12, int(high) - 2, (rows // 4, blocks, 1), generator=generator))
    special = [0.0, -0.0, smallest, -smallest, 3 * smallest, info.smallest_normal, -info.smallest_normal, info.max, -info.max]
    for row in range(rows // 4, rows // 2):
        for block in range(blocks):
            weight[row, block, draw.randrange(32)] = draw.choice(special)
    weight[rows // 2] = 0.0
    weight[rows // 2 + 1] = -0.0
    weight[rows // 2 + 2] = smallest * torch.randint(-9, 10, (blocks, 32), generator=generator)
    weight[rows // 2 + 3] = info.max
    weight[rows // 2 + 4] = -info.max * (1 - info.eps * torch.randint(0, 9, (blocks, 32), generator=generator))
    return weight.clamp(info.min, info.max).flatten(1).to(dtype)
