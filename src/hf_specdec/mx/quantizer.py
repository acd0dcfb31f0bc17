"""The quantisation method "mx" inside transformers: `from_pretrained(quantization_config=MXConfig(...))`, saving and loading."""

from __future__ import annotations

import copy

import torch
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from ..method import METHOD
from .beside import use_kernels
from .config import EXPERTS, MXConfig
from .experts import PREFIX, ExpertMatrix, ExpertWeights
from .fused import keep_apart
from .in_place import OFFLOADED, calibration_for, check_devices, check_weights, check_whole, compress_in_place, leave_experts_dense
from .linear import MXLinear, MXMatrix
from .packed import PackedMatrix, quantize
from .plan import Choice, check_some, plan
from .reading import Compress
from .report import CompressionReport, LayerReport, weight_error
from .stored import as_bytes, check_files, check_loaded
from .swap import FLOAT64, compress_layer, dense_report, dequantize, replace
from .ties import apart, share, untie

PACKED = "calibration: this checkpoint is compressed already, and read as it is. Leave calibration out, or load the checkpoint that it was made of."


@register_quantizer(METHOD)
class MXQuantizer(HfQuantizer):
    """Swaps layers before the weights are read, compresses each one as it is read, and puts it into the kernels' order. With calibration the layers stay
    as they are until all weights are read."""

    requires_calibration = False
    quantization_config: MXConfig

    def __init__(self, quantization_config, **kwargs):
        super().__init__(copy.deepcopy(quantization_config), **kwargs)  # it is written to; the caller's may serve other models
        self.formats, self.dense = {}, {}  # of the layers: name to format, or to the choice that gives it none
        self.held: set[str] = set()  # those whose codes and scales the checkpoint has
        self.reports: dict[str, LayerReport] = {}
        self.tied_head = None
        self.calibrating: tuple[list[Choice], list[torch.Tensor]] | None = None  # the layers and the texts, until the weights are there
        self.failure: str | None = None

    def validate_environment(self, *args, **kwargs):
        if self.pre_quantized and self.quantization_config.calibration is not None:
            raise ValueError(PACKED)

    def update_dtype(self, dtype):
        if dtype == torch.float64 and not self.quantization_config.dequantize:
            raise ValueError(FLOAT64.format(f"dtype={dtype}"))
        return dtype

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        module_name, _, tensor = param_name.rpartition(".")
        module = model.get_submodule(module_name)
        if isinstance(module, ExpertMatrix) or module_name in self.held:
            return False
        return tensor == "weight" and isinstance(module, MXMatrix) or tensor in module._parameters and PREFIX + tensor in module._modules

    def get_quantize_ops(self) -> Compress:
        return Compress(self)

    def update_weight_conversions(self, weight_conversions: list, *model) -> list:
        return super().update_weight_conversions(self.quantization_config.converters(weight_conversions), *model)

    def get_weight_conversions(self) -> list:
        return self.quantization_config.conversions()

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, device_map=None, **kwargs):
        config = self.quantization_config
        config.look(model, checkpoint_files or (), device_map)
        experts = not self.pre_quantized or config.version >= EXPERTS
        choices = plan(model, config.format, config.skip, config.lm_head, self.pre_quantized, config.layer_formats, experts)
        self.held = {choice.name for choice in choices if self.pre_quantized or config.holds(choice)}
        if not self.pre_quantized:
            choices = leave_experts_dense(choices, device_map, self.held)
            check_some(choices)
            config.note(choices)
        check_devices(choices, device_map)
        if config.calibration is not None:
            self.calibrating, config.calibration = (choices, calibration_for(model, config.calibration, choices)), None
            return model
        self.dense = {choice.name: choice for choice in choices if choice.format is None}
        self.order = [choice.name for choice in choices]
        self.formats = {choice.name: choice.format for choice in choices if choice.format is not None}
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        for choice in choices:
            if choice.format is None:
                continue
            held = choice.name in self.held
            if f"{choice.name}.weight" in tied and not held:
                self.tied_head = choice  # compressed after loading, when it has its weights
                continue
            tied.pop(f"{choice.name}.weight", None)  # T5's config says so of every checkpoint
            linear, activations = choice.module, config.activations if choice.format.fits_int8 else None
            if isinstance(linear, ExpertWeights):
                layer = ExpertMatrix.for_weights(linear, choice.format, activations)
                if held:
                    config.await_bytes(choice.name, layer)
                self._swap_experts(linear, layer, held)
                continue
            layer = MXLinear(linear.in_features, linear.out_features, linear.bias is not None, choice.format, "meta", linear.weight.dtype, activations)
            if held:
                config.await_bytes(choice.name, layer)
                layer._is_hf_initialized = True  # nothing is made up for what a checkpoint lacks: _check_loaded says so
            else:
                layer.weight = linear.weight  # until the real one is read: transformers casts to this one's dtype
            replace(model, choice.name, layer)
        if self.pre_quantized:
            check_files(model, checkpoint_files or ())
        config.check_stored(model, checkpoint_files or ())
        return model

    def _swap_experts(self, weights: ExpertWeights, layer: ExpertMatrix, held: bool) -> None:
        """A checkpoint of dense experts is read into the parameter, and what it becomes into the matrix (`Compress`)."""
        layer._is_hf_initialized = weights.owner._is_hf_initialized = True
        (weights.put if held else weights.take)(layer)

    def _process_model_after_weight_loading(self, model, **kwargs):
        check_whole(model)
        own = {name for each in self.get_weight_conversions() for name in each._original_target_patterns}
        if own:  # saving would undo them
            model._weight_conversions = [each for each in model._weight_conversions or () if own.isdisjoint(each._original_target_patterns)
                                         and not any(f".{PREFIX}" in name for name in each._original_target_patterns)]
        if self.calibrating is not None:
            return self._calibrate(model)
        if self.failure:
            raise ValueError(self.failure)
        for name, module in model.named_modules():
            own = name.replace(f".{PREFIX}", ".")
            if isinstance(module, MXMatrix) and own not in self.held and module.weight.is_floating_point() and not module.weight.is_meta:
                self._compress_new(name, module)
            elif isinstance(module, MXMatrix):
                if own in self.held and not self.pre_quantized:
                    as_bytes(module)
                check_loaded(name, module, self.pre_quantized)
                self._note_published(own, module)
                module.prepare()
        if self.tied_head is not None:
            head, self.tied_head = self.tied_head, None
            self.reports[head.name] = compress_layer(
                model, head, self.quantization_config.scale_rule, True, self.quantization_config.activations
            )
            untie(model)
        if self.pre_quantized:
            untie(model)  # T5's config class says tied whatever the file says
            share(model)
        if self.quantization_config.dequantize:
            return dequantize(model)
        use_kernels(model)
        if not self.pre_quantized:
            model.mx_report = CompressionReport([self._report(name) for name in self.order if name in self.reports or name in self.dense])
        self.reports, self.dense = {}, {}  # they hold on to modules
        return model

    def _calibrate(self, model):
        (choices, sequences), self.calibrating = self.calibrating, None
        check_weights(choices, OFFLOADED)
        for part in model.modules():  # an encoder may have a copy of the config, and the text with it
            if isinstance(getattr(getattr(part, "config", None), "quantization_config", None), MXConfig):
                part.config.quantization_config = self.quantization_config
        compress_in_place(model, choices, self.quantization_config.scale_rule, self.quantization_config.activations, sequences)
        return model

    def _note_published(self, name: str, layer: MXMatrix) -> None:
        if name in self.held and not self.pre_quantized:
            size = layer.weight.numel() + layer.weight_scale.numel()
            shape = layer.shape if isinstance(layer, ExpertMatrix) else (layer.out_features, layer.in_features)
            self.reports[name] = LayerReport(name, shape, layer.format.name, size, size, note="as it was published")

    def _compress_new(self, name: str, layer: MXMatrix) -> None:
        """A layer that the checkpoint lacks (a new cross-attention): transformers has made its weight, and says so."""
        layer.set_packed(self.pack(name, layer.weight.detach()))

    def pack(self, name: str, weight: torch.Tensor, shape: tuple[int, ...] | None = None) -> PackedMatrix:
        """One layer's weight, compressed, and reported. shape: what the report is to say, if not the weight's."""
        fmt = self.formats[name]
        packed = quantize(weight, fmt, self.quantization_config.scale_rule)
        self.reports[name] = LayerReport(
            name, shape or tuple(weight.shape), fmt.name, weight.numel() * weight.element_size(), packed.nbytes, *weight_error(weight, packed)
        )
        return packed

    def _report(self, name: str) -> LayerReport:
        return self.reports.get(name) or dense_report(name, self.dense[name].module, self.dense[name].reason)

    def _dequantize(self, model, dtype=None):
        return dequantize(model, dtype)

    def get_state_dict_and_metadata(self, model):
        keep_apart(model)
        return apart(model), {}

    def is_serializable(self, *args, **kwargs) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on top are; the compressed weights themselves are constants."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def attach(model, config: MXConfig) -> None:
    """Leave with a model that was compressed in memory what `save_pretrained` writes."""
    quantizer = MXQuantizer(config, pre_quantized=True)
    model.hf_quantizer, model.config.quantization_config = quantizer, quantizer.quantization_config
    model.is_quantized, model.quantization_method = True, METHOD
    model.config._is_quantized = True
