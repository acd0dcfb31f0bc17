"""The quantisation method "mx" inside transformers: `from_pretrained(quantization_config=MXConfig(...))`, saving and loading."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .formats import DEFAULT_FORMAT, DEFAULT_RULE, check_rule, get_format
from .linear import MXLinear
from .packed import quantize
from .plan import plan
from .report import CompressionReport, LayerReport, weight_error

METHOD = "mx"
VERSION = 1  # of what is saved: the packing and the names of the tensors


@register_quantization_config(METHOD)
class MXConfig(QuantizationConfigMixin):
    """How a model's Linear layers are compressed; the arguments are those of `mx.compress`.

    `dequantize=True` gives a dense model of a compressed checkpoint. Raises ValueError for unknown formats, rules and options,
    and for a checkpoint that a newer version of this package has written.
    """

    def __init__(
        self,
        format: str = DEFAULT_FORMAT,
        scale_rule: str = DEFAULT_RULE,
        skip: Iterable[str] = (),
        lm_head: str | None = None,
        dequantize: bool = False,
        version: int = VERSION,
        **unknown,
    ):
        unknown.pop("quant_method", None)
        if unknown:
            known = "format, scale_rule, skip, lm_head, dequantize"
            raise ValueError(f"MXConfig has no option {', '.join(map(repr, unknown))}. It has: {known}.")
        if not isinstance(version, int) or version < 1:
            raise ValueError(f"version={version!r} is no version of MX checkpoints; this package writes {VERSION}.")
        if version > VERSION:
            raise ValueError(
                f"This checkpoint has MX format version {version}; this package reads up to {VERSION}. Upgrade hf-specdec."
            )
        self.quant_method = METHOD
        self.format = get_format(format).name
        self.scale_rule = check_rule(scale_rule)
        self.skip = list(skip)
        self.lm_head = None if lm_head is None else get_format(lm_head).name
        self.dequantize = bool(dequantize)
        self.version = version

    def to_dict(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "dequantize"}

    def get_loading_attributes(self) -> dict:
        return {"dequantize": self.dequantize}


@register_quantizer(METHOD)
class MXQuantizer(HfQuantizer):
    """Swaps layers before the weights are read, compresses each one as it is read, and puts it into the kernels' order."""

    requires_calibration = False
    quantization_config: MXConfig

    def __init__(self, quantization_config, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self.report = CompressionReport()
        self.tied_head = None

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        module_name, _, tensor = param_name.rpartition(".")
        return tensor == "weight" and isinstance(model.get_submodule(module_name), MXLinear)

    def get_quantize_ops(self) -> ConversionOps:
        return _Compress(self)

    def _process_model_before_weight_loading(self, model, **kwargs):
        config = self.quantization_config
        self.choices = plan(model, config.format, config.skip, config.lm_head)
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        for choice in self.choices:
            if choice.format is None:
                continue
            if f"{choice.name}.weight" in tied and not self.pre_quantized:
                self.tied_head = choice  # compressed after loading, when it has its weights
                continue
            linear = choice.module
            layer = MXLinear(
                linear.in_features, linear.out_features, linear.bias is not None, choice.format, "meta", linear.weight.dtype
            )
            if not self.pre_quantized:
                layer.weight = linear.weight  # until the real one is read: transformers casts to this one's dtype
            parent, _, child = choice.name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        from .compress import _compress_layer, _untie, dequantize

        if self.tied_head is not None:
            self.report.layers.append(_compress_layer(model, self.tied_head, self.quantization_config.scale_rule, True))
            _untie(model)
        for name, module in model.named_modules():
            if isinstance(module, MXLinear):
                _check_loaded(name, module)
                module.prepare()
        if self.quantization_config.dequantize:
            return dequantize(model)
        if not self.pre_quantized:
            self.report.layers += [
                LayerReport(c.name, (), None, 0, 0, note=c.reason) for c in self.choices if c.format is None
            ]
            model.mx_report = self.report
        return model

    def _dequantize(self, model, dtype=None):
        from .compress import dequantize

        return dequantize(model, dtype)

    def is_serializable(self, *args, **kwargs) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on top are; the compressed weights themselves are constants."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class _Compress(ConversionOps):
    """One weight as it is read from the checkpoint: to codes and scales."""

    def __init__(self, quantizer: MXQuantizer):
        self.quantizer = quantizer

    def convert(self, input_dict, full_layer_name=None, model=None, **kwargs) -> dict[str, torch.Tensor]:
        weight = next(iter(input_dict.values()))
        weight = weight[0] if isinstance(weight, list) else weight
        module_name = full_layer_name.rpartition(".")[0]
        fmt = next(c.format for c in self.quantizer.choices if c.name == module_name)
        try:
            packed = quantize(weight, fmt, self.quantizer.quantization_config.scale_rule)
        except ValueError as error:
            raise ValueError(f"{full_layer_name}: {error}") from error
        self.quantizer.report.layers.append(
            LayerReport(
                module_name, tuple(weight.shape), fmt.name, weight.numel() * weight.element_size(), packed.nbytes,
                *weight_error(weight, packed),
            )
        )  # fmt: skip
        return {full_layer_name: packed.codes, f"{module_name}.weight_scale": packed.scales}


def _check_loaded(name: str, module: MXLinear) -> None:
    for tensor in ("weight", "weight_scale"):
        value = getattr(module, tensor)
        if value.dtype != torch.uint8 or value.is_meta or not (value.numel() == 0 or getattr(value, "_is_hf_initialized", True)):
            raise ValueError(
                f"{name}.{tensor} was not in the checkpoint, or is no MX tensor there: it was not written by this package, or "
                "a file of it is missing."
            )


def attach(model, config: MXConfig) -> None:
    """Leave with a model that was compressed in memory what `save_pretrained` writes."""
    quantizer = MXQuantizer(config, pre_quantized=True)
    model.hf_quantizer, model.config.quantization_config = quantizer, config
    model.is_quantized, model.quantization_method = True, METHOD
    model.config._is_quantized = True


def detach(model) -> None:
    """Undo `attach`."""
    for owner, name in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = model.config._is_quantized = False


def load(auto_class, folder, dequantize: bool = False, **kwargs):
    """`auto_class.from_pretrained(folder, **kwargs)` for a compressed checkpoint, dense if `dequantize`.

    (transformers does not take `dequantize` from a `quantization_config` that is passed beside a compressed checkpoint.)
    """
    from transformers import AutoConfig

    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(folder)
    stored = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    if method != METHOD:
        raise ValueError(f"{folder} is not an MX checkpoint: its config has quantization method {method!r}.")
    config.quantization_config = {**(stored if isinstance(stored, dict) else stored.to_dict()), "dequantize": dequantize}
    return auto_class.from_pretrained(folder, config=config, **kwargs)
