"""Swap a loaded model's Linear layers for `MXLinear` ones, and back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from .formats import DEFAULT_FORMAT, DEFAULT_RULE, Format, check_rule, get_format
from .linear import MXLinear
from .packed import quantize
from .plan import Choice, check_skip, check_some, plan
from .report import CompressionReport, LayerReport, weight_error


NOT_FINITE = "{} holds a NaN or an infinity, which MX blocks cannot keep: leave the layer out with skip=, or mend the weights."


def compress(
    model: nn.Module,
    format: str | Format = DEFAULT_FORMAT,
    skip: Iterable[str] = (),
    scale_rule: str = DEFAULT_RULE,
    lm_head: str | Format | None = None,
    measure: bool = True,
) -> nn.Module:
    """Compress a model's `nn.Linear` weights in place and return the model; `model.mx_report` says what was done.

    Layer after layer: beside the model, only one layer is held twice. Layers named in `skip` stay dense, and so do those
    whose input size is no multiple of 32, experts and other modules that are no `nn.Linear`, and the output head, unless
    `lm_head` gives it a format (a tied head is untied by that). `format="bf16"` is no compression: bfloat16 weights in the
    kernels' tiles. `measure=False` leaves out the error of each layer.

    Raises ValueError, before anything is changed, for an unknown format or rule, a model that another method or an earlier
    call has quantised, weights that are not finite (it names the layer), and a model in which nothing can be compressed.
    """
    check_rule(scale_rule)
    skip = check_skip(skip)
    choices = plan(model, format, skip, lm_head)
    _check(model, choices)
    report = CompressionReport()
    console = Console(stderr=True)
    for _ in track(range(len(choices)), "Compressing", console=console, transient=True, disable=not console.is_terminal):
        report.layers.append(compress_layer(model, choices.pop(0), scale_rule, measure))  # nothing else holds the dense one
    untie(model)
    model.mx_report = report
    if hasattr(model, "config") and hasattr(model, "save_pretrained"):
        from .quantizer import MXConfig, attach

        attach(model, MXConfig(get_format(format).name, scale_rule, skip, lm_head and get_format(lm_head).name))
    return model


def dequantize(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Swap a model's MX layers for dense ones, in `dtype` (the model's own without it), in place, and return the model."""
    names = [name for name, module in model.named_modules() if isinstance(module, MXLinear)]
    if not names:
        raise ValueError("model has no MX layers to dequantise.")
    given, dtype = dtype, getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if given is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={given!r} is no floating-point type of torch: take float32, bfloat16 or float16.")
    dtype = dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for name in names:
        replace(model, name, model.get_submodule(name).to_linear(dtype))
    _forget(model)
    return model


def _check(model: nn.Module, choices: list[Choice]) -> None:
    if any(isinstance(choice.module, MXLinear) for choice in choices):
        raise ValueError("model has MX layers already; mx.dequantize(model) takes them out.")
    method = getattr(getattr(model, "config", None), "quantization_config", None)
    if method is not None or getattr(model, "hf_quantizer", None) is not None:
        name = getattr(method, "quant_method", None) or (method or {}).get("quant_method", "another method")
        raise ValueError(f"model is quantised by {getattr(name, 'value', name)}; load it without that to compress it with MX.")
    if getattr(model, "peft_config", None):
        raise ValueError("model has adapters on it: compress the model they are for and add them after that, or merge them first.")
    check_some(choices)
    for choice in choices:
        if choice.format is None:
            continue
        weight = choice.module.weight
        if weight.is_meta:
            raise ValueError(f"{choice.name}.weight is on the meta device: load the model's weights before compressing it.")
        if not bool(weight.isfinite().all()):
            raise ValueError(NOT_FINITE.format(f"{choice.name}.weight"))


def compress_layer(model: nn.Module, choice: Choice, scale_rule: str, measure: bool) -> LayerReport:
    """Swap one layer, if it has a format, and say what that did."""
    if choice.format is None:
        return dense_report(choice.name, choice.module, choice.reason)
    linear, note = choice.module, ""
    before = linear.weight.numel() * linear.weight.element_size()
    if _is_tied(model, linear):
        before, note = 0, "untied from the embedding, which stays dense"
    packed = quantize(linear.weight, choice.format, scale_rule)
    error = weight_error(linear.weight.detach(), packed) if measure else (None, None)
    replace(model, choice.name, MXLinear.from_packed(packed, linear))
    return LayerReport(choice.name, tuple(linear.weight.shape), choice.format.name, before, packed.nbytes, *error, note)


def dense_report(name: str, module: nn.Module, reason: str) -> LayerReport:
    """A module that stays as it is, for that reason."""
    weights = [p for p in module._parameters.values() if p is not None and p.dim() >= 2]
    size = sum(p.numel() * p.element_size() for p in weights)
    return LayerReport(name, tuple(weights[0].shape), None, size, size, note=reason)


def _is_tied(model: nn.Module, linear: nn.Linear) -> bool:
    """Whether the layer's weight is the embedding's, too."""
    return any(module.weight is linear.weight for module in model.modules() if isinstance(module, nn.Embedding))


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of that name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def untie(model: nn.Module) -> None:
    """A compressed head no longer shares the embedding's weight: the config must not say that it does."""
    find = getattr(model, "get_output_embeddings", None)
    if find is None or not isinstance(find(), MXLinear):
        return
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


def _forget(model: nn.Module) -> None:
    """Take away what `compress` left beside the layers; a model with adapters hands it to the model they are for."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if hasattr(model, "mx_report"):
        del model.mx_report
    if hasattr(model, "config") and hasattr(model, "save_pretrained"):
        from .quantizer import detach

        detach(model)
