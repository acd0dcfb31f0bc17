"""The element formats of OCP Microscaling (MX) v1.0, section 5.3: what each code means.

A block is 32 elements along the input dimension that share one E8M0 scale byte b, worth 2^(b-127); 0xFF is NaN.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..hints import meant

BLOCK = 32
SCALE_BIAS = 127
SCALE_NAN = 0xFF


@dataclass(frozen=True)
class Format:
    """One element format: a sign bit, `exponent_bits` and `mantissa_bits`; `exponent_bits` 0 is two's complement.

    `max_code` is the magnitude code of the largest finite value, `emax` the exponent of the largest power of two.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    emax: int
    max_code: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """The exponent bias; for the integer format, the six fraction bits of its implied scale 2^-6 (section 5.3.4)."""
        return max(1, 2 ** (self.exponent_bits - 1) - 1) if self.exponent_bits else 1

    @property
    def emin(self) -> int:
        """The exponent of the smallest normal number, and of the subnormal ones."""
        return 1 - self.bias

    @property
    def is_integer(self) -> bool:
        return self.exponent_bits == 0

    @property
    def is_dense(self) -> bool:
        """Plain bfloat16 or float32: no blocks and no scales, for the kernels' sake."""
        return self.bits >= 16

    @property
    def fits_int8(self) -> bool:
        """Whether the values of a block are integers of 8 bits times a power of two: then products with MXINT8 activations are integer ones."""
        exponent, mantissa = divmod(self.max_code, 2**self.mantissa_bits)
        largest = self.max_code if self.is_integer else (mantissa + 2**self.mantissa_bits) * 2 ** (exponent - 1)  # in units of the smallest
        return largest <= 127

    @property
    def dtype(self) -> torch.dtype:
        """Of a dense format's numbers."""
        return torch.bfloat16 if self.bits == 16 else torch.float32

    @property
    def bits_per_weight(self) -> float:
        """Bits stored per weight, the shared scale included."""
        return self.bits + (0 if self.is_dense else 8 / BLOCK)

    @property
    def step(self) -> float:
        """The spacing of the values below 2^(emin+1): the smallest positive value."""
        return 2.0 ** (self.emin - self.mantissa_bits) if not self.is_integer else 2.0**-6

    @property
    def max(self) -> float:
        """The largest finite value."""
        return float(self.values[self.max_code])

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """Float32 `[2 ** bits]`: what each code is worth before its block's scale. E5M2 has infinities, E4M3 and E5M2 NaNs."""
        codes = torch.arange(2**self.bits, device="cpu")
        if self.is_integer:
            return (codes - 256 * (codes > 127)).float() * self.step
        magnitude = codes & (2 ** (self.bits - 1) - 1)
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & (2**self.mantissa_bits - 1)
        significand = torch.where(exponent > 0, mantissa + 2**self.mantissa_bits, mantissa).float()
        values = torch.ldexp(significand, exponent.clamp(min=1) - self.bias - self.mantissa_bits)
        values[magnitude > self.max_code] = float("nan")
        if self.name == "mxfp8_e5m2":
            values[magnitude == self.max_code + 1] = float("inf")
        return torch.where(codes >> (self.bits - 1) == 1, -values, values)


FORMATS = {
    entry.name: entry
    for entry in (
        Format("mxfp8_e4m3", 4, 3, emax=8, max_code=0x7E),
        Format("mxfp8_e5m2", 5, 2, emax=15, max_code=0x7B),
        Format("mxfp6_e3m2", 3, 2, emax=4, max_code=0x1F),
        Format("mxfp6_e2m3", 2, 3, emax=2, max_code=0x1F),
        Format("mxfp4_e2m1", 2, 1, emax=2, max_code=0x07),
        Format("mxint8", 0, 7, emax=0, max_code=0x7F),
    )
}
# Not MX formats: numbers as they are, in the kernels' tiles. Lossless for a model of that dtype, and faster than torch's own products.
DENSE = {
    "bf16": Format("bf16", 8, 7, emax=127, max_code=0x7F7F),
    "fp32": Format("fp32", 8, 23, emax=127, max_code=0x7F7FFFFF),
}
DEFAULT_FORMAT = "mxfp6_e2m3"
SCALE_RULES = ("floor", "even", "ceil", "mse")
DEFAULT_RULE = "even"
ACTIVATIONS = "mxint8"  # what activations can be rounded to


def get_format(name: str | Format, argument: str = "format") -> Format:
    """The format of that name. Raises ValueError naming `argument`, with the names there are, for any other."""
    if isinstance(name, Format):
        return name
    known = FORMATS | DENSE
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{argument}={name!r} is not an MX format{meant(name, known)}. Take one of: {', '.join(known)}.")
    return known[name]


def check_activations(name: str | None, format: str | Format) -> str | None:
    """`name` itself. Raises ValueError for anything but None and "mxint8", and for a format that does not go with it."""
    if name not in (None, ACTIVATIONS):
        raise ValueError(f"activations={name!r} must be None (as they are) or {ACTIVATIONS!r}.")
    fmt = get_format(format)
    if name and not fmt.fits_int8:
        fitting = ", ".join(each.name for each in FORMATS.values() if each.fits_int8)
        raise ValueError(f"activations={name!r} goes with weights that are small integers times a scale, which {fmt.name} ones are not: take one of: {fitting}.")
    return name


def check_rule(rule: str) -> str:
    """`rule` itself. Raises ValueError, with the rules there are, for any other."""
    if rule not in SCALE_RULES:
        raise ValueError(f"scale_rule={rule!r} is not a scale rule. Take one of: {', '.join(SCALE_RULES)}.")
    return rule
