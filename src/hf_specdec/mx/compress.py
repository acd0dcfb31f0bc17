"""`compress`: all of a loaded model's Linear layers, in place."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from torch import nn

from ..hints import check_bool, what
from .formats import DEFAULT_FORMAT, DEFAULT_RULE, Format, check_activations, check_rule
from .in_place import calibration_for, check_weights, check_whole, compress_in_place
from .linear import MXMatrix
from .plan import Choice, check_skip, check_some, plan
from .quantizer import MXConfig, attach


def compress(
    model: nn.Module,
    format: str | Format = DEFAULT_FORMAT,
    skip: Iterable[str] = (),
    scale_rule: str = DEFAULT_RULE,
    lm_head: str | Format | None = None,
    measure: bool = True,
    activations: str | None = None,
    calibration: Iterable | None = None,
    layer_formats: Mapping[str, str | Format] | None = None,
) -> nn.Module:
    """Compress a model's `nn.Linear` weights in place and return the model; `model.mx_report` says what was done.

    Layer after layer: beside the model, only one layer is held twice. Layers named in `skip` stay dense, and so do those
    whose input size is no multiple of 32, modules that are no `nn.Linear` (but for experts as transformers holds them, all in one
    parameter: each projection counts as a layer, "experts.down_proj" say), and the output head, unless
    `lm_head` gives it a format (a tied head is untied by that). `format="bf16"` is no compression: bfloat16 weights in the
    kernels' tiles. `measure=False` leaves out the error of each layer. `activations="mxint8"` has the layers' inputs rounded to MXINT8
    (a head's, too, but for formats that do not go with it, "bf16" say): passes over several tokens get faster, at the price of a further error. On a CPU, attention of "sdpa" becomes `hf_specdec_few`: the
    same numbers but for rounding, by the kernels where a pass has few tokens (`model.set_attn_implementation("sdpa")` undoes it), and RMS norms are made
    by the library (`dequantize` undoes it).

    layer_formats: module names, matched as those of `skip`, and a format for what they name: `{"down_proj": "mxint8", "*.layers.0.*": "bf16"}`. Of the names that
    fit a layer the last one counts, `skip` comes before all of them, and the head's format is `lm_head`'s alone. Where a layer's format does not go with
    `activations`, its inputs are multiplied as they are. `mx.choose_formats` makes such a dict for a number of bits.

    calibration: sequences of token ids, int64 or int32 `[n]` or `[1, n]` or lists, that the model reads, so that rounding makes up for its errors on what the
    layers are given (GPTQ, Frantar et al. 2022, arXiv 2210.17323); `hf_specdec.mx.calibration` has text that the model writes itself. The format stays as it is.
    Interrupted after the first layer was swapped, some layers are compressed and some not: load the model again.

    Raises ValueError, before anything is changed, for an unknown format or rule, a `measure` that is no bool, activations that do not go with the format, a model that another method or an earlier
    call has quantised, weights that are not finite (it names the layer), a model in which nothing can be compressed, and calibration that is empty, not
    token ids of this model or too long, or where nothing is rounded; TypeError for calibration of a model that takes no token ids.
    """
    check_is_model(model)
    check_rule(scale_rule)
    check_bool("measure", measure)
    check_activations(activations, format)
    skip = check_skip(skip)
    choices = plan(model, format, skip, lm_head, layer_formats=layer_formats)
    check_model(model, choices)
    config = MXConfig(format, scale_rule, skip, lm_head, activations=activations, layer_formats=layer_formats)
    config.note(choices)
    sequences = None if calibration is None else calibration_for(model, calibration, choices)
    compress_in_place(model, choices, scale_rule, activations, sequences, measure)
    if hasattr(model, "config") and hasattr(model, "save_pretrained"):
        attach(model, config)
    return model


def check_is_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a model, got {what(model)}; load one with from_pretrained.")
    if isinstance(model, nn.Linear):
        raise TypeError("model: a Linear by itself has no place where another layer could be put: compress the model that it is in, or nn.Sequential(linear).")


def check_model(model: nn.Module, choices: list[Choice], later: Container[str] = ()) -> None:
    """ValueError for a model that cannot be compressed as these choices say. later: names of layers that get their numbers in time."""
    formats = {choice.module.format for choice in choices if isinstance(choice.module, MXMatrix)}
    if formats:
        what = "is in tiles" if all(fmt.is_dense for fmt in formats) else "has MX layers"
        raise ValueError(f"model {what} already ({', '.join(sorted(fmt.name for fmt in formats))}); mx.dequantize(model) makes it dense again.")
    method = getattr(getattr(model, "config", None), "quantization_config", None)
    if method is not None or getattr(model, "hf_quantizer", None) is not None:
        name = getattr(method, "quant_method", None) or (method or {}).get("quant_method", "another method")
        name = getattr(name, "value", name)
        if name != "gguf" or any(type(part).__name__.startswith("Gguf") for part in model.modules()):  # transformers reads most GGUF files as numbers
            raise ValueError(f"model is quantised by {name}; load it without that to compress it with MX.")
    if getattr(model, "peft_config", None):
        raise ValueError("model has adapters on it: compress the model they are for and add them after that, or merge them first.")
    check_whole(model)
    check_some(choices)
    check_weights([choice for choice in choices if choice.name not in later])
