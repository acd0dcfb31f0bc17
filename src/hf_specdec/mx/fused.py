"""Passes of models on a CPU in fewer calls: RMS norms in one instead of torch's eight, and the two products a gated MLP begins with in one. What is between
the products of a small model takes as long as they do.

A module keeps its name, parameters and hooks and gets a class beneath its own, whose forward does as the module's own does wherever something looks at
each step: a compiler, autograd, a trace, autocast, hooks on the parts."""

from __future__ import annotations

import copy
import inspect
import struct
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import nn

from .kernels import cpu
from .linear import MXLinear

KINDS = ("rounded", "one more", "wide")  # of RMS norms: w * round(y), round((1 + w) * y), round(w * y), as in csrc/norm.c
EPSILONS = ("variance_epsilon", "eps")
SCALES = (1e-2, 1.0, 50.0)  # of numbers to try a module on: some clamp theirs
_JOB = struct.Struct("3Q 2q f 3i").pack  # mx_norm_job of csrc/norm.c


def fuse(model: nn.Module) -> None:
    """Give a model's RMS norms and gated MLPs that were tried and found to be such the short way, where it has MX layers, on a CPU with kernels."""
    if cpu.library() is None or not any(isinstance(module, MXLinear) for module in model.modules()):
        return
    for module in list(model.modules()):
        if not isinstance(module, Fused) and all(part.device.type == "cpu" for part in module.parameters()):
            kind = norm_kind(module)
            if kind is not None:
                module.__class__ = _class(Norm, type(module), kind)
            elif is_gated(module):
                module.__class__ = _class(GatedMLP, type(module), 0)


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`."""
    for module in model.modules():
        if isinstance(module, Fused):
            module.__class__ = module.own


class Fused:
    """Beneath the class of a module; `own` is the module's own class."""

    own: type
    kind: int

    def __reduce_ex__(self, protocol):
        """Copies and pickles: the class is made where it is wanted."""
        return _blank, (self.short, self.own, self.kind), self.__dict__.copy()


@lru_cache(maxsize=None)
def _class(short: type, own: type, kind: int) -> type:
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (short, own), names | {"short": short, "own": own, "kind": kind})


def _blank(short: type, own: type, kind: int) -> nn.Module:
    made = _class(short, own, kind)
    return made.__new__(made)


def _unwatched(x: torch.Tensor) -> bool:
    """Whether nothing looks at what is done with x."""
    return (
        type(x) is torch.Tensor
        and not torch.compiler.is_compiling()
        and x.is_cpu
        and not torch.is_grad_enabled()
        and not torch.jit.is_tracing()
        and not torch.is_autocast_enabled("cpu")
    )


class Norm(Fused):
    def forward(self, x):
        weight = self._parameters.get("weight")
        if weight is not None and _unwatched(x) and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float32):
            if x.dim() and x.shape[-1] == weight.shape[0] and x.is_contiguous() and weight.is_contiguous():
                return rms_norm(x, weight, _epsilon(self), self.kind)
        return super().forward(x)


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
    """The place in KINDS of an RMS norm; None for any other module. A copy of it with other weights is tried."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(list(module.parameters())) > 1 or _epsilon(module) is None or not _takes_one(type(module)):
        return None
    numbers = torch.Generator().manual_seed(0)
    for kind in range(len(KINDS)):
        if all(_alike(module, kind, dtype, numbers) for dtype in (torch.float32, torch.bfloat16)):
            return kind
    return None


def _alike(module: nn.Module, kind: int, dtype: torch.dtype, numbers: torch.Generator) -> bool:
    """Whether the module gives what `rms_norm` does, but for rounding: of bfloat16 numbers, one in fifty may be the next one."""
    other, n = copy.deepcopy(module).to(dtype), module.weight.shape[0]
    for scale in SCALES:
        weight, x = (torch.randn(*shape, n, generator=numbers).to(dtype) for shape in ((), (4,)))
        other._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
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
    except Exception:  # of whatever kind: this is no module of ours
        return None
    return found if type(found) is torch.Tensor else None


@lru_cache(maxsize=None)
def _takes_one(own: type) -> bool:
    """Whether `forward` takes one tensor and nothing else."""
    return len(inspect.signature(own.forward).parameters) == 2


class GatedMLP(Fused):
    def forward(self, x):
        products = _kernels(self, x) if not self.training and _unwatched(x) else None
        if products is None:
            return super().forward(x)
        gate, up = cpu.multiply_several([kernel.address for kernel in products], x if x.is_contiguous() else x.contiguous(), [kernel.n for kernel in products])
        return self.down_proj(self.act_fn(gate).mul_(up))


def _kernels(module: nn.Module, x: torch.Tensor) -> list[cpu.Kernel] | None:
    """Of the products that a gated MLP begins with; None where they are not to be made at once."""
    found = []
    for name in ("gate_proj", "up_proj"):
        layer = module._modules.get(name)
        if type(layer) is not MXLinear or layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
            return None
        layer._check_input(x)
        found.append(layer._cpu_kernel())
    many = None not in found and x.numel() > cpu.WIDE * found[0].k and cpu.by_panels()
    return None if None in found or many else found


def is_gated(module: nn.Module) -> bool:
    """Whether it is down_proj(act_fn(gate_proj(x)) * up_proj(x)), with MX layers for the first two: it is tried."""
    parts = module._modules
    if not {"gate_proj", "up_proj", "down_proj", "act_fn"} <= parts.keys() or not _takes_one(type(module)):
        return False
    numbers, dtype = torch.Generator().manual_seed(0), next((part.dtype for part in module.parameters() if part.is_floating_point()), torch.bfloat16)
    for scale in SCALES:
        x = (scale * torch.randn(2, getattr(parts["gate_proj"], "in_features", 1), generator=numbers)).to(dtype)
        with torch.inference_mode():
            if _kernels(module, x) is None:
                return False
        wanted = _tried(module.forward, x)
        found = _tried(lambda x: parts["down_proj"](parts["act_fn"](parts["gate_proj"](x)).mul_(parts["up_proj"](x))), x)
        if wanted is None or found is None or not torch.equal(wanted, found):
            return False
    return True
