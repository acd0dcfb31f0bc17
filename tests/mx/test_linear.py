"""`MXLinear` as a module: saving and loading, copies, moves, autograd, autocast, the compiler, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from hf_specdec.mx import codec
from hf_specdec.mx.formats import DENSE
from hf_specdec.mx.kernels import cpu
from hf_specdec.mx.linear import MXLinear
from hf_specdec.mx.packed import PackedMatrix, quantize
from hf_specdec.mx.packing import unpack

from .reference import NAMES

ALL = [*NAMES, *DENSE]
each_format = pytest.mark.parametrize("name", ALL)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def dense(n: int = 40, k: int = 96, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(k, n, bias=bias)


def layer_and_input(name: str = "mxfp6_e2m3", n: int = 40, k: int = 96, bias: bool = True, seed: int = 0):
    linear = dense(n, k, bias, seed)
    return MXLinear.from_linear(linear, name).requires_grad_(False), torch.randn(5, k)


def decoded(packed: PackedMatrix) -> torch.Tensor:
    """By the codec, from the stored order."""
    if packed.format.is_dense:
        return packed.codes.view(packed.format.dtype).float()
    return codec.decode(unpack(packed.codes, packed.format.bits), packed.scales, packed.format)


# --- the weights --------------------------------------------------------------------------------------------------------------


@each_format
@each_dtype
def test_the_layer_it_is_made_of_stays_as_it_is(name, dtype, kernels):
    linear = dense().to(dtype)
    before = linear.weight.detach().clone()
    MXLinear.from_linear(linear, name).prepare()
    assert torch.equal(linear.weight, before)


@each_format
@pytest.mark.parametrize("n", [1, 16, 40])
def test_the_state_is_in_the_stored_order_whatever_the_layout(name, n, kernels):
    linear = dense(n)
    packed = quantize(linear.weight, name)
    wanted = PackedMatrix(packed.codes.clone(), packed.scales.clone(), packed.format)
    layer = MXLinear.from_packed(packed, linear)
    for _ in range(2):
        layer.prepare()
        layer(torch.zeros(1, 96))
        state = layer.state_dict()
        assert set(state) == {"weight", "weight_scale", "bias"}
        assert torch.equal(state["weight"], wanted.codes) and torch.equal(state["weight_scale"], wanted.scales)
        assert torch.equal(layer.packed().codes, wanted.codes) and torch.equal(layer.packed().scales, wanted.scales)
        assert state["bias"].data_ptr() == linear.bias.data_ptr()
        layer.to_stored()
        assert torch.equal(layer.weight, wanted.codes) and torch.equal(layer.weight_scale, wanted.scales)


@each_format
@each_dtype
def test_dequantize_is_the_codecs(name, dtype, kernels):
    layer, _ = layer_and_input(name)
    weight = layer.dequantize(dtype)
    assert weight.dtype == dtype and weight.shape == (40, 96)
    assert torch.equal(weight, decoded(layer.packed()).to(dtype))
    assert torch.equal(layer.dequantize(torch.float64), decoded(layer.packed()).double())


@each_format
def test_to_linear(name, kernels):
    layer, x = layer_and_input(name)
    linear = layer.eval().to_linear(torch.bfloat16)
    assert type(linear) is nn.Linear and not linear.training and linear.weight.dtype == torch.bfloat16
    assert torch.equal(linear.weight, layer.dequantize(torch.bfloat16)) and linear.bias is layer.bias
    torch.testing.assert_close(layer(x), layer.to_linear(torch.float32)(x))


def test_prepare_changes_nothing_the_second_time(kernels):
    layer, x = layer_and_input()
    y, place, layout, memory = layer(x), layer.weight.data_ptr(), layer.layout, layer.weight.clone()
    assert layer.prepare() is layer and layer.prepare() is layer
    assert (layer.weight.data_ptr(), layer.layout) == (place, layout)
    assert torch.equal(layer.weight, memory) and torch.equal(layer(x), y)


def test_a_changed_bias_is_used(kernels):
    layer, x = layer_and_input()
    for dtype in (torch.float32, torch.bfloat16):
        layer.bias = nn.Parameter(torch.zeros(40, dtype=dtype), requires_grad=False)
        before = layer(x)
        with torch.no_grad():
            layer.bias.add_(1)
        torch.testing.assert_close(layer(x), before + 1)
    layer.bias = None
    torch.testing.assert_close(layer(x), before)


# --- copies, files, moves -----------------------------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("n", [7, 48, 53])
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(name, n, assign, kernels):
    source, x = layer_and_input(name, n)
    state = source.state_dict()
    kept = {key: value.clone() for key, value in state.items()}
    first, second = MXLinear(96, n, format=name), layer_and_input(name, n, seed=1)[0]
    for target in (first, second):
        target.load_state_dict(state, assign=assign)
        assert torch.equal(target(x), source(x))
    assert all(torch.equal(state[key], kept[key]) for key in kept)  # not even where `assign` took the tensors over
    assert torch.equal(first(x), source(x))


def test_loading_into_a_layer_without_memory(kernels):
    source, x = layer_and_input(n=21)
    layer = MXLinear(96, 21, device="meta")
    layer.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(layer(x), source(x))
    layer = MXLinear(96, 21, device="meta").to_empty(device="cpu")
    layer.load_state_dict(source.state_dict())
    assert torch.equal(layer(x), source(x))


def test_loading_the_wrong_shape_is_refused_and_leaves_the_layer_as_it_was(kernels):
    layer, x = layer_and_input()
    y = layer(x)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer.load_state_dict(layer_and_input(n=41)[0].state_dict())
    assert torch.equal(layer(x), y)


@pytest.mark.parametrize("strict", [False, True])
def test_loading_numbers_is_refused_and_leaves_the_layer_as_it_was(strict, kernels):
    layer, x = layer_and_input("mxint8")
    y = layer(x)
    with pytest.raises(RuntimeError, match=r"weight is torch.float32, the layer's is torch.uint8"):
        layer.load_state_dict(dense(seed=1).state_dict(), strict=strict)
    assert torch.equal(layer(x), y)


def through_pickle(layer):
    return pickle.loads(pickle.dumps(layer))


def through_a_file(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@each_format
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_a_file])
@pytest.mark.parametrize("n", [7, 53])
def test_copies(name, copied, n, kernels):
    layer, x = layer_and_input(name, n)
    y = layer(x)
    other = copied(layer)
    assert torch.equal(other(x), y) and torch.equal(other.packed().codes, layer.packed().codes)
    assert other.weight.data_ptr() != layer.weight.data_ptr()
    with torch.no_grad():
        other.bias.add_(1)
        other.to_stored()
        other.weight.zero_()
        other.weight_scale.zero_()
    assert torch.equal(layer(x), y)
    torch.testing.assert_close(other.prepare()(x), other.bias.expand(5, n))


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_what_a_copy_hands_out_stays_in_the_stored_order_when_it_is_used(copied, kernels):
    layer, x = layer_and_input(n=53)
    other = copied(layer)
    state, packed = other.state_dict(), other.packed()
    other(x)
    assert torch.equal(state["weight"], layer.packed().codes) and torch.equal(state["weight_scale"], layer.packed().scales)
    assert torch.equal(packed.codes, layer.packed().codes)


def test_threads_that_share_a_copy_get_the_same_bits():
    layer, x = layer_and_input(n=512, k=1024)
    x, y = torch.randn(1, 1024), []
    with torch.no_grad():
        expected = layer(x)
        for _ in range(8):
            fresh, together = copy.deepcopy(layer), threading.Barrier(4)
            fresh.to_stored()

            def call():
                together.wait()
                with torch.no_grad():
                    y.append(fresh(x))

            threads = [threading.Thread(target=call) for _ in range(4)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            y.append(fresh(x))
    assert len(y) == 40 and all(torch.equal(result, expected) for result in y)


@pytest.mark.parametrize("n", [7, 53])
def test_a_pickle_is_read_where_there_are_no_kernels(n, monkeypatch):
    layer, x = layer_and_input(n=n)
    data, y = pickle.dumps(layer), layer(x)
    monkeypatch.setattr(cpu, "library", lambda: None)
    torch.testing.assert_close(pickle.loads(data)(x), y)


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.float(), lambda m: m.half(), lambda m: m.to("cpu"),
                                  lambda m: m.cpu(), lambda m: m.double().float(), lambda m: m.share_memory()])  # fmt: skip
def test_moves_keep_the_weights(move, kernels):
    layer, x = layer_and_input(n=53, bias=False)
    y, packed = layer(x), layer.packed()
    assert move(layer) is layer
    assert layer.weight.dtype == layer.weight_scale.dtype == torch.uint8
    assert torch.equal(layer(x), y) and torch.equal(layer.packed().codes, packed.codes)


def test_a_bias_moves_along(kernels):
    layer, x = layer_and_input()
    y = layer(x)
    assert layer.to(torch.bfloat16).bias.dtype == torch.bfloat16
    torch.testing.assert_close(layer(x), y, atol=1e-3, rtol=0)


def test_weights_made_in_inference_mode_are_used_and_saved_outside_of_it(kernels):
    with torch.inference_mode():
        layer, x = layer_and_input(n=53)
        y = layer(x)
    assert torch.equal(layer(x), y)
    other = MXLinear(96, 53)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), y) and torch.equal(copy.deepcopy(layer)(x), y)
    layer.to_stored()
    assert torch.equal(layer(x), y)


@each_dtype
def test_a_bias_that_is_written_through_data_counts(dtype, kernels):
    layer, x = MXLinear.from_linear(dense().to(dtype)), torch.zeros(1, 96, dtype=dtype)
    with torch.no_grad():
        before = layer(x)
        layer.bias.data.add_(1)
        torch.testing.assert_close(layer(x), before + 1, atol=0.02, rtol=0.02)


def test_a_layer_on_the_meta_device_gives_shapes():
    layer = MXLinear(64, 48, device="meta")
    assert layer(torch.empty(2, 64, device="meta")).shape == (2, 48)
