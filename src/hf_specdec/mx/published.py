"""Checkpoints whose layers other libraries have put into MX formats: read as they are, bit for bit, and without these libraries. What they say of rounding activations is
left out."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from .blocks import Rows
from .config import MXConfig
from .experts import PREFIX, ExpertWeights
from .formats import BLOCK, DENSE, Format, get_format
from .in_place import on_gpu
from .plan import Choice, heads_of, projections
from .stored import stored_tensors

WRITERS = {
    "compressed-tensors": "compressed-tensors (LLM Compressor)", "modelopt": "NVIDIA's Model Optimizer", "quark": "AMD Quark", "auto-round": "AutoRound",
    "mxfp8": "transformers", "fp8": "transformers",
}  # fmt: skip
BY_BLOCKS = ("mxfp8", "fp8")  # methods that say what a scale is for: of MX formats, BLOCK numbers of a row
CODES, SCALES = ("weight_packed", "weight"), ("weight_scale", "weight_scale_inv")  # of a layer, as the writers name them
BESIDE = {*CODES, *SCALES, "bias", "input_scale", "output_scale", "weight_shape"}  # all that a layer may have: others (zero points, factors of inputs) change what it computes
TURNED = ("transform_config", "rotation_config")  # in a quantization_config: what inputs are multiplied with as they come
ONLINE = ("r4", "online_r1_rotation")  # the same in an entry of Quark's algo_config; other rotations are in the weights, or change no product (r3)
NUMBERS = ("F64", "F32", "F16", "BF16")
TYPES = {"U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": getattr(torch, "float8_e8m0fnu", None)}
Entry = tuple[str, tuple[int, ...]]  # of a tensor in a file: its type and shape
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
        turned = [key for key in TURNED if origin.get(key)]
        turned += [key for algorithm in origin.get("algo_config") or () if isinstance(algorithm, dict) for key in ONLINE if algorithm.get(key)]
        if turned:
            raise ValueError(f"its layers turn their inputs first ({turned[0]} in its quantization_config): only {writer(origin)} computes that.")

    def look(self, model: nn.Module, files: Iterable[str | os.PathLike], device_map: Any) -> None:
        found = dict(_layers(model, stored_tensors(files), _six_bits(self.origin)))
        if not found:
            raise ValueError(f"no layer of it is in an MX format as {writer(self.origin)} writes them: load it with from_pretrained.")
        of_head = heads_of(model)
        self.stored = found
        layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
        layers |= {own: part for name, module in model.named_modules() for own, part in projections(name, module).items()}
        body = Counter(own.format.name for name, own in found.items() if id(layers[name]) not in of_head)
        self.format = body.most_common(1)[0][0] if body else next(iter(found.values())).format.name
        dense = next((name for name, own in DENSE.items() if own.dtype == model.dtype), None)
        chosen = {name: found[name].format.name if name in found else None if on_gpu(name, device_map) else dense for name in layers}
        self.skip = [name for name, own in chosen.items() if own is None]
        self.lm_head = next((own for name, own in chosen.items() if id(layers[name]) in of_head), None)
        self.layer_formats = {name: own for name, own in chosen.items() if own not in (None, self.format) and id(layers[name]) not in of_head}

    def holds(self, choice: Choice) -> bool:
        if choice.name in self.stored and choice.format is None:
            raise ValueError(f"{choice.name} is in {self.stored[choice.name].format.name} in the checkpoint, and has to stay dense here: {choice.reason}.")
        return choice.name in self.stored

    def await_bytes(self, name: str, layer: nn.Module) -> None:
        own = self.stored[name]
        layer.weight, layer.weight_scale = (nn.Parameter(torch.empty(part.shape, dtype=kind, device="meta"), requires_grad=False)
                                            for part, kind in ((layer.weight, own.codes), (layer.weight_scale, own.scales)))

    def converters(self, given: list) -> list:
        """transformers' own for a model, of which those that merge experts merge their codes and their scales: the latter come first, as a name may be the beginning of another's."""
        return [each for own in given for each in (self._of_bytes(own) if self._merges(own) else [own])]

    def _merges(self, own: Any) -> bool:
        return isinstance(own, WeightConverter) and len(own._original_target_patterns) == 1 and any(name.endswith(own._original_target_patterns[0]) for name in self.stored)

    @staticmethod
    def _of_bytes(own: WeightConverter) -> Iterator[WeightConverter]:
        head, _, name = own._original_target_patterns[0].rpartition(".")
        for part in ("weight_scale", "weight"):
            made = WeightConverter([source.removesuffix("weight") + part for source in own._original_source_patterns], f"{head}.{PREFIX}{name}.{part}", [*own.operations, Rows()])
            made.scope_prefix, made.base_model_prefix = (getattr(own, each, getattr(made, each, None)) for each in ("scope_prefix", "base_model_prefix"))
            yield made

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
    if method in BY_BLOCKS:
        return origin.get("weight_block_size") in ([1, BLOCK], (1, BLOCK))
    return any(word in ("e8m0", "mx") or "mxfp" in word for word in (word.lower().replace("_", "") for word in _words(origin)))


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
    """The format of six bits that the config means: of weights, where it says more of inputs."""
    words = {word.lower() for part in _under(origin, ("weight", "weights")) for word in _words(part)} or {word.lower() for word in _words(origin)}
    kinds = {kind for kind in ("e2m3", "e3m2") if any(kind in word for word in words)} or {"e2m3"}
    if len(kinds) > 1:
        raise ValueError(f"{writer(origin)} has put some of its layers into E2M3 and others into E3M2, and the bytes do not tell which: load it with from_pretrained.")
    return f"mxfp6_{kinds.pop()}"


def _under(part: Any, keys: tuple[str, ...]) -> Iterator[Any]:
    """What stands under these keys, at any depth."""
    if isinstance(part, dict):
        for key, value in part.items():
            yield from [value] if key in keys else _under(value, keys)


def _layers(model: nn.Module, tensors: dict[str, Entry], six: str) -> Iterator[tuple[str, Stored]]:
    """The model's layers that are in MX formats, projections of experts among them. ValueError for one that is neither in such a format nor in numbers."""
    places = {name: module for name, module in model.named_modules()}
    places |= {own: part for name, module in list(places.items()) for own, part in projections(name, module).items()}
    for name, parts in _by_names_of(model, tensors).items():
        kinds = {next((own[part][0] for part in CODES if part in own), "F32") for own in parts}
        if name not in places or kinds <= set(NUMBERS):  # what the model lacks (further layers that predict tokens) is not read
            continue
        place = places[name]
        if type(place) is not nn.Linear and not isinstance(place, ExpertWeights) or isinstance(place, ExpertWeights) and place.owner.is_transposed:
            raise ValueError(f"{name}: its weight is {', '.join(sorted(kinds))} in the checkpoint, and it is {type(place).__name__}; nn.Linear layers and experts are read.")
        *count, n, k = place.shape if isinstance(place, ExpertWeights) else (place.out_features, place.in_features)
        found = {_stored(name, k, own, six) for own in parts}
        if len(found) > 1 or sum(next(own[part] for part in CODES if part in own)[1][0] for own in parts) != n * (count or [1])[0]:
            raise ValueError(f"{name}: the checkpoint has it in {len(parts)} parts that are not alike, or not all of it: load it with from_pretrained.")
        yield name, found.pop()


def _stored(name: str, k: int, own: dict[str, Entry], six: str) -> Stored:
    (kind, shape), (of_scales, scales) = (next((own[part] for part in parts if part in own), ("nothing", (0,))) for parts in (CODES, SCALES))
    names, n = [FP8[kind]] if kind in FP8 else ["mxfp4_e2m1", six] if kind in ("U8", "I8") else [], next(iter(shape), 0)
    fitting = [fmt for fmt in map(get_format, names) if k % BLOCK == 0 and shape == (n, k * fmt.bits // 8)]
    if not fitting or of_scales not in ("U8", "F8_E8M0") or scales != (n, k // BLOCK):
        raise ValueError(f"{name}: its weight of {k} inputs is {kind} {list(shape)} with scales {of_scales} {list(scales)} in the checkpoint, which is no MX format: blocks of "
                         f"{BLOCK} have scales U8 or F8_E8M0 {[n, k // BLOCK]}. Load it with from_pretrained.")
    if strange := sorted(own.keys() - BESIDE):
        raise ValueError(f"{name} has {', '.join(strange)} beside its weight in the checkpoint, which changes what it computes. Load it with from_pretrained.")
    return Stored(fitting[0], TYPES[kind], TYPES[of_scales])


def _by_names_of(model: nn.Module, tensors: dict[str, Entry]) -> dict[str, list[dict[str, Entry]]]:
    """By the names of layers in the model, as transformers gives them to weights, what the checkpoint has of each: several of what it merges (experts)."""
    every, owners = get_model_conversion_mapping(model), defaultdict(dict)
    renamings, converters = ([own for own in every if isinstance(own, kind)] for kind in (WeightRenaming, WeightConverter))
    for name, entry in tensors.items():
        owner, _, own = name.rpartition(".")
        owners[owner][own] = entry
    state, prefix, named = model.state_dict(), model.base_model_prefix, defaultdict(list)
    for owner, parts in owners.items():
        weight = rename_source_key(f"{owner}.weight", renamings, converters, prefix, state)[0]
        named[weight.removesuffix(".weight")].append(parts)
    return named
