"""`MXLinear` called: autograd, autocast, the compiler, weights that no kernel takes, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import hf_specdec
from hf_specdec.mx.formats import DENSE, get_format
from hf_specdec.mx.kernels import cpu
from hf_specdec.mx.linear import MXLinear
from hf_specdec.mx.packed import PackedMatrix, quantize

from ..helpers import OLD_TORCH
from .reference import FULL
from .test_linear import decoded, dense, each_dtype, each_format, layer_and_input


# --- autograd -----------------------------------------------------------------------------------------------------------------


@pytest.mark.share(1)
@each_format
@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 96), (96,), (0, 96)])
@pytest.mark.parametrize("n", [7, 53])
def test_gradients_are_those_of_the_dequantised_linear(name, shape, n, kernels):
    layer, _ = layer_and_input(name, n)
    layer.bias.requires_grad_(True)
    linear = layer.to_linear(torch.float32)
    linear.bias = nn.Parameter(layer.bias.detach().clone())
    x, x_too = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    y, y_too = layer(x), linear(x_too)
    torch.testing.assert_close(y, y_too)
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(up)
    y_too.backward(up)
    torch.testing.assert_close(x.grad, x_too.grad)
    torch.testing.assert_close(layer.bias.grad, linear.bias.grad)
    assert layer.weight.grad is None and not layer.weight.requires_grad


@each_dtype
def test_the_result_with_gradients_has_the_bits_of_the_one_without(dtype, kernels):
    layer, x = layer_and_input(n=53)
    x = x.to(dtype)
    wanted = layer(x)
    assert torch.equal(layer(x.clone().requires_grad_()), wanted)
    layer.bias.requires_grad_(True)
    assert torch.equal(layer(x), wanted) and layer(x).requires_grad
    with torch.no_grad():
        assert torch.equal(layer(x), wanted) and not layer(x).requires_grad


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_16_bit_gradients(kind, kernels):
    layer, x = layer_and_input()
    layer.bias = nn.Parameter(layer.bias.to(kind))
    x = x.bfloat16().requires_grad_()
    layer(x).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and layer.bias.grad.dtype == kind
    torch.testing.assert_close(x.grad, layer.dequantize(torch.bfloat16).sum(0).expand(5, 96), atol=2e-2, rtol=2e-2)
    assert layer.bias.grad.eq(5).all()


# --- autocast and the compiler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, kernels):
    layer, x = layer_and_input()
    with torch.autocast("cpu", dtype):
        y = layer(x)
        assert layer(x.requires_grad_()).dtype == dtype
    assert y.dtype == dtype and torch.equal(y, layer(x.detach().to(dtype)))
    with torch.autocast("cpu", dtype, enabled=False):
        assert layer(x).dtype == torch.float32


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda layer: torch.compile(layer, fullgraph=True, backend="inductor" if FULL else "aot_eager")
    torch._dynamo.reset()


@pytest.mark.share(1)
@pytest.mark.parametrize("amx", [False, True])
def test_the_compiler_is_not_shown_how_a_processor_is_asked_for_amx(compiled, amx, monkeypatch):
    """It cannot trace that function; whether there is AMX is known since the path was chosen."""
    layer, _ = layer_and_input()
    x = torch.randn(100, layer.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = layer(x)
    monkeypatch.setattr(cpu, "has_amx", None)
    monkeypatch.setitem(cpu._state, "amx", amx)
    with torch.no_grad():
        for rows in (1, 64, 100):
            assert torch.allclose(compiled(layer)(x[:rows]), wanted[:rows], rtol=2**-7, atol=1e-2)


@pytest.mark.share(1 / 6)
@pytest.mark.parametrize("name", ["mxfp6_e2m3", "mxint8", *DENSE])
@each_dtype
def test_the_compiler_gives_the_same_bits(name, dtype, kernels, compiled):
    layer, x = layer_and_input(name, 53)
    fast = compiled(layer.prepare())
    for rows in (1, 5):
        assert torch.equal(fast(x[:rows].to(dtype)), layer(x[:rows].to(dtype)))


def test_the_compiler_with_a_layer_that_was_not_prepared(compiled):
    layer, x = layer_and_input(n=53)
    layer.to_stored()
    y = compiled(layer)(x)
    torch.testing.assert_close(y, layer(x))


def test_the_compiler_with_gradients(kernels, compiled):
    layer, x = layer_and_input(n=53)
    x.requires_grad_()
    compiled(layer)(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantize().sum(0).expand(5, 96))


def test_the_compiler_under_autocast(kernels, compiled):
    layer, x = layer_and_input()
    fast = compiled(layer)
    with torch.autocast("cpu", torch.bfloat16):
        y = fast(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, layer(x.bfloat16()))


@pytest.mark.filterwarnings("ignore")
def test_traces_have_the_product_in_them(kernels):
    layer, x = layer_and_input(n=53)
    other = torch.randn(5, 96)
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(layer, x, check_trace=False)(other), layer(other))
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            assert layer(fake.from_tensor(x)).shape == (5, 53)


EXPORTED = """
import sys, torch, hf_specdec.mx
x, y = torch.load(sys.argv[2])
print(torch.equal(torch.export.load(sys.argv[1]).module()(x), y))
"""


@pytest.mark.skipif(OLD_TORCH, reason="this torch does not trace the layer")
def test_an_exported_layer_runs_in_another_process(tmp_path):
    layer, x = layer_and_input(n=53)
    with torch.no_grad():
        torch.export.save(torch.export.export(layer, (torch.randn(5, 96),)), tmp_path / "layer.pt2")
        torch.save((x, layer(x)), tmp_path / "x.pt")
    root = str(Path(hf_specdec.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run([sys.executable, "-c", EXPORTED, str(tmp_path / "layer.pt2"), str(tmp_path / "x.pt")], env=environment,
                          capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1:] == ["True"], done.stderr


def test_the_operators_say_the_truth_about_themselves(kernels):
    layer, x = layer_and_input(n=53)
    tail = layer._tail or (None, None)
    arguments = (layer.weight, layer.weight_scale, *tail)
    opcheck = torch.library.opcheck
    opcheck(torch.ops.hf_specdec.mx_linear, (x.requires_grad_(), *arguments, layer.bias, "mxfp6_e2m3", 53, layer.layout))
    opcheck(torch.ops.hf_specdec.mx_input_gradient, (torch.randn(5, 53), *arguments, "mxfp6_e2m3", 96, layer.layout))


# --- weights that no kernel takes ---------------------------------------------------------------------------------------------

SPOILS = {  # format: what is put into row 2 (a code's byte, or None for the scale) and what row 2 is worth then
    "mxfp6_e2m3": [None],
    "mxfp4_e2m1": [None],
    "mxfp8_e4m3": [None, 0x7F, 0xFF],
    "mxfp8_e5m2": [None, 0x7C, 0xFC, 0x7D, 0xFF],
    "mxint8": [None, 0x80],
}


@pytest.mark.parametrize("name, code", [(name, code) for name, codes in SPOILS.items() for code in codes])
def test_codes_that_no_kernel_knows_are_multiplied_by_torch(name, code, kernels):
    layer, x = layer_and_input(name)
    clean, state = layer(x), layer.state_dict()
    if code is None:
        state["weight_scale"][2, 1] = 0xFF
    else:
        state["weight"][2, 40] = code
    for target in (layer, MXLinear(96, 40, format=name)):
        target.load_state_dict(state)
        target.requires_grad_(False)
        weight = decoded(PackedMatrix(state["weight"], state["weight_scale"], layer.format))
        assert torch.equal(target.packed().codes, state["weight"]) and torch.equal(target.packed().scales, state["weight_scale"])
        assert torch.equal(target.dequantize().nan_to_num(7), weight.nan_to_num(7))
        for kind in (torch.float32, torch.bfloat16):
            y, wanted = target(x.to(kind)), F.linear(x.to(kind), weight.to(kind), layer.bias.to(kind))
            assert torch.equal(y.isnan(), wanted.isnan())
            torch.testing.assert_close(y, wanted, equal_nan=True)
        others = [row for row in range(40) if row != 2]
        torch.testing.assert_close(target(x)[:, others], clean[:, others])
    layer.load_state_dict(layer_and_input(name)[0].state_dict())
    assert torch.equal(layer(x), clean)


# --- refusals -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x, kind, words", [
    (torch.zeros(2, 96, dtype=torch.float64), TypeError, ["float64", "float32", "bfloat16", "float16"]),
    (torch.zeros(2, 96, dtype=torch.int64), TypeError, ["int64", "float32"]),
    (torch.zeros(2, 64), ValueError, ["64", "96"]),
    (torch.zeros(96, 2), ValueError, ["2", "96"]),
    (torch.tensor(1.0), ValueError, ["no features", "96"]),
    (torch.zeros(2, 96, device="meta"), ValueError, ["meta", "cpu"]),
])  # fmt: skip
def test_inputs_that_are_refused(x, kind, words, kernels):
    layer, _ = layer_and_input()
    with pytest.raises(kind) as caught:
        layer(x)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("k", [1, 31, 33, 100])
def test_inputs_that_make_no_whole_blocks_are_refused(k):
    with pytest.raises(ValueError, match=f"{k}.*32"):
        MXLinear(k, 16)
    with pytest.raises(ValueError, match=f"{k}.*32"):
        MXLinear.from_linear(nn.Linear(k, 16))


def test_what_is_no_linear_layer_is_refused():
    with pytest.raises(TypeError, match="linear: expected an nn.Linear, got str"):
        MXLinear.from_linear("x")


def test_unknown_formats_and_rules_are_refused():
    for make in (lambda name: MXLinear(32, 16, format=name), lambda name: MXLinear.from_linear(dense(), name),
                 lambda name: quantize(torch.zeros(2, 32), name)):  # fmt: skip
        with pytest.raises(ValueError, match="'fp6'.*mxfp6_e2m3"):
            make("fp6")
    with pytest.raises(ValueError, match="'nearest'.*floor"):
        MXLinear.from_linear(dense(), scale_rule="nearest")


@each_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(name, bad, kernels):
    linear = dense()
    with torch.no_grad():
        linear.weight[7, 3] = linear.weight[5, 2] = bad
    if name in DENSE:  # which keep them
        assert torch.equal(MXLinear.from_linear(linear, name).dequantize().isfinite(), linear.weight.isfinite())
        return
    with pytest.raises(ValueError, match="row 5 .*NaN"):
        MXLinear.from_linear(linear, name)


@pytest.mark.parametrize("weight, kind", [
    (torch.zeros(64), TypeError),
    (torch.zeros(2, 2, 32), TypeError),
    (torch.zeros(2, 32, dtype=torch.int32), TypeError),
    (torch.zeros(0, 32), ValueError),
    (torch.zeros(2, 0), ValueError),
])  # fmt: skip
def test_what_is_no_matrix_of_numbers_is_refused(weight, kind):
    with pytest.raises(kind, match="weight" if weight.numel() else "there is no number in it"):
        quantize(weight)


def test_a_matrix_of_another_shape_or_format_is_refused(kernels):
    layer, x = layer_and_input()
    y, right = layer(x), quantize(dense(seed=1).weight)
    wrong = [
        quantize(dense().weight, "mxfp4_e2m1"),
        quantize(dense(n=41).weight),
        quantize(dense(k=128).weight),
        PackedMatrix(right.codes[:, :-3], right.scales, right.format),
        PackedMatrix(right.codes, right.scales[:, :-1], right.format),
        PackedMatrix(right.codes, right.scales[:-1], right.format),
        PackedMatrix(right.codes.float(), right.scales, right.format),
        PackedMatrix(right.codes, right.scales.short(), right.format),
    ]
    for packed in wrong:
        with pytest.raises(ValueError, match="mxfp6_e2m3.*40, 96"):
            layer.set_packed(packed)
    assert torch.equal(layer(x), y)
    with pytest.raises(ValueError, match="bf16"):  # half a number too many
        codes, scales = torch.zeros(40, 193, dtype=torch.uint8), torch.zeros(40, 0, dtype=torch.uint8)
        MXLinear(96, 40, format="bf16").set_packed(PackedMatrix(codes, scales, get_format("bf16")))


def test_a_matrix_that_does_not_lie_together_is_taken(kernels):
    layer, x = layer_and_input(n=53, bias=False)
    packed = layer.packed()
    codes, scales = (part.T.contiguous().T for part in (packed.codes, packed.scales))
    other = MXLinear(96, 53, bias=False)
    other.set_packed(PackedMatrix(codes, scales, packed.format))
    assert torch.equal(other(x), layer(x)) and torch.equal(other.packed().codes, packed.codes)


@pytest.mark.skipif(cpu.library() is None, reason="no compiled kernels here")
def test_an_unknown_kernel_path_is_refused():
    with pytest.raises(ValueError, match="'sse'.*portable.*avx2"):
        cpu.set_kernel_path("sse")
    assert layer_and_input()[0](torch.zeros(1, 96)).isfinite().all()
