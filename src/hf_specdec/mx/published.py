"""Checkpoints whose layers other libraries have put into MX formats: read as they are, bit for bit, and without these libraries. What they say of rounding activations is
left out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from .formats import BLOCK, DENSE, Format, get_format
from .in_place import on_gpu
from .plan import Choice, heads_of
from .quantizer import MXConfig
from .stored import stored_tensors

WRITERS = {
    "compressed-tensors": "compressed-tensors (LLM Compressor)", "modelopt": "NVIDIA's Model Optimizer", "quark": "AMD Quark", "auto-round": "AutoRound", "mxfp8": "its authors",
}  # fmt: skip
CODES, SCALES = ("weight_packed", "weight"), ("weight_scale", "weight_scale_inv")  # of a layer, as the writers name them
BESIDE = {*CODES, *SCALES, "bias", "input_scale", "output_scale", "weight_shape"}  # all that a layer may have: others (zero points, factors of inputs) change what it computes
TURNED = ("transform_config", "rotation_config", "hadamard_config")  # in a quantization_config: what is multiplied with inputs as they come
NUMBERS = ("F64", "F32", "F16", "BF16")
TYPES = {"U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": getattr(torch, "float8_e8m0fnu", None)}
FP8 = {"F8_E4M3": "mxfp8_e4m3", "F8_E5M2": "mxfp8_e5m2"}


@dataclass(frozen=True)
class Stored:
    """How a checkpoint holds a layer: its format, and the types of its codes and of its scales."""

    format: Format
    codes: torch.dtype
    scales: torch.dtype


class PublishedConfig(MXConfig):
    """Layers as such a checkpoint has them; what it holds as numbers stays that, on a CPU in tiles. Saved, it is an `MXConfig`. origin: the checkpoint's quantization_config."""

    def __init__(self, origin: dict, **unknown):
        super().__init__("bf16")
        self.origin = origin
        for key in TURNED:
            if origin.get(key):
                raise ValueError(f"its layers turn their inputs first ({key} in its quantization_config): only {writer(origin)} computes that.")

    def look(self, model: nn.Module, files: Iterable[str | os.PathLike], device_map: Any) -> None:
        found = dict(_layers(model, stored_tensors(files), _six_bits(self.origin)))
        if not found:
            raise ValueError(f"no layer of it is in an MX format as {writer(self.origin)} writes them: load it with from_pretrained.")
        of_head = heads_of(model)
        body = Counter(own.format.name for name, own in found.items() if id(model.get_submodule(name)) not in of_head)
        self.stored = found
        self.format = body.most_common(1)[0][0] if body else next(iter(found.values())).format.name
        linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
        dense = next((name for name, own in DENSE.items() if own.dtype == model.dtype), None)
        chosen = {name: found[name].format.name if name in found else None if on_gpu(name, device_map) else dense for name in linears}
        self.skip = [name for name, own in chosen.items() if own is None]
        self.lm_head = next((own for name, own in chosen.items() if id(linears[name]) in of_head), None)
        self.layer_formats = {name: own for name, own in chosen.items() if own not in (None, self.format) and id(linears[name]) not in of_head}

    def holds(self, choice: Choice) -> bool:
        if choice.name in self.stored and choice.format is None:
            raise ValueError(f"{choice.name} is in {self.stored[choice.name].format.name} in the checkpoint, and has to stay dense here: {choice.reason}.")
        return choice.name in self.stored

    def await_bytes(self, name: str, layer: nn.Module) -> None:
        own = self.stored[name]
        layer.weight, layer.weight_scale = (nn.Parameter(torch.empty(part.shape, dtype=kind, device="meta"), requires_grad=False)
                                            for part, kind in ((layer.weight, own.codes), (layer.weight_scale, own.scales)))

    def conversions(self) -> list[WeightRenaming]:
        return [WeightRenaming(rf"\.{own}$", f".{names[-1] if names is CODES else names[0]}") for names, own in ((CODES, CODES[0]), (SCALES, SCALES[1]))]


def published(config: Any) -> dict | None:
    """The quantization_config of a model's config, if it says that a library in `WRITERS` has written the checkpoint in blocks of 32; None otherwise."""
    origin = getattr(config, "quantization_config", None)
    origin = origin if isinstance(origin, dict) or origin is None else origin.to_dict()
    method = origin and getattr(origin.get("quant_method"), "value", origin.get("quant_method"))
    return origin if method in WRITERS and _says_mx(method, origin) else None


def writer(origin: dict) -> str:
    return WRITERS[getattr(origin["quant_method"], "value", origin["quant_method"])]


def _says_mx(method: str, origin: dict) -> bool:
    """Whether such a config names an MX format: `mxfp4-pack-quantized`, `MXFP8`, `mx_fp4`, or, of Quark's, scales in E8M0."""
    words = [str(word).lower().replace("_", "") for word in _words(origin)]
    return method == "mxfp8" or any("mxfp" in word or word in ("e8m0", "mxfp") for word in words)


def _words(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        for value in part.values():
            yield from _words(value)
    elif isinstance(part, (list, tuple)):
        for value in part:
            yield from _words(value)
    elif isinstance(part, str):
        yield part


def _six_bits(origin: dict) -> str:
    """The format of six bits that the config means."""
    return "mxfp6_e3m2" if any("e3m2" in word.lower() for word in _words(origin)) else "mxfp6_e2m3"


def _layers(model: nn.Module, tensors: dict[str, tuple[str, tuple[int, ...]]], six: str) -> Iterator[tuple[str, Stored]]:
    """The model's layers that are in MX formats. ValueError for one that is neither in such a format nor in numbers."""
    modules, parts = dict(model.named_modules()), {}
    for name, entry in _by_names_of(model, tensors).items():
        owner, _, own = name.rpartition(".")
        parts.setdefault(owner, {})[own] = entry
    for name, own in parts.items():
        kind, shape = next((own[part] for part in CODES if part in own), ("F32", ()))
        if kind in NUMBERS:
            continue
        module = modules.get(name)
        if type(module) is not nn.Linear:
            what = "no module of the model" if module is None else f"{type(module).__name__}"
            raise ValueError(f"{name}: its weight is {kind} {list(shape)} in the checkpoint, and it is {what}; nn.Linear layers are read.")
        yield name, _stored(name, module, own, six)


def _stored(name: str, linear: nn.Linear, own: dict[str, tuple[str, tuple[int, ...]]], six: str) -> Stored:
    n, k = linear.out_features, linear.in_features
    (kind, shape), (of_scales, scales) = (next((own[part] for part in parts if part in own), ("nothing", ())) for parts in (CODES, SCALES))
    names = [FP8[kind]] if kind in FP8 else ["mxfp4_e2m1", six] if kind in ("U8", "I8") else []
    fitting = [fmt for fmt in map(get_format, names) if k % BLOCK == 0 and shape == (n, k * fmt.bits // 8)]
    if not fitting or of_scales not in ("U8", "F8_E8M0") or scales != (n, k // BLOCK):
        raise ValueError(f"{name}: its weight of shape {[n, k]} is {kind} {list(shape)} with scales {of_scales} {list(scales)} in the checkpoint, which is no MX format: blocks of "
                         f"{BLOCK} have scales U8 or F8_E8M0 {[n, k // BLOCK]}. Load it with from_pretrained.")
    if strange := sorted(own.keys() - BESIDE):
        raise ValueError(f"{name} has {', '.join(strange)} beside its weight in the checkpoint, which changes what it computes. Load it with from_pretrained.")
    return Stored(fitting[0], TYPES[kind], TYPES[of_scales])


def _by_names_of(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors by the names that they have in the model, as transformers gives them: known of weights, and so of what stands beside one."""
    renamings = [own for own in get_model_conversion_mapping(model) if isinstance(own, WeightRenaming)]
    state, prefix, named = model.state_dict(), model.base_model_prefix, {}
    for name, entry in tensors.items():
        owner, _, own = name.rpartition(".")
        weight = rename_source_key(f"{owner}.weight", renamings, [], prefix, state)[0]
        named[f"{weight.removesuffix('.weight')}.{own}"] = entry
    return named

