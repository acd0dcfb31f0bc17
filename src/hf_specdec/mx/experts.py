"""Experts of a mixture (MoE) whose weights are one three-dimensional parameter for each projection, as transformers holds them: their matrices go into MX formats and
tiles, too, and a pass reads those of the chosen experts alone, each once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from .beneath import Beneath, put_beneath
from .codec import round_to_integers
from .expert_ops import by_expert, dense_expert_linear, expert_weights, mx_expert_linear, mx_experts, without_numbers, groups
from .formats import DEFAULT_FORMAT
from .kernels import experts
from .linear import MXMatrix
from .packed import PackedMatrix

PREFIX = "mx_"  # of the names of packed matrices: transformers would take those of the parameters apart, by expert, when it saves them
_MARKS = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate")  # of transformers' `use_experts_implementation`


@dataclass(frozen=True)
class ExpertWeights:
    """One projection of a module of experts that is dense as yet: what stands for an `nn.Linear` where layers are chosen and compressed."""

    owner: nn.Module
    name: str

    @property
    def weight(self) -> torch.Tensor:
        """`[experts * n, K]`: the rows of the first expert, those of the second, and so on. A copy, if the parameter lies otherwise."""
        whole = self.owner._parameters[self.name].detach()
        whole = whole.transpose(1, 2) if self.owner.is_transposed else whole
        return whole.reshape(-1, whole.shape[-1])

    def expert(self, number: int) -> torch.Tensor:
        """The weights `[n, K]` of one expert."""
        own = self.owner._parameters[self.name].detach()[number]
        return own.T if self.owner.is_transposed else own

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs of each, inputs."""
        count, n, k = self.owner._parameters[self.name].shape
        return (count, k, n) if self.owner.is_transposed else (count, n, k)

    @property
    def in_features(self) -> int:
        return self.shape[2]

    @property
    def device(self) -> str:
        """The kind of it."""
        return self.owner._parameters[self.name].device.type

    def put(self, layer: ExpertMatrix) -> None:
        """Put the packed matrix in the place of the parameter."""
        del self.owner._parameters[self.name]
        self.take(layer)

    def take(self, layer: ExpertMatrix) -> None:
        self.owner.add_module(PREFIX + self.name, layer)
        if not isinstance(self.owner, Experts):
            put_beneath(self.owner, Experts)


def expert_projections(module: nn.Module) -> tuple[ExpertWeights, ...]:
    """The dense matrices of a module of experts; none of a module of any other kind."""
    if not all(hasattr(module, mark) for mark in _MARKS):
        return ()
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    parts = {name: module._parameters.get(name) for name in names}
    return tuple(ExpertWeights(module, name) for name, part in parts.items() if part is not None and part.dim() == 3 and part.shape[0] == module.num_experts)


class ExpertMatrix(MXMatrix):
    """One projection of all experts of a layer: a matrix whose rows are those of the first expert, of the second, and so on; `out_features` counts all of them."""

    def __init__(self, in_features, out_features, format=DEFAULT_FORMAT, device=None, activations=None, experts: int = 1):
        super().__init__(in_features, out_features, False, format, device, None, activations)
        self.experts = experts

    @classmethod
    def for_weights(cls, weights: ExpertWeights, format, activations=None) -> ExpertMatrix:
        """A matrix of this shape, still without numbers."""
        count, n, k = weights.shape
        return cls(k, count * n, format, "meta", activations, count)

    @classmethod
    def from_packed(cls, packed: PackedMatrix, linear: ExpertWeights, activations=None) -> ExpertMatrix:
        layer = cls.for_weights(linear, packed.format, activations)
        layer.set_packed(packed)
        return layer.train(linear.owner.training)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs of each, inputs."""
        return self.experts, self.out_features // self.experts, self.in_features

    @property
    def packed_bytes(self) -> int:
        return self.weight.numel() + self.weight_scale.numel()

    def prepare(self) -> ExpertMatrix:
        """As `MXLinear.prepare`; on a GPU the bytes stay in the stored order."""
        if self.weight.device.type == "cpu":
            self._cpu_kernel()
        return self

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """`[pairs, n]`: for pair i of `index` (int64, any shape) row i // S of x `[rows, K]`, S = pairs / rows, times the weights of expert index[i]; zeros where there is
        no such expert."""
        self._check_input(x)
        if x.dim() != 2 or (index.numel() % x.shape[0] if x.shape[0] else index.numel()):
            raise ValueError(f"x has shape {tuple(x.shape)} and index {tuple(index.shape)}: rows are wanted, and as many experts for each.")
        device = x.device.type
        if (x.is_cpu or torch.amp.is_autocast_available(device)) and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        count, n, _ = self.shape
        traced, index = torch.compiler.is_compiling(), index.long()
        if traced and self._place is not None and not torch.is_grad_enabled() and not torch.compiler._is_exporting_flag:
            return mx_experts(x.contiguous(), *self._place, count, index.contiguous(), n)
        if without_numbers(x) or torch.is_grad_enabled() and x.requires_grad:
            layer = self if traced else self.prepare()
            return mx_expert_linear(x, index, layer.weight, layer.weight_scale, self.format.name, count, n, layer.layout, self.activations is not None)
        kernel = self._cpu_kernel()
        if kernel is not None:
            return experts.multiply(kernel.address, count, x, index, n)
        if not x.is_cpu:
            _say_slow(x.device.type)
        return by_expert(round_to_integers(x) if self.activations else x, index, lambda number: self.expert(number, x.dtype), count, n)

    def expert(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """The weights `[n, K]` of one expert."""
        rows, kernel = slice(number * self.shape[1], (number + 1) * self.shape[1]), self._cpu_kernel()
        if kernel is not None:
            return expert_weights(kernel, number, self.shape[1], dtype)
        if self.weight.device.type == "cpu":
            return self._dense(dtype)[rows]
        return PackedMatrix(self.weight[rows], self.weight_scale[rows], self.format).dequantize(dtype)

    def extra_repr(self) -> str:
        return f"{self.experts} experts, {super().extra_repr()}"


@lru_cache
def _say_slow(device: str) -> None:
    warnings.warn(f"packed experts have no kernel on {device!r}: torch multiplies by one after another, slowly. Leave them dense there (skip=('experts',)), or run the model on a CPU.",
                  stacklevel=6)


class Experts(Beneath):
    """What lies beneath a class of experts: their projections, packed or dense, in the order of transformers' own functions for experts."""

    mx_by_kernels = False

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """`[tokens, H]` from hidden_states `[tokens, H]` and, for each token, the experts of its router `[tokens, S]` (int64) and what they weigh."""
        tokens, top = top_k_index.shape
        if self.has_gate:
            x = self._apply_gate(self._project("gate_up_proj", hidden_states, top_k_index))
        else:
            x = self.act_fn(self._project("up_proj", hidden_states, top_k_index))
        x = self._project("down_proj", x, top_k_index)
        if getattr(self, "has_post_expert_norm", False):
            x = self.post_expert_norm(x)
        x = x * top_k_weights.reshape(-1, 1)
        return x.view(tokens, top, x.shape[-1]).sum(1).to(hidden_states.dtype)

    def _project(self, name: str, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        layer = self._modules.get(PREFIX + name)
        if layer is not None:
            out = layer(x, index)
        else:
            whole = self._parameters[name].transpose(1, 2) if self.is_transposed else self._parameters[name]
            x = x.to(whole.dtype)
            out = dense_expert_linear(x, index, whole) if without_numbers(x) else by_expert(x, index, whole.__getitem__, *whole.shape[:2])
        if self.has_bias:
            out = out + self._parameters[f"{name}_bias"][index.reshape(-1).clamp(max=self.num_experts - 1)]
        return out


@contextmanager
def watched(owner: nn.Module, seen: Callable[[str, int, torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """While it lasts, seen(projection's name, expert's number, its rows of x, the gradient of their products) for all experts that tokens choose, as gradients are made."""
    own = type(owner)

    def project(name: str, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        def tell(gradient: torch.Tensor) -> None:
            for number, pairs, rows in groups(x.shape[0], index, owner.num_experts):
                seen(name, number, x.detach()[rows], gradient[pairs])

        out = Experts._project(owner, name, x, index)
        if out.requires_grad:
            out.register_hook(tell)
        return out

    put_beneath(owner, Experts)
    owner._project = project
    try:
        yield
    finally:
        del owner._project
        owner.__class__ = own


def matrices(model: nn.Module) -> Iterator[tuple[Experts, str, ExpertMatrix]]:
    """The packed matrices of a model's experts, with the modules that they are in and the names of the parameters that they stand for."""
    for module in model.modules():
        for name, child in list(module._modules.items()):
            if isinstance(child, ExpertMatrix):
                yield module, name.removeprefix(PREFIX), child


def dense_weights(owner: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters that the packed matrices of a module of experts stand for, by name; none of any other module."""
    layers = {name.removeprefix(PREFIX): layer for name, layer in owner._modules.items() if isinstance(layer, ExpertMatrix)}
    return {name: as_parameter(owner, layer, dtype) for name, layer in layers.items()}


def unpack(owner: Experts, name: str, layer: ExpertMatrix, dtype: torch.dtype) -> None:
    """Put the parameter back in the place of its packed matrix, as numbers of this dtype."""
    put_back(owner, name, as_parameter(owner, layer, dtype))


def put_back(owner: Experts, name: str, whole: torch.Tensor) -> None:
    """Put a parameter of these numbers in the place of the packed matrix."""
    owner._modules.pop(PREFIX + name, None)
    owner.register_parameter(name, nn.Parameter(whole))


def as_parameter(owner: Experts, layer: ExpertMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of the parameter that the packed matrix stands for."""
    whole = layer.dequantize(dtype).view(layer.shape)
    return whole.transpose(1, 2).contiguous() if owner.is_transposed else whole
