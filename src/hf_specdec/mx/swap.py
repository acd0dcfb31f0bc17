"""Swap a model's Linear layers for `MXLinear` ones, one at a time, and back."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ..hints import what
from .activation import RowActivation
from .beside import use_none
from .experts import ExpertMatrix, ExpertWeights, matrices, unpack
from .gptq import Inputs, compensated
from .linear import MXLinear
from .packed import quantize
from .plan import Choice
from .report import LayerReport, weight_error

NOT_FINITE = "{} holds a NaN or an infinity, which MX blocks cannot keep: leave the layer out with skip=, or mend the weights."
FLOAT64 = "{}: MX layers multiply float32, bfloat16 and float16; use float32, dtype=torch.float32 or model.to(torch.float32)."
HOOKS = [key for key in vars(nn.Module()) if key.startswith(("_forward_", "_backward_")) or key == "_is_full_backward_hook"]


def compress_layer(model: nn.Module, choice: Choice, scale_rule: str, measure: bool, activations: str | None = None,
                   inputs: Inputs | None = None, note: str = "") -> LayerReport:
    """Swap one layer, if it has a format, and say what that did. activations: of layers whose format goes with them. inputs: rounding makes
    up for its errors on these; note: what there is to say about that."""
    if choice.format is None:
        return dense_report(choice.name, choice.module, choice.reason)
    linear, notes = choice.module, [note] if note else []
    weight, activations = linear.weight, activations if choice.format.fits_int8 else None
    before, shape = weight.numel() * weight.element_size(), getattr(linear, "shape", tuple(weight.shape))
    if _is_tied(model, linear):
        before, notes = 0, ["untied from the embedding, which stays dense", *notes]
    own = weight.clone() if choice.format.is_dense else weight  # the layer puts its memory into another order: it must be its own
    packed = quantize(own, choice.format, scale_rule) if inputs is None else compensated(own, choice.format, scale_rule, inputs)
    error = weight_error(weight.detach(), packed) if measure else (None, None)
    if isinstance(linear, ExpertWeights):
        linear.put(ExpertMatrix.from_packed(packed, linear, activations))
    else:
        replace(model, choice.name, MXLinear.from_packed(packed, linear, activations))
    return LayerReport(choice.name, shape, choice.format.name, before, packed.nbytes, *error, ", ".join(notes))


def dense_report(name: str, module: nn.Module | ExpertWeights, reason: str) -> LayerReport:
    """A module that stays as it is, for that reason."""
    if isinstance(module, ExpertWeights):
        part = module.owner._parameters[module.name]
        size = part.numel() * part.element_size()
        return LayerReport(name, module.shape, None, size, size, note=reason)
    weights = [p for p in module._parameters.values() if p is not None and p.dim() >= 2] or [module.weight]  # a parametrised one computes it
    size = sum(p.numel() * p.element_size() for p in weights)
    return LayerReport(name, tuple(weights[0].shape), None, size, size, note=reason)


def _is_tied(model: nn.Module, linear: nn.Linear | ExpertWeights) -> bool:
    """Whether the layer's weight is the embedding's, too."""
    return isinstance(linear, nn.Linear) and any(module.weight is linear.weight for module in model.modules() if isinstance(module, nn.Embedding))


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of that name, with the hooks of what was there; their handles go on working."""
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    before = getattr(owner, child)
    if "weight" in before._parameters:  # else hooks make the weight (weight_norm, pruning), which is done
        vars(module).update({key: hooks for key, hooks in vars(before).items() if key in HOOKS})
    setattr(owner, child, module)


def own_config(model: nn.Module) -> None:
    """Give the model a config that no other model shares, its submodules included: what is written there is about this one."""
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        return
    copies: dict[int, object] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        if id(getattr(module, "config", None)) in copies:
            module.config = copies[id(module.config)]


def dequantize(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Swap a model's MX layers for dense ones, in place, and return the model: in its own dtype, or all that a checkpoint of it holds in `dtype`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a model, got {what(model)}; load one with from_pretrained.")
    experts, names = list(matrices(model))[::-1], [name for name, module in model.named_modules() if isinstance(module, MXLinear)]
    if not names and not experts:
        raise ValueError("model has no MX layers to dequantise: it is dense as it is. A folder of MX weights is read as one after import hf_specdec.mx.")
    given, dtype = dtype, getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if given is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={given!r} is no floating-point type of torch: take float32, bfloat16 or float16.")
    dtype = dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for name in names:
        replace(model, name, model.get_submodule(name).to_linear(dtype))
    while experts:
        unpack(*experts.pop(), dtype)
    for name, module in list(model.named_modules()):
        if isinstance(module, RowActivation):
            replace(model, name, module.original)
    _forget(model)
    if given is not None:
        for tensor in model.state_dict(keep_vars=True).values():
            if torch.is_tensor(tensor) and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    return model


def _forget(model: nn.Module) -> None:
    """Take away what `compress` left beside the layers; a model with adapters hands it to the model they are for."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    use_none(model)
    if hasattr(model, "mx_report"):
        del model.mx_report
    if hasattr(model, "config") and hasattr(model, "save_pretrained"):
        detach(model)


def detach(model) -> None:
    """Undo `attach`."""
    for owner, name in ((model, "hf_quantizer"), (model, "quantization_method"), (model, "_weight_conversions"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = model.config._is_quantized = False
