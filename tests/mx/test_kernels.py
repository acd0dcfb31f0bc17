"""The compiled kernels, each code path of this processor: the quantiser bit for bit, the product against float64, and that a row's
bits do not depend on the other rows."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_specdec.mx import codec
from hf_specdec.mx.formats import DENSE, FORMATS, get_format
from hf_specdec.mx.kernels import cpu, weights
from hf_specdec.mx.kernels.instructions import PRODUCTS
from hf_specdec.mx.linear import MXLinear
from hf_specdec.mx.packed import PackedMatrix, quantize
from hf_specdec.mx.packing import pack

from ..helpers import torch_defaults, torch_threads
from .reference import FULL, NAMES, RULES, nasty, power, values_of

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no compiled kernels here")
PATHS = cpu.kernel_info()["available"]
WAYS = [(path, kind) for path in PATHS for kind in PRODUCTS.available(path) or [None]]
FORMATS_AND_DENSE = [*NAMES, *DENSE]
DTYPES = {torch.float32: None, torch.bfloat16: (7, -126), torch.float16: (10, -14)}  # mantissa bits, smallest normal exponent

each_format = pytest.mark.parametrize("name", FORMATS_AND_DENSE)


def on_paths(ways):
    return pytest.mark.parametrize("path", ways, indirect=True, ids=lambda way: "-".join(filter(None, way)))


each_path = on_paths(WAYS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def path(request):
    name, kind = request.param
    cpu.set_kernel_path(name)
    PRODUCTS.force(kind)
    yield name
    PRODUCTS.force(None)
    cpu.set_kernel_path(None)


@pytest.fixture(params=[1, 2])
def threads(request):
    with torch_threads(request.param):
        yield request.param


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_layer(name: str, n: int, k: int, bias: bool = False, seed: int = 0) -> MXLinear:
    """Weights as a network's, drawn anew for each shape."""
    layer = MXLinear(k, n, bias=bias, format=name)
    layer.set_packed(quantize(torch.randn(n, k, generator=generator(seed + n + k)) * k**-0.5, name))
    if bias:
        layer.bias.data = torch.randn(n, generator=generator(seed + 1))
    return layer.requires_grad_(False)


def weights_of(layer: MXLinear) -> torch.Tensor:
    """Float64, by the reference's table from the codes in the stored order."""
    packed = layer.packed()
    if layer.format.is_dense:
        return packed.codes.view(packed.format.dtype).double()
    bits = layer.format.bits
    stream = (packed.codes.unsqueeze(-1) >> torch.arange(8)) & 1  # from the lowest bit on
    codes = (stream.flatten(-2).unflatten(-1, (-1, bits)).long() << torch.arange(bits)).sum(-1)
    return values_of(layer.format.name, codes) * power(packed.scales.long() - 127).repeat_interleave(32, 1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    view = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.view(view), b.view(view))


def assert_near(layer: MXLinear, x: torch.Tensor) -> None:
    """Within a ten-millionth of the sum of the terms' sizes; below 512 inputs, where a few roundings do not even out (torch's own
    float32 product is no nearer there), four of them. And half a unit of a 16-bit output."""
    y = layer(x)
    assert y.shape == (*x.shape[:-1], layer.out_features) and y.dtype == x.dtype and y.is_contiguous()
    weight = weights_of(layer)
    exact, terms = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    if layer.bias is not None:
        exact, terms = exact + layer.bias.double(), terms + layer.bias.double().abs()
    allowed = (1e-7 if layer.in_features >= 512 else 4e-7) * terms
    if DTYPES[y.dtype]:
        mantissa, smallest = DTYPES[y.dtype]
        exponent = torch.frexp(exact.abs() + allowed).exponent - 1
        allowed = allowed + power(exponent.clamp(min=smallest) - mantissa - 1)
    worst = ((y.double() - exact).abs() / allowed.clamp(min=1e-300)).max().item() if y.numel() else 0.0
    assert worst <= 1, f"{worst:.2f} times the error allowed"


@pytest.mark.parametrize("name", NAMES)
def test_torchs_default_dtype_and_device_are_not_ours(name, monkeypatch):
    weight, x = torch.randn(48, 64, generator=generator(0)), torch.randn(3, 64, generator=generator(1))

    def results():
        cpu.values_of.cache_clear()
        monkeypatch.delitem(vars(FORMATS[name]), "values", raising=False)
        layer = MXLinear(64, 48, bias=False, format=name, device="cpu")
        layer.set_packed(quantize(weight, name))
        layer.requires_grad_(False)
        return layer(x), layer.dequantize(), layer.packed().codes

    wanted = results()
    with torch_defaults(torch.bfloat16, "meta"):
        found = results()
    assert all(torch.equal(*pair) for pair in zip(found, wanted))


# --- the quantiser ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", RULES)
@each_dtype
def test_the_quantiser_makes_the_codecs_bits(name, rule, dtype):
    fmt = FORMATS[name]
    for seed in range(20 if FULL else 1):
        weight = nasty(dtype, seed=seed)
        codes, scales = weights.quantize(weight, fmt, rule)
        wanted, wanted_scales = codec.encode(weight, fmt, rule)
        assert torch.equal(scales, wanted_scales)
        assert torch.equal(codes, pack(wanted, fmt.bits))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_quantiser_on_every_16_bit_number(name, dtype):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    weight = numbers[torch.randperm(len(numbers), generator=generator(0))][: len(numbers) // 32 * 32].view(-1, 32)
    for rule in RULES:
        for part in (weight, numbers[: len(numbers) // 32 * 32].view(-1, 32)):  # mixed, and ascending
            codes, scales = weights.quantize(part, FORMATS[name], rule)
            wanted, wanted_scales = codec.encode(part, FORMATS[name], rule)
            assert torch.equal(scales, wanted_scales) and torch.equal(codes, pack(wanted, FORMATS[name].bits))


@each_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_quantiser_names_the_first_row_that_is_not_finite(dtype, bad, threads):
    weight = torch.zeros(9, 64, dtype=dtype)
    weight[7, 3] = weight[5, 63] = bad
    with pytest.raises(ValueError, match="row 5 .*NaN"):
        weights.quantize(weight, FORMATS["mxfp6_e2m3"], "even")


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_the_quantiser_on_threads(rows, threads):
    weight = nasty(torch.float32)[:rows]
    codes, scales = weights.quantize(weight, FORMATS["mxfp6_e2m3"], "mse")
    wanted, wanted_scales = codec.encode(weight, FORMATS["mxfp6_e2m3"], "mse")
    assert torch.equal(scales, wanted_scales) and torch.equal(codes, pack(wanted, 6))


def test_the_quantiser_takes_weights_that_do_not_lie_together():
    weight = torch.randn(64, 96, generator=generator(0))
    for part in (weight.T, weight[::2], weight[:, 32:64]):
        codes, scales = weights.quantize(part, FORMATS["mxfp6_e2m3"], "even")
        again, again_scales = weights.quantize(part.clone(memory_format=torch.contiguous_format), FORMATS["mxfp6_e2m3"], "even")
        assert torch.equal(codes, again) and torch.equal(scales, again_scales)


# --- tiles --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 6, 8, 16, 32])
def test_tiles_keep_every_bit(bits, threads):
    codes = torch.randint(0, 256, (48, 96 * bits // 8), dtype=torch.uint8, generator=generator(0))
    scales = torch.randint(0, 256, (48, 0 if bits >= 16 else 3), dtype=torch.uint8, generator=generator(1))
    tiled = weights.tile(codes, scales, bits)
    assert tiled[0].shape == codes.shape and tiled[1].shape == scales.shape
    back = weights.tile(*tiled, bits, back=True)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scales)


# --- the product --------------------------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@each_format
@each_path
@each_dtype
def test_every_code_is_multiplied_as_what_it_means(name, path, dtype):
    """Rows of the identity pick out the weights one by one: no error at all, but for the output's dtype."""
    k = 64
    if name == "bf16":
        codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
        codes = codes[codes.isfinite() & ((codes == 0) | (codes.abs() >= 2.0**-126))]  # the dot product skips subnormals
        codes = codes[: len(codes) // k * k].view(-1, k)
        packed = PackedMatrix(codes.view(torch.uint8), torch.empty(len(codes), 0, dtype=torch.uint8), get_format(name))
    elif name == "fp32":
        codes = torch.randint(-(2**31), 2**31, (45, k), generator=generator(3)).int().view(torch.float32)  # any bits
        codes = torch.where(codes.abs() < 1e38, codes, 1.5)  # so that no output is an infinity times nothing
        codes = codes if dtype == torch.float32 else codes.clamp(-6e4, 6e4)
        packed = PackedMatrix(codes.view(torch.uint8), torch.empty(45, 0, dtype=torch.uint8), get_format(name))
    else:
        fmt = FORMATS[name]
        codes = torch.arange(2**fmt.bits)
        codes = codes[fmt.values.isfinite() & (codes != (0x80 if fmt.is_integer else -1))]
        n = 45
        codes = codes[torch.arange(n * k).view(n, k) * 7 % len(codes)].to(torch.uint8)
        scales = torch.arange(n * 2).view(n, 2) % 40 + 107
        packed = PackedMatrix(pack(codes, fmt.bits), scales.to(torch.uint8), fmt)
    layer = MXLinear(k, len(codes), bias=False, format=name)
    layer.set_packed(packed)
    weight = weights_of(layer)
    picked = torch.cat([layer(row) for row in torch.eye(k, dtype=dtype).split(8)])
    assert torch.equal(picked, weight.T.float().to(dtype))
    assert torch.equal(layer.dequantize(dtype), weight.float().to(dtype))


SHAPES = [(1, 32), (16, 32), (7, 96), (33, 96), (50, 96), (20, 4096)]
ROWS = [*range(1, 10), 12, 16, 17, 31, 32, 33, 40]


@pytest.mark.share(2)
@each_format
@each_path
@each_dtype
def test_the_product_is_that_of_float64(name, path, dtype):
    shapes = itertools.product(SHAPES, (False, True), ROWS)
    for (n, k), bias, rows in itertools.islice(shapes, 0, None, 1 if FULL else 13):
        x = torch.randn(rows, k, generator=generator(rows)).to(dtype)
        assert_near(random_layer(name, n, k, bias, seed=rows), x)


@each_path
@each_dtype
@pytest.mark.parametrize("shape", [(64,), (0, 64), (3, 0, 64), (2, 3, 64), (1, 2, 3, 64)])
def test_inputs_of_every_number_of_dimensions(path, dtype, shape):
    assert_near(random_layer("mxfp6_e2m3", 21, 64, bias=True), torch.randn(shape, generator=generator(0)).to(dtype))


@pytest.mark.share(2)
@each_format
@each_path
@each_dtype
def test_inputs_that_do_not_lie_together_or_not_on_a_word(name, path, dtype):
    layer = random_layer(name, 21, 64)
    wide = torch.randn(11, 200, generator=generator(0)).to(dtype)
    odd = torch.randn(5 * 64 + 1, generator=generator(0)).to(dtype)[1:].view(5, 64)
    for x in (wide[::2, 3:67], wide[:, 1:65], wide[:, ::3][:, :64], wide.T[:64].T, wide[:1, :64].expand(6, 64), odd, odd[:1]):
        assert same_bits(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))
        assert_near(layer, x)


@each_path
@each_dtype
@pytest.mark.parametrize("kind", list(DTYPES), ids=str)
def test_a_bias_of_any_dtype(path, dtype, kind):
    layer = random_layer("mxfp6_e2m3", 21, 64, bias=True)
    layer.bias = torch.nn.Parameter(layer.bias.to(kind), requires_grad=False)
    assert_near(layer, torch.randn(9, 64, generator=generator(0)).to(dtype))


@each_path
@each_dtype
def test_a_row_that_is_not_finite_spoils_no_other(path, dtype):
    layer = random_layer("mxfp6_e2m3", 40, 96)
    x = torch.randn(40, 96, generator=generator(0)).to(dtype)
    clean = layer(x)
    x[3, 50], x[17, 0], x[39, 95] = float("nan"), float("inf"), float("-inf")
    y = layer(x)
    bad = [3, 17, 39]
    assert not y[bad].isfinite().any()
    keep = [row for row in range(40) if row not in bad]
    assert same_bits(y[keep], clean[keep])


# --- a row's bits -------------------------------------------------------------------------------------------------------------


def assert_rows_are_alone(layer: MXLinear, dtype: torch.dtype) -> None:
    """Every number of rows from 1 to 40, and the rows at other places and next to others."""
    x = torch.randn(40, layer.in_features, generator=generator(9)).to(dtype)
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in range(1, 41):
        order = [(3 * rows + 7 * place) % 40 for place in range(rows)]
        assert same_bits(layer(x[:rows]), alone[:rows]), rows
        assert same_bits(layer(x[order]), alone[order]), rows


@pytest.mark.share(2)
@each_format
@each_path
@each_dtype
def test_a_row_has_the_same_bits_at_every_number_of_rows_and_place(name, path, dtype):
    """19 blocks, so that stretches of many of them end within; groups of 16 outputs in pairs, alone and unfilled."""
    assert_rows_are_alone(random_layer(name, 55, 608, bias=True), dtype)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", FORMATS_AND_DENSE if FULL else ["mxfp6_e2m3", *DENSE])
@each_path
@each_dtype
def test_the_same_at_a_networks_width(name, path, dtype):
    assert_rows_are_alone(random_layer(name, 33, 4096), dtype)


@each_path
@each_dtype
@pytest.mark.parametrize("n", [1, 16, 40, 200, 1000] if FULL else [40, 200])
@pytest.mark.parametrize("name", FORMATS_AND_DENSE if FULL else ["mxfp6_e2m3"])
def test_a_row_has_the_same_bits_on_every_number_of_threads(name, n, path, dtype):
    layer = random_layer(name, n, 96, bias=True)
    x = torch.randn(40, 96, generator=generator(9)).to(dtype)
    assert_near(layer, x)
    found = []
    for count in (1, 2, 3) if FULL else (1, 2):
        with torch_threads(count):
            found.append(torch.cat([layer(x[:rows]) for rows in (40, 1, 5)]))
    assert all(same_bits(found[0], other) for other in found[1:])
    assert same_bits(found[0][:1], found[0][40:41]) and same_bits(found[0][:5], found[0][41:])


@on_paths([way for way in WAYS if way[0] != "portable"])
@pytest.mark.parametrize("name", ["mxfp6_e2m3", "mxint8", *DENSE])
@each_dtype
def test_a_row_has_the_same_bits_among_many(name, path, dtype):
    layer = random_layer(name, 40, 160, bias=True)
    x = torch.randn(131, 160, generator=generator(9)).to(dtype)
    assert same_bits(torch.cat([layer(row) for row in x.split(1)]), layer(x))


@each_format
@pytest.mark.skipif("avx512f" not in PATHS, reason="where there is a choice of instructions")
@each_dtype
@pytest.mark.parametrize("rows", [1, 3, 4, 8, 9, 33])
def test_all_instructions_of_avx512_give_the_same_bits(name, dtype, rows):
    """Where dot products are the faster ones they may differ: other makers' processors need not sum in the order of Intel's."""
    layer, x = random_layer(name, 80, 160, bias=True), torch.randn(rows, 160, generator=generator(rows)).to(dtype)
    fused = [kind for kind in PRODUCTS.available("avx512_bf16" if "avx512_bf16" in PATHS else "avx512f") if kind.startswith("fused")]
    alike = PRODUCTS.kinds if PRODUCTS.current("avx512_bf16") in (*fused, None) else fused
    results = []
    for path in PATHS[PATHS.index("avx512f") :]:
        for kind in PRODUCTS.available(path):
            cpu.set_kernel_path(path)
            PRODUCTS.force(kind)
            try:
                assert cpu.kernel_info()["products"] == kind
                assert_near(layer, x)
                results += [layer(x)] if kind in alike else []
            finally:
                PRODUCTS.force(None)
                cpu.set_kernel_path(None)
    assert len(results) > 1 or len(fused) < 2
    assert all(same_bits(result, results[0]) for result in results)


@each_format
@pytest.mark.parametrize("path", [pytest.param(("amx", None), marks=pytest.mark.skipif("amx" not in PATHS, reason="this processor has no AMX"))], indirect=True)
def test_tiles_keep_the_bits_of_numbers_that_they_cannot_hold(name, path):
    """Which they take as zeros: in one row alone, among few and among many, whose weights are then multiplied by their scales beforehand."""
    layer, x = random_layer(name, 72, 96), torch.randn(131, 96, generator=generator(4)).bfloat16()
    if not layer.format.is_dense:
        layer = MXLinear(96, 72, bias=False, format=name)
        packed = quantize(torch.randn(72, 96, generator=generator(5)), name)
        packed.scales[::5], packed.scales[3::5] = 0, 250  # 2^-127 and 2^123
        layer.set_packed(packed)
        layer.requires_grad_(False)
    x[0] *= 2.0**-123
    x[1, 5], x[2, 7], x[40, 8], x[41, 9] = 2.0**-126, 2.0**-133, 2.0**120, torch.inf
    x[64:96] *= 2.0**-90
    one = torch.cat([layer(row) for row in x.split(1)])
    for rows in (2, 3, 17, 32, 64, 65, 131):
        found, wanted = layer(x[:rows]), one[:rows]
        assert torch.equal(found.isnan(), wanted.isnan()) and same_bits(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert 0 < one[0].abs().median() < 2.0**-80 and not one[41].isfinite().all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_rows_are_the_product_of_the_same_weights(path, dtype):
    torch.manual_seed(0)
    layer = MXLinear.from_linear(torch.nn.Linear(96, 1061))
    x = torch.randn(2, 40, 96).to(dtype)
    with torch.no_grad():
        exact = x.double() @ layer.packed().dequantize(torch.float64).T + layer.bias.double()
        cpu.set_kernel_path(path)
        try:
            y = layer(x)
        finally:
            cpu.set_kernel_path(None)
    assert y.shape == (2, 40, 1061) and y.dtype == dtype
    assert torch.allclose(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)
