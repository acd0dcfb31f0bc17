"""Products of tokens with the experts that a router has chosen for them: by torch an expert at a time, and as operators that torch's compiler and autograd see."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from .codec import round_to_integers
from .formats import get_format
from .kernels import cpu, experts
from .ops import TILES
from .packed import PackedMatrix


def by_expert(x: torch.Tensor, index: torch.Tensor, weight_of: Callable[[int], torch.Tensor], count: int, n: int) -> torch.Tensor:
    """`[pairs, n]`: for pair i of `index` (int64, any shape) row i // S of x `[rows, K]`, S = pairs / rows, times weight_of(index[i]) `[n, K]`. Zeros where index[i]
    is none of the `count` experts."""
    out = x.new_zeros(index.numel(), n)
    for number, pairs, rows in groups(x.shape[0], index, count):
        out[pairs] = F.linear(x[rows], weight_of(number)).to(x.dtype)  # of another one under autocast
    return out


def without_numbers(x: torch.Tensor) -> bool:
    """Whether x is traced, or stands for a tensor: nothing can be looked up in it, and its address means nothing."""
    return torch.compiler.is_compiling() or type(x) is not torch.Tensor or x.is_meta or torch.jit.is_tracing()


def groups(rows: int, index: torch.Tensor, count: int):
    """Every expert that is chosen, with its pairs and their rows."""
    index, share = index.reshape(-1), index.numel() // max(rows, 1)
    for number in index.unique().tolist():
        if 0 <= number < count:
            pairs = (index == number).nonzero()[:, 0]
            yield number, pairs, pairs // share


def expert_weights(kernel: cpu.Kernel, number: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """The weights `[n, K]` of one expert, out of the tiles."""
    out = torch.empty(n, kernel.k, dtype=dtype, device="cpu")
    cpu.library().mx_dequantize(kernel.address, number * n // cpu.ROWS, n // cpu.ROWS, out.data_ptr(), cpu.DTYPES[dtype], torch.get_num_threads())
    return out


_library = torch.library.Library("hf_specdec", "FRAGMENT")
# By place in a table of `cpu.Layer`s, as `mx_tiles`
_library.define("mx_experts(Tensor x, Tensor layers, int i, int experts, Tensor index, int n) -> Tensor")
mx_experts = torch.ops.hf_specdec.mx_experts.default


def _by_place(x, layers, i, count, index, n):
    return experts.multiply(layers.data_ptr() + i * layers.shape[1], count, x, index, n)


_library.impl("mx_experts", _by_place, "CPU")
torch.library.register_fake("hf_specdec::mx_experts", lambda x, layers, i, count, index, n: x.new_empty((index.numel(), n)), lib=_library)


@torch.library.custom_op("hf_specdec::mx_expert_linear", mutates_args=())
def mx_expert_linear(
    x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, format: str, count: int, n: int, layout: str, integers: bool = False
) -> torch.Tensor:
    """`by_expert`, of bytes as an `ExpertMatrix` holds them. integers: x is rounded to MXINT8. Differentiable in x (rounding it counts as the identity)."""
    if layout == TILES:
        kernel = _kernel(weight, weight_scale, format, count * n, x.shape[1], integers)  # held on to: its address is what is passed
        return experts.multiply(kernel.address, count, x, index, n)
    return by_expert(round_to_integers(x) if integers else x, index, _weights_of(weight, weight_scale, format, n, layout, x.dtype), count, n)


def _kernel(weight, weight_scale, format: str, rows: int, k: int, integers: bool = False) -> cpu.Kernel:
    return cpu.Kernel(format, get_format(format).bits, rows, k, weight, weight_scale, None, None, integers)


def _weights_of(weight, weight_scale, format: str, n: int, layout: str, dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
    fmt = get_format(format)
    if layout == TILES:
        kernel = _kernel(weight, weight_scale, format, weight.shape[0], weight.shape[1] * 8 // fmt.bits)
        return lambda number: expert_weights(kernel, number, n, dtype)
    return lambda number: PackedMatrix(weight[number * n : (number + 1) * n], weight_scale[number * n : (number + 1) * n], fmt).dequantize(dtype)


@mx_expert_linear.register_fake
def _(x, index, weight, weight_scale, format, count, n, layout, integers=False):
    return x.new_empty((index.numel(), n))


@torch.library.custom_op("hf_specdec::mx_expert_gradient", mutates_args=())
def mx_expert_gradient(
    gradient: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, format: str, count: int, rows: int, k: int, layout: str
) -> torch.Tensor:
    """Of x `[rows, k]`, given that of the result."""
    out, weight_of = gradient.new_zeros(rows, k), _weights_of(weight, weight_scale, format, gradient.shape[1], layout, gradient.dtype)
    for number, pairs, of in groups(rows, index, count):
        out.index_add_(0, of, gradient[pairs] @ weight_of(number))
    return out


@mx_expert_gradient.register_fake
def _(gradient, index, weight, weight_scale, format, count, rows, k, layout):
    return gradient.new_empty((rows, k))


def _setup(ctx, inputs, output):
    x, index, weight, weight_scale, ctx.format, ctx.count, _, ctx.layout, _ = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(index, weight, weight_scale)


def _backward(ctx, gradient):
    of_x = mx_expert_gradient(gradient, *ctx.saved_tensors, ctx.format, ctx.count, *ctx.shape, ctx.layout) if ctx.needs_input_grad[0] else None
    return of_x, None, None, None, None, None, None, None, None


mx_expert_linear.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("hf_specdec::dense_expert_linear", mutates_args=())
def dense_expert_linear(x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`by_expert`, of weights `[experts, n, K]` as they are: for what traces it, which cannot ask for the experts that are chosen. Differentiable."""
    return by_expert(x, index, weight.__getitem__, *weight.shape[:2])


@dense_expert_linear.register_fake
def _(x, index, weight):
    return x.new_empty((index.numel(), weight.shape[1]))


@torch.library.custom_op("hf_specdec::dense_expert_gradients", mutates_args=())
def dense_expert_gradients(gradient: torch.Tensor, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of x and of the weights, given that of the result."""
    of_x, of_weight = torch.zeros_like(x), torch.zeros_like(weight)
    for number, pairs, of in groups(x.shape[0], index, weight.shape[0]):
        of_x.index_add_(0, of, gradient[pairs] @ weight[number])
        of_weight[number] = gradient[pairs].T @ x[of]
    return of_x, of_weight


@dense_expert_gradients.register_fake
def _(gradient, x, index, weight):
    return torch.empty_like(x), torch.empty_like(weight)


def _backward_dense(ctx, gradient):
    of_x, of_weight = dense_expert_gradients(gradient, *ctx.saved_tensors)
    return of_x, None, of_weight


dense_expert_linear.register_autograd(_backward_dense, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
