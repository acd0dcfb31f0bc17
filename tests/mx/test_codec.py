"""Numbers to codes and back, against the specification written again in `reference`, torchao's MXTensor and ml_dtypes' casts."""

from __future__ import annotations

import contextlib
import io
import logging

import pytest
import torch

from hf_specdec import mx
from hf_specdec.mx import codec
from hf_specdec.mx.formats import FORMATS
from hf_specdec.mx.packing import pack

from .reference import (
    FULL, NAMES, RULES, TABLE, blocks_of, errors, magnitudes, nasty, nearest, power, quantise, tiny_integers, values_of,
)  # fmt: skip

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEEDS = range(20 if FULL else 2)

each_format = pytest.mark.parametrize("name", NAMES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_rule = pytest.mark.parametrize("rule", RULES)
NEGATIVE_ZERO = {name: 0 if name == "mxint8" else 2 ** (TABLE[name][0] - 1) for name in NAMES}


def encode(name: str, weight, rule: str = "floor"):
    """Codes and scale bytes as whole numbers."""
    codes, scales = codec.encode(torch.as_tensor(weight), FORMATS[name], rule)
    assert codes.dtype == scales.dtype == torch.uint8
    return codes.long(), scales.long()


def block(name: str, numbers, top: int = 0) -> torch.Tensor:
    """Rows of 32 whose floor scale is 2^top: the first number is 2^emax times that, then 31 of `numbers` a row."""
    numbers = torch.as_tensor(numbers, dtype=torch.float64)
    rows = torch.zeros(-(-len(numbers) // 31), 32, dtype=torch.float64)
    rows[:, 0] = 2.0 ** TABLE[name][5]
    rows[:, 1:].view(len(rows), 31)[torch.arange(len(numbers)) // 31, torch.arange(len(numbers)) % 31] = numbers
    return torch.ldexp(rows, torch.tensor(top)).float()


# --- against the specification ------------------------------------------------------------------------------------------------


@each_format
@each_dtype
@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_codes_and_scales_are_the_specifications(name, dtype, rule):
    for seed in SEEDS:
        weight = nasty(dtype, seed=seed)
        codes, scales = encode(name, weight, rule)
        wanted_codes, wanted_scales = quantise(name, weight, rule)
        higher = scales - wanted_scales
        assert torch.equal(higher, torch.where(tiny_integers(name, rule, weight), higher.clamp(0, 1), 0))
        assert torch.equal(blocks_of(codes)[higher == 0], blocks_of(wanted_codes)[higher == 0])


@each_format
@each_dtype
def test_mse_takes_the_best_of_three_scales(name, dtype):
    for seed in SEEDS:
        weight = nasty(dtype, seed=seed)
        codes, scales = encode(name, weight, "mse")
        exponents, blocks = scales - 127, blocks_of(weight)
        floor = quantise(name, weight, "floor")[1] - 127
        error = errors(name, blocks, exponents)
        candidates = [(floor + step).clamp(-127, 127) for step in (0, 1, -1)]
        assert torch.stack([exponents == other for other in candidates]).any(0).all()
        for other in candidates:
            assert (error <= errors(name, blocks, other) * (1 + 1e-12)).all()
        assert torch.equal(codes, nearest(name, blocks / power(exponents).unsqueeze(-1)).flatten(-2))


@each_format
def test_mse_of_equally_good_scales_keeps_floors(name):
    weight = torch.zeros(3, 32)
    weight[1, 4], weight[2, 5] = 2.0 ** TABLE[name][5], -1.0
    assert torch.equal(encode(name, weight, "mse")[1], encode(name, weight, "floor")[1])


@each_format
@each_dtype
def test_the_error_of_mse_is_never_above_that_of_floor(name, dtype):
    for weight in (nasty(dtype, seed=7), torch.randn(64, 128, generator=torch.Generator().manual_seed(7)).to(dtype)):
        of = {}
        for rule in ("floor", "mse"):
            codes, scales = encode(name, weight, rule)
            values = values_of(name, codes) * power(scales - 127).repeat_interleave(32, 1)
            of[rule] = blocks_of(values - weight.double()).square().sum(-1)
        assert (of["mse"] <= of["floor"] * (1 + 1e-12)).all()


@each_format
@each_dtype
def test_ceil_never_saturates(name, dtype):
    weight = nasty(dtype, seed=3)
    amax = blocks_of(weight).abs().amax(-1)
    exponents = encode(name, weight, "ceil")[1] - 127
    fits = amax <= power(exponents + TABLE[name][5])
    beyond = (exponents == 127) & (amax > 2.0**127)  # only MXINT8, which would need 2^128, the largest float32s
    assert (fits | beyond).all() and (name == "mxint8" or not beyond.any())


@each_format
def test_numbers_beyond_the_largest_saturate_with_their_sign(name):
    largest, value, emax = TABLE[name][3], float(TABLE[name][4]), TABLE[name][5]
    over = 2.0 ** (emax + 1) * (1 - 2.0**-24)
    step = float(magnitudes(name)[-1] - magnitudes(name)[-2])
    codes, scales = encode(name, block(name, [over, -over, value, -value, value + 0.49 * step, -value - 0.49 * step]))
    negative = 256 - largest if name == "mxint8" else largest + NEGATIVE_ZERO[name]
    assert scales.tolist() == [[127]] and codes[0, 1:7].tolist() == [largest, negative] * 3


@each_format
@pytest.mark.parametrize("top", [-100, 0, 90])
def test_ties_go_to_the_even_code(name, top):
    values, negative = magnitudes(name), NEGATIVE_ZERO[name]
    middles = (values[1:] + values[:-1]) / 2
    even = (lower := torch.arange(len(middles))) + lower % 2
    for sign, offset in ((1, 0), (-1, negative)):
        for shift, wanted in ((0, even), (-1, lower), (1, lower + 1)):
            numbers = middles.float() if shift == 0 else torch.nextafter(middles.float(), torch.tensor(shift * torch.inf))
            codes, scales = encode(name, block(name, sign * numbers, top))
            wanted = (-wanted) % 256 if sign < 0 and name == "mxint8" else wanted + offset
            assert (scales == 127 + top).all()
            assert torch.equal(codes[:, 1:].flatten()[: len(wanted)], wanted), (sign, shift)


@each_format
@pytest.mark.parametrize("byte", [0, 1, 64, 127, 200, 254])
@pytest.mark.parametrize("rule", RULES)
def test_every_value_there_is_survives(name, byte, rule):
    top = min(byte - 127, 127 - TABLE[name][5])
    values = magnitudes(name)
    if name == "mxint8" and rule in ("even", "ceil"):
        top = max(top, -126)  # see tiny_integers
    if rule == "ceil":  # what is above the largest power of two moves to the next scale
        values = values[values <= 2.0 ** TABLE[name][5]]
    for numbers in (values, -values):
        weight = block(name, numbers, top)
        codes, scales = codec.encode(weight, FORMATS[name], rule)
        assert (scales == top + 127).all()
        again = codec.decode(codes, scales, FORMATS[name])
        assert torch.equal(again, weight)
        if name != "mxint8":
            assert torch.equal(torch.signbit(again), torch.signbit(weight))


@each_format
@each_rule
def test_what_was_rounded_once_stays(name, rule):
    fmt = FORMATS[name]
    once = codec.decode(*codec.encode(torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), fmt, rule), fmt)
    assert torch.equal(codec.decode(*codec.encode(once, fmt, rule), fmt), once)


# --- special blocks -----------------------------------------------------------------------------------------------------------


@each_format
@each_rule
def test_zeros_have_scale_byte_0_and_keep_their_sign(name, rule):
    weight = torch.zeros(2, 32)
    weight[1] = -0.0
    codes, scales = encode(name, weight, rule)
    assert scales.tolist() == [[0], [0]]
    assert codes[0].eq(0).all() and codes[1].eq(NEGATIVE_ZERO[name]).all()
    again = codec.decode(codes.to(torch.uint8), scales.to(torch.uint8), FORMATS[name])
    assert again.eq(0).all() and (name == "mxint8" or torch.signbit(again[1]).all())


@each_format
@each_rule
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_block_with_a_nan_or_an_infinity_has_the_nan_scale_and_is_alone(name, rule, bad):
    weight = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    clean_codes, clean_scales = encode(name, weight, rule)
    weight[1, 40] = bad
    codes, scales = encode(name, weight, rule)
    assert scales[1, 1] == 0xFF
    scales[1, 1] = clean_scales[1, 1]
    codes[1, 32:64] = clean_codes[1, 32:64]
    assert torch.equal(scales, clean_scales) and torch.equal(codes, clean_codes)
    scales[1, 1] = 0xFF
    again = codec.decode(codes.to(torch.uint8), scales.to(torch.uint8), FORMATS[name])
    assert again[1, 32:64].isnan().all() and again.isnan().sum() == 32


@each_format
def test_blocks_lie_along_the_inputs_and_know_nothing_of_each_other(name):
    weight = torch.randn(4, 96, generator=torch.Generator().manual_seed(5))
    codes, scales = encode(name, weight, "even")
    assert codes.shape == (4, 96) and scales.shape == (4, 3)
    for row in range(4):
        for b in range(3):
            alone = encode(name, weight[row : row + 1, 32 * b : 32 * b + 32], "even")
            assert torch.equal(alone[0][0], codes[row, 32 * b : 32 * b + 32]) and alone[1].item() == scales[row, b]


# --- codes to numbers ---------------------------------------------------------------------------------------------------------


def test_scale_bytes_are_powers_of_two():
    values = codec.scale_values(torch.arange(256, dtype=torch.uint8))
    assert values.dtype == torch.float32 and values[255].isnan()
    assert values[:255].double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]


@each_format
def test_every_code_with_every_scale_byte(name):
    count = 2 ** TABLE[name][0]
    codes = torch.arange(max(count, 32)).remainder(count).repeat(256, 1)
    scales = torch.arange(256).unsqueeze(1).expand(256, codes.shape[1] // 32)
    decoded = codec.decode(codes.to(torch.uint8), scales.to(torch.uint8), FORMATS[name])
    wanted = values_of(name, codes) * power(scales - 127).repeat_interleave(32, 1)
    numbers = ~values_of(name, codes).isnan()
    assert decoded[255].isnan().all() and decoded.dtype == torch.float32
    assert torch.equal(decoded[:255][numbers[:255]], wanted.float()[:255][numbers[:255]])


@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_float32_rounded_once(name, dtype):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    encoded = codec.encode(weight, FORMATS[name], "even")
    wide, other = codec.decode(*encoded, FORMATS[name]), codec.decode(*encoded, FORMATS[name], dtype)
    assert other.dtype == dtype and torch.equal(other, wide.to(dtype))
    if dtype == torch.bfloat16:  # at most eight significant bits
        assert torch.equal(other.float(), wide)


# --- against others -----------------------------------------------------------------------------------------------------------


def torchao():
    """torchao's conversion, its modes and its element types by our names; loading it talks, which is kept quiet."""
    with contextlib.redirect_stderr(io.StringIO()):
        logging.disable(logging.WARNING)
        try:
            mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
            modes = pytest.importorskip("torchao.prototype.mx_formats.config").ScaleCalculationMode
        finally:
            logging.disable(logging.NOTSET)
    return mx_tensor.to_mx, modes, {
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp6_e3m2": mx_tensor.DTYPE_FP6_E3M2,
        "mxfp6_e2m3": mx_tensor.DTYPE_FP6_E2M3,
        "mxfp4_e2m1": torch.float4_e2m1fn_x2,
    }  # fmt: skip


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mxint8"])  # torchao has no MXINT8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # nor takes float16
@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_torchao_makes_the_same_scales_and_codes(name, dtype, rule):
    """But for the elements of blocks with scale byte 0: torchao divides these by 2^-126 instead of 2^-127 (it says so where it
    does: Triton has no subnormal scales), so that they come back at half their size. Their zeros are the same."""
    to_mx, modes, elements = torchao()
    for weight in [nasty(dtype, seed=seed) for seed in SEEDS] + [torch.randn(64, 256).to(dtype)]:
        scales, codes = to_mx(weight, elements[name], 32, modes(rule))
        ours, own_scales = codec.encode(weight, FORMATS[name], rule)
        assert torch.equal(own_scales, scales.view(torch.uint8))
        regular = ((own_scales != 0) | blocks_of(weight).eq(0).all(-1)).unsqueeze(-1)
        assert regular.any()
        if name == "mxfp4_e2m1":
            ours, theirs = (c.unflatten(-1, (-1, 16)) for c in (pack(ours, 4), codes.view(torch.uint8).flatten(1)))
        else:
            ours, theirs = (c.unflatten(-1, (-1, 32)) for c in (ours, codes.view(torch.uint8)))
        assert torch.equal(ours.masked_fill(~regular, 0), theirs.masked_fill(~regular, 0))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mxint8"])
def test_elements_are_rounded_as_ml_dtypes_casts_them(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    short = name.rpartition("_")[2]
    dtype = getattr(ml_dtypes, f"float{TABLE[name][0]}_{short}" + ("" if short == "e5m2" else "fn"))
    for seed in SEEDS:
        for weight in (nasty(torch.float32, seed=seed), torch.randn(64, 128)):
            codes, scales = encode(name, weight, "ceil")  # nothing saturates: the casts differ there
            scaled = (blocks_of(weight) / power(scales - 127).unsqueeze(-1)).flatten(-2)
            fits = scaled.float().double() == scaled
            theirs = torch.from_numpy(scaled.float().numpy().astype(dtype).view("uint8")).long()
            assert torch.equal(codes[fits], theirs[fits]) and fits.float().mean() > 0.9


# --- refusals -----------------------------------------------------------------------------------------------------------------


def test_whole_numbers_other_widths_and_unknown_rules_are_refused():
    with pytest.raises(TypeError, match="int8"):
        codec.encode(torch.zeros(2, 32, dtype=torch.int8), FORMATS["mxint8"])
    with pytest.raises(TypeError, match="weight: expected a tensor .N, K., got Linear; of a layer pass layer.weight"):
        mx.quantize(torch.nn.Linear(32, 32))
    with pytest.raises(ValueError, match="33.*32"):
        codec.encode(torch.zeros(2, 33), FORMATS["mxint8"])
    with pytest.raises(ValueError, match="'up'.*floor"):
        codec.encode(torch.zeros(2, 32), FORMATS["mxint8"], "up")
