"""From numbers to MX codes and back, in torch. This file is the definition: every kernel is compared with it.

OCP Microscaling v1.0, sections 5.2 (scale), 6.3 (conversion). A code is held in a byte of its own here; `packing` packs them.
"""

from __future__ import annotations

import torch

from .formats import BLOCK, DEFAULT_RULE, FORMATS, SCALE_BIAS, SCALE_NAN, Format, check_rule

_MANTISSA = 23  # float32


def encode(weight: torch.Tensor, fmt: Format, rule: str = DEFAULT_RULE) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 `[N, K]` and scale bytes uint8 `[N, K/32]` of a floating-point `weight [N, K]`.

    The shared exponent is that of the block's largest magnitude minus emax: as it is (`floor`, section 6.3), after rounding
    it to the element's mantissa (`even`), rounded up (`ceil`), or the one of `floor`, one above and one below with the least
    squared error (`mse`). Elements round to nearest, ties to even, and saturate with their sign. A block that holds a NaN or
    an infinity gets the NaN scale. A block of zeros gets scale byte 0.
    """
    blocks = _blocks(weight)
    exponent = shared_exponent(blocks, fmt, rule)
    scale = (exponent + SCALE_BIAS).to(torch.uint8)
    scale = torch.where(blocks.isfinite().all(-1, keepdim=True), scale, scale.new_tensor(SCALE_NAN))
    return nearest(blocks, exponent, fmt).reshape(weight.shape), scale.squeeze(-1)


def decode(codes: torch.Tensor, scales: torch.Tensor, fmt: Format, dtype=torch.float32) -> torch.Tensor:
    """`[N, K]` in `dtype` from codes uint8 `[N, K]` and scale bytes uint8 `[N, K/32]`: value times 2^(byte - 127).

    Exact in float32 unless the product leaves its range; MXFP6, MXFP4 and MXFP8 are exact in bfloat16, too.
    """
    values = fmt.values.to(codes.device)[codes.int()].unflatten(-1, (-1, BLOCK))
    return (values * scale_values(scales).unsqueeze(-1)).flatten(-2).to(dtype)


def round_to_integers(x: torch.Tensor) -> torch.Tensor:
    """`x [..., K]`, floating point, in x's dtype, each block of 32 rounded to MXINT8 (scale rule "even"): what `activations="mxint8"` multiplies."""
    codes, scales = encode(x, FORMATS["mxint8"])
    return decode(codes, scales, FORMATS["mxint8"], x.dtype)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Float32 powers of two from E8M0 bytes: 0 is 2^-127, a subnormal, and 0xFF is NaN."""
    bits = scales.int() << _MANTISSA
    bits = torch.where(scales == 0, 1 << (_MANTISSA - 1), bits)
    return torch.where(scales == SCALE_NAN, 0x7FC00000, bits).view(torch.float32)


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    if not weight.is_floating_point():
        raise TypeError(f"weight must be a floating-point tensor, not {weight.dtype}.")
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"weight has {weight.shape[-1]} inputs, which is no multiple of the MX block of {BLOCK}.")
    return weight.detach().float().unflatten(-1, (-1, BLOCK))


def shared_exponent(blocks: torch.Tensor, fmt: Format, rule: str) -> torch.Tensor:
    """Int32 exponents `[..., 1]` of the scales of float32 `blocks [..., 32]`, in -127..127; ValueError for an unknown rule."""
    amax = blocks.abs().amax(-1, keepdim=True)
    if check_rule(rule) == "mse":
        return _least_error(blocks, _exponent(amax, fmt, "floor"), fmt)
    return _exponent(amax, fmt, rule)


def _exponent(amax: torch.Tensor, fmt: Format, rule: str) -> torch.Tensor:
    if rule == "even":
        fraction = 6 if fmt.is_integer else fmt.mantissa_bits  # the integers' leading one is their seventh magnitude bit
        bits = amax.view(torch.int32) + (1 << (_MANTISSA - fraction - 1))
    elif rule == "ceil":
        bits = amax.view(torch.int32) + (1 << _MANTISSA) - 1
    else:
        bits = amax.view(torch.int32)
    return ((bits >> _MANTISSA) - SCALE_BIAS - fmt.emax).clamp(-SCALE_BIAS, SCALE_BIAS)


def nearest(blocks: torch.Tensor, exponent: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes uint8 of `blocks * 2^-exponent`. In float64 the products are exact for every float32 input and every scale."""
    scaled = torch.ldexp(blocks.double(), -exponent.double())
    magnitude = scaled.abs().nan_to_num(posinf=fmt.max)
    if fmt.is_integer:
        code = torch.round(magnitude / fmt.step).clamp(max=fmt.max_code)
        return torch.where(scaled < 0, -code, code).to(torch.int16).bitwise_and(0xFF).to(torch.uint8)
    binade = torch.where(magnitude > 0, torch.frexp(magnitude).exponent - 1, fmt.emin).clamp(min=fmt.emin)
    steps = torch.round(torch.ldexp(magnitude, (fmt.mantissa_bits - binade).double()))
    code = (steps + ((binade - fmt.emin) << fmt.mantissa_bits)).clamp(max=fmt.max_code)
    return (code.to(torch.uint8)) | (torch.signbit(scaled).to(torch.uint8) << (fmt.bits - 1))


def _least_error(blocks: torch.Tensor, floor: torch.Tensor, fmt: Format) -> torch.Tensor:
    best, least = floor, None
    for step in (0, 1, -1):  # ties keep the earlier one
        exponent = (floor + step).clamp(-SCALE_BIAS, SCALE_BIAS)
        values = fmt.values.to(blocks.device)[nearest(blocks, exponent, fmt).int()].double()
        squares = (torch.ldexp(values, exponent.double()) - blocks.double()).square()
        error = sum(squares.unbind(-1)).unsqueeze(-1)  # one after another: the C quantiser adds them in this order, too
        best = exponent if least is None else torch.where(error < least, exponent, best)
        least = error if least is None else torch.minimum(error, least)
    return best
