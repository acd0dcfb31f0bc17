"""What transformers does with a dense weight of a checkpoint that is compressed as it is read."""

from __future__ import annotations

import torch
from transformers.core_model_loading import ConversionOps

from .experts import PREFIX, ExpertWeights
from .swap import NOT_FINITE


class Compress(ConversionOps):
    """Weights as they are read from the checkpoint, one, or several that it has in one tensor: to codes and scales."""

    def __init__(self, quantizer):
        self.quantizer = quantizer

    def convert(self, input_dict, full_layer_name=None, model=None, missing_keys=None, **kwargs) -> dict[str, torch.Tensor]:
        if len(input_dict) > 1:  # by their whole names, which may be of layers that stay dense
            parts = (self.convert({name: part}, name, model, missing_keys) if self.quantizer.param_needs_quantization(model, name) else {name: part}
                     for name, part in input_dict.items())
            return {name: part for own in parts for name, part in own.items()}
        weight = next(iter(input_dict.values()))
        weight = weight[0] if isinstance(weight, list) else weight
        module_name, _, tensor = full_layer_name.rpartition(".")
        if not bool(weight.isfinite().all()):  # an error raised here would end in a log: it waits until all is read
            self.quantizer.failure = self.quantizer.failure or NOT_FINITE.format(full_layer_name)
            weight = torch.zeros_like(weight)
        owner = model.get_submodule(module_name)
        if PREFIX + tensor in owner._modules:
            return self._experts(ExpertWeights(owner, tensor), weight, full_layer_name, module_name, missing_keys)
        packed = self.quantizer.pack(module_name, weight)
        return {full_layer_name: packed.codes, f"{module_name}.weight_scale": packed.scales}

    def _experts(self, weights: ExpertWeights, values: torch.Tensor, name: str, owner: str, missing: set[str]) -> dict[str, torch.Tensor]:
        """One projection of experts: the bytes of the matrix, which takes the parameter's place."""
        weights.owner.register_parameter(weights.name, torch.nn.Parameter(values, requires_grad=False))
        packed = self.quantizer.pack(name, weights.weight, weights.shape)
        del weights.owner._parameters[weights.name]
        missing.discard(name)
        matrix = f"{owner}.{PREFIX}{weights.name}"
        return {f"{matrix}.weight": packed.codes, f"{matrix}.weight_scale": packed.scales}
