"""RMS norms of models on a CPU in one call of the library instead of torch's eight, and one row's bits the same at every width: between the products of a
small model these norms take a tenth of its time.

A norm gets a class beneath its own (`beneath`). Where a compiler, autograd, a trace or autocast looks at each step, it does as its
own class does."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable

import torch
from torch import nn

from .beneath import Beneath, put_beneath
from .kernels import cpu
from .linear import MXMatrix

KINDS = ("rounded", "one more", "wide")  # of RMS norms: w * round(y), round((1 + w) * y), round(w * y), as in csrc/norm.c
EPSILONS = ("variance_epsilon", "eps")
SCALES = (1e-2, 1.0, 50.0)  # of the numbers that a module is tried on
_JOB = struct.Struct("3Q 2q f 3i").pack  # mx_norm_job of csrc/norm.c


def use_kernel_norms(model: nn.Module) -> None:
    """Give a model's RMS norms the short way, where it has MX layers and is on a CPU with kernels."""
    if cpu.library() is None or not any(isinstance(module, MXMatrix) for module in model.modules()):
        return
    for module in model.modules():
        kind = None if isinstance(module, KernelNorm) else norm_kind(module)
        if kind is not None:
            put_beneath(module, KernelNorm, mx_kind=kind)


class KernelNorm(Beneath):
    """Beneath the class of a norm. mx_kind: a place in KINDS."""

    mx_kind: int

    def forward(self, *given, **named):
        if not isinstance(self, KernelNorm):  # someone kept this method (accelerate's hooks do), and `use_own_classes` came after
            return type(self).forward(self, *given, **named)
        weight, x = self._parameters.get("weight"), given[0] if len(given) == 1 and not named else None
        if weight is not None and weight.is_cpu and _unwatched(x) and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float32):
            epsilon = _epsilon(self)
            if epsilon is not None and x.shape[-1:] == weight.shape and x.is_contiguous() and weight.is_contiguous():
                return rms_norm(x, weight, epsilon, self.mx_kind)
        return super().forward(*given, **named)


def _unwatched(x: torch.Tensor) -> bool:
    """Whether nothing looks at what is done with x, on a CPU."""
    return (
        type(x) is torch.Tensor
        and not torch.compiler.is_compiling()
        and x.is_cpu
        and not torch.is_grad_enabled()
        and not torch.jit.is_tracing()
        and not torch.is_autocast_enabled("cpu")
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, kind: int) -> torch.Tensor:
    """x [..., n] over the root of the mean of its squares plus epsilon (Zhang and Sennrich 2019, equation 4), times weight [n]; both bfloat16 or both float32,
    contiguous, on a CPU. kind: a place in KINDS. A row's bits depend on that row alone."""
    out, n = torch.empty_like(x), weight.shape[0]
    job = _JOB(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // n, n, epsilon, x.dtype == torch.bfloat16, kind, cpu.kernel_path())
    cpu.library().mx_norm(job, torch.get_num_threads())
    return out


def _epsilon(module: nn.Module) -> float | None:
    return next((value for value in (vars(module).get(name) for name in EPSILONS) if isinstance(value, float)), None)


def norm_kind(module: nn.Module) -> int | None:
    """The place in KINDS of an RMS norm; None for any other module. One like it with other weights is tried."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or weight.device.type != "cpu" or len([*module.parameters(), *module.buffers()]) > 1:
        return None
    if _epsilon(module) is None or len(inspect.signature(type(module).forward).parameters) != 2:
        return None
    numbers = torch.Generator("cpu").manual_seed(0)
    for kind in range(len(KINDS)):
        if all(_alike(module, kind, dtype, numbers) for dtype in (torch.float32, torch.bfloat16)):
            return kind
    return None


def _alike(module: nn.Module, kind: int, dtype: torch.dtype, numbers: torch.Generator) -> bool:
    """Whether the module gives what `rms_norm` does, but for rounding: of bfloat16 numbers, one in fifty may be the next one."""
    other, n = type(module).__new__(type(module)), module.weight.shape[0]  # a copy would copy hooks, and what they hold on to
    for scale in SCALES:
        weight, x = (torch.randn(*shape, n, generator=numbers, dtype=torch.float32, device="cpu").to(dtype) for shape in ((), (4,)))
        vars(other).update(vars(module), _parameters={"weight": nn.Parameter(weight, requires_grad=False)})
        wanted, found = _tried(other.forward, x * scale), rms_norm(x * scale, weight, _epsilon(module), kind)
        if wanted is None or wanted.dtype != dtype or wanted.shape != x.shape:
            return False
        near = torch.allclose(wanted.float(), found.float(), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        if not near or dtype == torch.bfloat16 and (wanted != found).float().mean() > 0.02:
            return False
    return True


def _tried(forward: Callable, x: torch.Tensor) -> torch.Tensor | None:
    """forward(x), if that is a tensor."""
    try:
        with torch.inference_mode():
            found = forward(x)
    except Exception:  # of whatever kind: this is no such norm
        return None
    return found if type(found) is torch.Tensor else None
