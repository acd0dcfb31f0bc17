"""`activations="mxint8"`: x is rounded to MXINT8 before the product, on every path, in every way in which a layer is used."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec import enable, mx
from hf_specdec.mx.codec import round_to_integers
from hf_specdec.mx.formats import FORMATS
from hf_specdec.mx.kernels import cpu
from hf_specdec.mx.kernels.instructions import INTEGERS
from hf_specdec.mx.linear import MXLinear
from hf_specdec.mx.packed import quantize

from ..helpers import torch_threads
from .models import IDS, logits, mx_layers, same, tiny
from .reference import magnitudes, nasty, nearest, power, quantise, values_of

FITTING = ("mxfp6_e2m3", "mxfp4_e2m1", "mxint8")
PATHS = cpu.kernel_info()["available"]
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 31, 33, 70)
each_format = pytest.mark.parametrize("name", FITTING)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


WAYS = [(path, kind) for path in PATHS for kind in INTEGERS.available(path) or [None]]  # the avx2 kernel is that of several paths
WAYS = [(path, kind) for at, (path, kind) in enumerate(WAYS) if kind is None or kind not in [other for _, other in WAYS[:at]]]


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(filter(None, way)))
def path(request):
    path, kind = request.param
    cpu.set_kernel_path(path)
    if kind is not None:
        INTEGERS.force(kind)
    yield path
    cpu.set_kernel_path(None)
    if kind is not None:
        INTEGERS.force(None)


def layer_of(name: str, n: int = 40, k: int = 160, bias: bool = False, activations: str | None = "mxint8", seed: int = 0) -> MXLinear:
    generator = torch.Generator().manual_seed(seed)
    layer = MXLinear(k, n, bias=bias, format=name, activations=activations)
    layer.set_packed(quantize(torch.randn(n, k, generator=generator) * k**-0.5, name))
    if bias:
        layer.bias.data = torch.randn(n, generator=generator)
    return layer.requires_grad_(False)


def inputs(rows: int, k: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Blocks of sizes that differ a thousandfold, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k // 32, 32, generator=generator) * 2.0 ** torch.randint(-5, 6, (rows, k // 32, 1), generator=generator)
    x[rows // 2] *= rows > 2
    return x.flatten(1).to(dtype)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Float64, by the words of the specification (tests/mx/reference.py)."""
    codes, scales = quantise("mxint8", x.double(), "even")
    return values_of("mxint8", codes) * power(scales - 127).repeat_interleave(32, 1)


# --- the definition -----------------------------------------------------------------------------------------------------------


def test_formats_of_small_integers():
    assert [name for name, fmt in FORMATS.items() if fmt.fits_int8] == ["mxfp6_e2m3", "mxfp4_e2m1", "mxint8"]
    for name in FITTING:
        whole = magnitudes(name) / magnitudes(name)[1]
        assert torch.equal(whole, whole.round()) and whole.max() <= 127


@each_dtype
def test_rounding_is_mxint8_with_the_rule_even(dtype):
    x = inputs(24, 96, dtype)
    assert torch.equal(round_to_integers(x).double(), rounded(x))
    assert round_to_integers(x).dtype == dtype
    assert torch.equal(round_to_integers(x.view(4, 6, 96)).view(24, 96), round_to_integers(x))


@pytest.mark.share(2)
@each_format
@each_dtype
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_that_of_rounded_inputs(name, dtype, bias, path):
    """Within 1e-7 of the terms' sizes from float64, and half a unit of a 16-bit result."""
    layer = layer_of(name, bias=bias)
    weight, unit = layer.dequantize(torch.float32).double(), {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for rows in ROWS:
        x = inputs(rows, 160, dtype, seed=rows)
        y, exact = layer(x), rounded(x) @ weight.T
        terms = rounded(x).abs() @ weight.abs().T
        if bias:
            exact, terms = exact + layer.bias.double(), terms + layer.bias.double().abs()
        assert y.dtype == dtype and y.shape == (rows, 40)
        assert bool(((y.double() - exact).abs() <= 1e-7 * terms + unit * exact.abs() + 2.0**-25 * bool(unit)).all())


@each_format
def test_without_rounding_the_result_is_another(name):
    """The control: the tests above would see it if x were not rounded."""
    x, weight = inputs(8, 160, torch.float32), layer_of(name).dequantize().double()
    error = (layer_of(name, activations=None)(x).double() - rounded(x) @ weight.T).abs()
    assert bool((error > 1e-5 * (rounded(x).abs() @ weight.abs().T)).any())


@each_format
def test_every_kind_of_number(name, path):
    x = nasty(torch.bfloat16, rows=64, blocks=4)
    x = torch.where(x.abs() > 1e20, torch.zeros_like(x), x)  # else sums leave the range of float32
    tiny_blocks = x.view(64, 4, 32).abs().amax(-1, keepdim=True) < 2.0**-100  # products of two such scales do, at the other end
    x = torch.where(tiny_blocks.expand(-1, -1, 32).flatten(1), torch.zeros_like(x), x)
    layer = layer_of(name, n=16, k=128)
    y, weight = layer(x.float()), layer.dequantize().double()
    terms = rounded(x).abs() @ weight.abs().T
    assert bool(((y.double() - rounded(x) @ weight.T).abs() <= 4e-7 * terms).all())


@each_format
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("weight_sign, x_sign", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_the_largest_products_of_one_sign_do_not_overflow(name, rows, weight_sign, x_sign, path):
    """All weights the largest of their format (in 8 bits also -128), all inputs +-127 of their scale."""
    layer, packed = MXLinear(96, 16, bias=False, format=name, activations="mxint8"), quantize(torch.ones(16, 96), name)
    code = {"mxfp6_e2m3": 0x1F, "mxfp4_e2m1": 0x7, "mxint8": 0x7F}[name]
    bits = FORMATS[name].bits
    code = code | 1 << (bits - 1) if weight_sign < 0 and bits < 8 else 0x80 if weight_sign < 0 else code
    word = sum(code << (bits * i) for i in range(4)).to_bytes(bits // 2, "little")  # four codes, least significant bit first
    packed.codes.copy_(torch.tensor(list(word), dtype=torch.uint8).repeat(packed.codes.numel() // len(word)).view_as(packed.codes))
    layer.set_packed(packed)
    x = torch.full((rows, 96), x_sign * 127 / 64)
    assert torch.equal(layer(x).double(), x.double() @ layer.dequantize().double().T)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@each_dtype
def test_a_row_that_is_not_finite_gives_nan_and_the_others_their_own(bad, dtype, path):
    layer, x = layer_of("mxfp6_e2m3"), inputs(5, 160, dtype)
    clean = layer(x)
    x[3, 77] = bad
    y = layer(x)
    assert bool(y[3].isnan().all()) and torch.equal(y[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])


# --- rows ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.share(1)
@each_format
@each_dtype
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_whatever_is_with_it(name, dtype, threads, path):
    layer, x = layer_of(name, n=72, k=256), inputs(64 if path == "portable" else 70, 256, dtype)
    with torch_threads(threads):
        alone = torch.cat([layer(row[None]) for row in x])
        for rows in (2, 3, 4, 5, 7, 8, 9, 17, 33, len(x)):
            for first in (0, len(x) - rows):
                assert torch.equal(layer(x[first : first + rows]), alone[first : first + rows])


@each_format
def test_all_instructions_give_the_same_bits(name):
    """Sums within a block are exact: on every path that multiplies bytes the same float32 results; by float32 products nearly the same."""
    layer, found = layer_of(name, n=64, k=512), {}
    for path, kind in WAYS:
        cpu.set_kernel_path(path)
        if kind is not None:
            INTEGERS.force(kind)
            assert cpu.kernel_info()["integer_products"] == kind
        found[kind] = torch.cat([layer(inputs(rows, 512, torch.float32, seed=rows)) for rows in (1, 2, 3, 6, 8, 13)])
    if cpu.library() is not None:
        INTEGERS.force(None)
    cpu.set_kernel_path(None)
    one = next((kind for kind in found if kind is not None), None)
    assert all(torch.equal(other, found[one]) if kind is not None else torch.allclose(other, found[one], rtol=1e-5, atol=1e-5) for kind, other in found.items())


@pytest.mark.skipif(cpu.library() is None, reason="no compiled kernels here")
def test_a_path_takes_the_widest_instructions_that_it_may_use():
    for path in PATHS:
        cpu.set_kernel_path(path)
        assert cpu.kernel_info()["integer_products"] == (INTEGERS.available(path) or [None])[-1]
    cpu.set_kernel_path(None)
    assert not INTEGERS.available("portable")


@pytest.mark.skipif(cpu.library() is None, reason="no compiled kernels here")
def test_layers_of_different_kinds_in_one_call():
    """What compiled passes do with the products of one input: rounded for some layers, of other widths, and not for others."""
    layers = [layer_of("mxfp6_e2m3"), layer_of("mxint8", n=24), layer_of("mxfp6_e2m3", n=56, activations=None), layer_of("mxfp6_e2m3", n=17)]
    for rows in (1, 8, 40):
        x = inputs(rows, 160, torch.bfloat16)
        kernels = [layer._cpu_kernel() for layer in layers]
        outs = cpu.multiply_several([kernel.address for kernel in kernels], x, [layer.out_features for layer in layers])
        assert all(torch.equal(out, layer(x)) for out, layer in zip(outs, layers))


# --- layers without kernels, compiled, trained, copied --------------------------------------------------------------------------


@each_format
@each_dtype
def test_without_kernels(name, dtype, monkeypatch):
    x, wanted = inputs(5, 160, dtype), layer_of(name)(inputs(5, 160, dtype))
    monkeypatch.setattr(cpu, "library", lambda: None)
    fresh = layer_of(name)
    assert torch.allclose(fresh(x).float(), wanted.float(), rtol=2e-2, atol=2e-2)
    weight = fresh.dequantize().double()
    terms, unit = rounded(x).abs() @ weight.abs().T, {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert bool(((fresh(x).double() - rounded(x) @ weight.T).abs() <= unit * terms).all())


def test_gradients_pass_through_the_rounding():
    layer, x = layer_of("mxfp6_e2m3"), inputs(3, 160, torch.float32).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y.detach(), layer(x.detach()))
    assert torch.allclose(x.grad, layer.dequantize().sum(0).expand(3, -1), atol=1e-5)


def test_compiled_by_torch():
    layer, x = layer_of("mxfp6_e2m3"), inputs(3, 160, torch.float32)
    with torch.no_grad():
        layer(x)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["deepcopy", "pickle"])
def test_copies_round_too(copied):
    layer, x = layer_of("mxint8"), inputs(3, 160, torch.float32)
    assert copied(layer).activations == "mxint8" and torch.equal(copied(layer)(x), layer(x))


def test_it_can_be_set_and_taken_back():
    layer, x = layer_of("mxfp6_e2m3", activations=None), inputs(4, 160, torch.float32)
    exact = layer(x)
    layer.activations = "mxint8"
    assert torch.equal(layer(x), layer_of("mxfp6_e2m3")(x)) and "activations=mxint8" in repr(layer)
    layer.activations = None
    assert torch.equal(layer(x), exact) and "activations" not in repr(layer)


# --- models -------------------------------------------------------------------------------------------------------------------


@each_format
def test_compress_sets_it_on_every_layer_and_it_is_saved(name, tmp_path):
    model = mx.compress(tiny(), name, activations="mxint8", lm_head="mxint8")
    assert {layer.activations for layer in mx_layers(model).values()} == {"mxint8"}
    assert not torch.equal(logits(model), logits(mx.compress(tiny(), name, lm_head="mxint8")))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {layer.activations for layer in mx_layers(loaded).values()} == {"mxint8"} and same(model, loaded)
    assert all(type(layer) is torch.nn.Linear for layer in mx.dequantize(loaded).modules() if isinstance(layer, torch.nn.Linear))


def test_on_the_fly(tmp_path):
    tiny().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=mx.MXConfig(activations="mxint8"))
    assert same(loaded, mx.compress(tiny(), activations="mxint8"))


def test_a_head_that_does_not_go_with_it_stays_as_it_is():
    model = mx.compress(tiny(dtype=torch.bfloat16), activations="mxint8", lm_head="bf16")
    assert model.lm_head.activations is None and model.model.layers[0].mlp.up_proj.activations == "mxint8"


def test_checkpoints_without_it_are_written_as_before():
    assert "activations" not in mx.MXConfig().to_dict()
    assert mx.MXConfig(activations="mxint8").to_dict()["activations"] == "mxint8"


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "qwen2"])
def test_speculative_text_is_plain_text_of_the_same_model(kind):
    model = enable(mx.compress(tiny(kind), activations="mxint8"))
    plain = model.generate(input_ids=IDS, max_new_tokens=40, do_sample=False)
    assert torch.equal(model.generate(input_ids=IDS, max_new_tokens=40, do_sample=False, speculative=True, num_assistant_tokens=5), plain)


# --- bad input ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["int8", "mxfp8_e4m3", 8, True])
@pytest.mark.parametrize("call", [lambda a: mx.MXConfig(activations=a), lambda a: mx.compress(tiny(), activations=a),
                                  lambda a: MXLinear(32, 16, activations=a)], ids=["config", "compress", "layer"])  # fmt: skip
def test_other_names_are_refused(activations, call):
    with pytest.raises(ValueError, match="activations=.*must be None .*'mxint8'"):
        call(activations)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "bf16", "fp32"])
def test_formats_that_are_no_small_integers_are_refused_before_anything_is_changed(name):
    model = tiny()
    with pytest.raises(ValueError, match=f"activations='mxint8'.*{name}.*mxfp6_e2m3, mxfp4_e2m1, mxint8"):
        mx.compress(model, name, activations="mxint8")
    assert not mx_layers(model)
    with pytest.raises(ValueError, match="activations"):
        mx.MXConfig(name, activations="mxint8")


def test_the_nearest_integer_is_taken():
    """127.5 sixty-fourths is beyond the largest code and ties go to even ones: the reference says what each becomes."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([1.0, 0.5 / 64, 1.5 / 64, -2.5 / 64])
    assert round_to_integers(x)[0, :4].tolist() == [1.0, 0.0, 2 / 64, -2 / 64]
    assert nearest("mxint8", torch.tensor([127.5 / 64], dtype=torch.float64)).item() == 127
