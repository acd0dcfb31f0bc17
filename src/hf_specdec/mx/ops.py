"""The product as operators that torch's compiler and autograd see. Eager inference calls the kernels without this detour."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .codec import round_to_integers
from .formats import get_format
from .kernels import cpu, gpu
from .packed import PackedMatrix

STORED, TILES, PLANES = "stored", "tiles16", "planes"  # the order of a layer's bytes


def product(x: torch.Tensor, layer) -> torch.Tensor:
    """`layer(x)` for an `MXLinear`, differentiable in x and the bias (the weights are constants, and rounding x counts as the identity)."""
    integers = layer.activations is not None
    if layer.layout == PLANES:
        return mx_planes(x, *layer._planes, layer.bias, layer.format.name, layer.out_features, integers)
    tail = layer._tail or (None, None)
    return mx_linear(x, layer.weight, layer.weight_scale, *tail, layer.bias, layer.format.name, layer.out_features, layer.layout, integers)


@torch.library.custom_op("hf_specdec::mx_linear", mutates_args=())
def mx_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    tail: torch.Tensor | None,
    tail_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    format: str,
    out_features: int,
    layout: str,
    integers: bool = False,
) -> torch.Tensor:
    """`[..., out_features]` from `x [..., in_features]`; bytes as `MXLinear` holds them. integers: x is rounded to MXINT8."""
    if layout == TILES:
        return _tiled(weight, weight_scale, tail, tail_scale, bias, format, out_features, x.shape[-1], integers)(x)
    x = round_to_integers(x) if integers else x
    return multiply_dense(x, PackedMatrix(weight, weight_scale, get_format(format)).dequantize(x.dtype), bias)


def multiply_dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """torch's own product, with a bias of any dtype."""
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _tiled(weight, weight_scale, tail, tail_scale, bias, format, out_features, in_features, integers=False) -> cpu.Kernel:
    pair = None if tail is None else (tail, tail_scale)
    return cpu.Kernel(format, get_format(format).bits, out_features, in_features, weight, weight_scale, pair, bias, integers)


@mx_linear.register_fake
def _(x, weight, weight_scale, tail, tail_scale, bias, format, out_features, layout, integers=False):
    return x.new_empty((*x.shape[:-1], out_features))


_library = torch.library.Library("hf_specdec", "FRAGMENT")
# Without gradients, and a third as dear a call: products of x and the layers at places `i`, .. of a table of `cpu.Layer`s (uint8 [layers, bytes])
_library.define("mx_tiles(Tensor x, Tensor layers, int i, int n) -> Tensor")
_library.define("mx_tiles2(Tensor x, Tensor layers, int i0, int i1, int n0, int n1) -> (Tensor, Tensor)")
_library.define("mx_tiles3(Tensor x, Tensor layers, int i0, int i1, int i2, int n0, int n1, int n2) -> (Tensor, Tensor, Tensor)")
mx_tiles, mx_tiles2, mx_tiles3 = (getattr(torch.ops.hf_specdec, f"mx_tiles{count}").default for count in ("", 2, 3))


def _implement(name: str, count: int):
    def run(x, layers, *rest):
        start, step = layers.data_ptr(), layers.shape[1]
        if count == 1:
            return cpu.multiply(start + rest[0] * step, x.contiguous(), rest[1])
        return cpu.multiply_several([start + i * step for i in rest[:count]], x.contiguous(), rest[count:])

    def fake(x, layers, *rest):
        outs = tuple(x.new_empty((*x.shape[:-1], n)) for n in rest[count:])
        return outs[0] if count == 1 else outs

    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"hf_specdec::{name}", fake, lib=_library)


_implement("mx_tiles", 1)
_implement("mx_tiles2", 2)
_implement("mx_tiles3", 3)


@torch.library.custom_op("hf_specdec::mx_input_gradient", mutates_args=())
def mx_input_gradient(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    tail: torch.Tensor | None,
    tail_scale: torch.Tensor | None,
    format: str,
    in_features: int,
    layout: str,
) -> torch.Tensor:
    """`gradient @ W`: the weights are decompressed for it and not kept."""
    if layout == TILES:
        n = gradient.shape[-1]
        w = _tiled(weight, weight_scale, tail, tail_scale, None, format, n, in_features).dequantize(gradient.dtype)
    else:
        w = PackedMatrix(weight, weight_scale, get_format(format)).dequantize(gradient.dtype)
    return gradient @ w


@mx_input_gradient.register_fake
def _(gradient, weight, weight_scale, tail, tail_scale, format, in_features, layout):
    return gradient.new_empty((*gradient.shape[:-1], in_features))


def _setup(ctx, inputs, output):
    x, weight, weight_scale, tail, tail_scale, bias, ctx.format, _, ctx.layout, _ = inputs
    ctx.in_features, ctx.bias_dtype = x.shape[-1], None if bias is None else bias.dtype
    ctx.save_for_backward(weight, weight_scale, tail, tail_scale)


def _backward(ctx, gradient):
    of_x = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = mx_input_gradient(gradient, *ctx.saved_tensors, ctx.format, ctx.in_features, ctx.layout)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[5]:
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype)
    return of_x, None, None, None, None, of_bias, None, None, None, None


mx_linear.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("hf_specdec::mx_planes", mutates_args=())
def mx_planes(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    format: str,
    out_features: int,
    integers: bool = False,
) -> torch.Tensor:
    """`mx_linear` for weights in planes, on a GPU."""
    x = round_to_integers(x) if integers else x
    return gpu.multiply(x, _planes(words, scales, k), format, bias)


def _planes(words, scales, k):
    from .kernels.triton_mx import Planes

    return Planes(words, scales, k)


@mx_planes.register_fake
def _(x, words, scales, k, bias, format, out_features, integers=False):
    return x.new_empty((*x.shape[:-1], out_features))


def _setup_planes(ctx, inputs, output):
    _, words, scales, ctx.k, bias, ctx.format, _, _ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(words, scales)


def _backward_planes(ctx, gradient):
    of_x = of_bias = None
    if ctx.needs_input_grad[0]:
        packed = gpu.from_planes(_planes(*ctx.saved_tensors, ctx.k), get_format(ctx.format))
        of_x = gradient @ packed.dequantize(gradient.dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype)
    return of_x, None, None, None, of_bias, None, None, None


mx_planes.register_autograd(_backward_planes, setup_context=_setup_planes)
