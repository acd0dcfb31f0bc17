"""A compressed model in the layout of compressed-tensors, which LLM Compressor writes and vLLM, SGLang and transformers read: the same codes and scales."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from ..folders import written_whole
from ..hints import what
from .experts import PREFIX, ExpertMatrix, as_parameter
from .formats import BLOCK, Format, get_format
from .linear import MXMatrix

LAYOUT = "compressed-tensors"
FORMATS = {"mxfp4_e2m1": "mxfp4-pack-quantized", "mxfp6_e2m3": "mxfp6-pack-quantized", "mxfp8_e4m3": "mxfp8-quantized"}  # as that library calls them
MERGES = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])  # how transformers makes one tensor of a checkpoint's experts
VERSION = "0.20.1"  # of compressed-tensors, whose reader was asked


def publish(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Save a compressed model in the layout of compressed-tensors in `folder`, which is new or empty. Layers in tiles become dense; experts lie one by one, as in their
    family's checkpoints.

    Raises ValueError, before anything is written, for a folder that is not empty, a model without MX layers, layers in other formats than MXFP4, MXFP6 E2M3 and MXFP8 E4M3, or
    with rounded activations, one that is not in bfloat16, and experts of which transformers does not say how checkpoints hold them; TypeError for what is no model.
    """
    check(model)
    with written_whole(Path(folder)) as partial:
        state = revert_weight_conversion(model, _tensors(model))
        save_torch_state_dict(state, partial, metadata={"format": "pt"})
        config = copy.deepcopy(model.config)
        config.quantization_config = _config(model)
        config.save_pretrained(partial)
        if model.can_generate():
            model.generation_config.save_pretrained(partial)


def check(model: PreTrainedModel) -> None:
    """What `publish` refuses of a model."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers model, got {what(model)}.")
    layers = _packed(model)
    if not layers:
        raise ValueError("model has no MX layers: compress it first, mx.compress(model, 'mxfp8_e4m3'), or save it with save_pretrained.")
    check_formats(layer.format for layer in layers.values())
    check_dtype(model)
    rounded = next((name for name, layer in layers.items() if layer.activations), None)
    if rounded is not None:
        raise ValueError(f"activations: the inputs of {rounded} are rounded to MXINT8, which compressed-tensors does not know: compress the model without activations=.")
    for name, layer in layers.items():
        if isinstance(layer, ExpertMatrix):
            _sources(model, name)


def check_formats(formats: Iterable[Format | str]) -> None:
    """ValueError for formats that the layout does not know."""
    other = sorted({get_format(each).name for each in formats} - FORMATS.keys() - {"bf16", "fp32"})
    if other:
        raise ValueError(f"{LAYOUT} knows no {' and no '.join(other)}; it knows {', '.join(FORMATS)}.")


def check_dtype(model: PreTrainedModel) -> None:
    """ValueError for a model in another dtype than what compressed-tensors unpacks to."""
    if model.dtype != torch.bfloat16:
        raise ValueError(f"model is in {model.dtype}: compressed-tensors unpacks to bfloat16, and the rest has to be that, too. Load it with dtype=torch.bfloat16 (--dtype bfloat16).")


def _packed(model: nn.Module) -> dict[str, MXMatrix]:
    """Its layers in MX formats, without those in tiles, by the name of what they stand for."""
    return {name.replace(f".{PREFIX}", "."): layer for name, layer in model.named_modules() if isinstance(layer, MXMatrix) and not layer.format.is_dense}


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's tensors as such a checkpoint has them, by the model's names."""
    left_out, made = set(getattr(model, "all_tied_weights_keys", None) or ()), {}
    for name, layer in model.named_modules():
        if isinstance(layer, MXMatrix):
            left_out |= {f"{name}.weight", f"{name}.weight_scale"}
            own = name.replace(f".{PREFIX}", ".")
            if not layer.format.is_dense:
                made |= _parts(model, own, layer)
            elif isinstance(layer, ExpertMatrix):
                made[own] = as_parameter(model.get_submodule(own.rpartition(".")[0]), layer, model.dtype)
            else:
                made[f"{own}.weight"] = layer.dequantize(model.dtype)
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in left_out} | made


def _parts(model: PreTrainedModel, name: str, layer: MXMatrix) -> Iterator[tuple[str, torch.Tensor]]:
    packed = layer.packed()
    if not isinstance(layer, ExpertMatrix):
        yield from _stored(name, layer.format, packed.codes, packed.scales)
        return
    places, (count, n, _) = _sources(model, name), layer.shape
    codes, scales = (part.view(count, len(places), n // len(places), -1) for part in (packed.codes, packed.scales))
    for expert in range(count):
        for i, place in enumerate(places):
            yield from _stored(place.replace("*", str(expert)), layer.format, codes[expert, i].clone(), scales[expert, i].clone())


def _stored(name: str, fmt: Format, codes: torch.Tensor, scales: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield (f"{name}.weight", codes.view(torch.float8_e4m3fn)) if fmt.bits == 8 else (f"{name}.weight_packed", codes)
    yield f"{name}.weight_scale", scales


def _sources(model: PreTrainedModel, name: str) -> list[str]:
    """The names, with * for an expert's number, of what transformers merges into this projection of experts."""
    for own in get_model_conversion_mapping(model):
        if isinstance(own, WeightConverter) and name.endswith(own._original_target_patterns[0]) and [type(each).__name__ for each in own.operations] in MERGES:
            begin = name.removesuffix(own._original_target_patterns[0])
            return [begin + source.removesuffix(".weight") for source in own._original_source_patterns]
    raise ValueError(f"{name}: checkpoints of {type(model).__name__} do not hold its experts one by one, and compressed-tensors knows no others: compress it with skip=('experts',).")


def _config(model: PreTrainedModel) -> dict:
    """What config.json says: a group of layers for each format."""
    layers = _packed(model)
    formats = sorted({layer.format.name for layer in layers.values()})
    targets = {name: [own for own, layer in layers.items() if layer.format.name == name] if len(formats) > 1 else ["Linear"] for name in formats}
    groups = {f"group_{i}": {"targets": _names(model, targets[name], layers), "weights": _weights(get_format(name)), "input_activations": None, "output_activations": None,
                             "format": FORMATS[name]} for i, name in enumerate(formats)}
    ignored = [name for name, module in model.named_modules() if name not in layers and _multiplies(module)]
    return {
        "quant_method": LAYOUT, "version": VERSION, "quantization_status": "compressed", "format": FORMATS[formats[0]] if len(formats) == 1 else "mixed-precision",
        "config_groups": groups, "ignore": ignored, "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}, "global_compression_ratio": None,
    }  # fmt: skip


def _multiplies(module: nn.Module) -> bool:
    """Whether a module may be a Linear layer to others: routers, too, which transformers has classes for."""
    weight = module._parameters.get("weight")
    return isinstance(module, nn.Linear) or weight is not None and weight.dim() == 2 and not isinstance(module, (nn.Embedding, ExpertMatrix))


def _names(model: PreTrainedModel, targets: list[str], layers: dict[str, MXMatrix]) -> list[str]:
    """Targets, where experts stand for one layer each."""
    named = []
    for name in targets:
        places = _sources(model, name) if isinstance(layers.get(name), ExpertMatrix) else [name]
        named += [place.replace("*", str(expert)) for expert in range(layers[name].experts) for place in places] if isinstance(layers.get(name), ExpertMatrix) else places
    return named


def _weights(fmt: Format) -> dict:
    return {"num_bits": fmt.bits, "type": "float", "strategy": "group", "group_size": BLOCK, "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8"}
