"""What the files of a compressed checkpoint say of its tensors, before any of them is read."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from safetensors import SafetensorError, safe_open

from ..folders import check_file
from .experts import PREFIX, expert_projections
from .in_place import OFFLOADED
from .linear import MXMatrix


def check_files(model: torch.nn.Module, files: Iterable[str | os.PathLike]) -> None:
    """ValueError for a file that is damaged, for codes and scales of another shape or type than the model's layers have, and for codes of dense ones.

    transformers would convert the type in silence, and does not compare the shapes of quantised layers in every version. Names
    that the checkpoint has otherwise (a base model's, renamed ones) are left to what happens when they are read.
    """
    stored = stored_tensors(files)
    for name, layer in model.named_modules():
        if isinstance(layer, MXMatrix):
            for tensor in ("weight", "weight_scale"):
                _check(f"{name}.{tensor}", tuple(getattr(layer, tensor).shape), stored)
        elif isinstance(layer, torch.nn.Linear) and stored.get(f"{name}.weight", ("",))[0] == "U8":
            raise ValueError(f"{name}.weight is packed in the checkpoint, but a dense layer's by the config: it does not fit the config's lm_head and skip.")
        for part in expert_projections(layer):
            if f"{name}.{PREFIX}{part.name}.weight" in stored:
                raise ValueError(f"{name}.{part.name} is packed in the checkpoint, but dense by the config: it does not fit the config's skip and version.")


def _check(name: str, shape: tuple[int, ...], stored: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    kind, own = stored.get(name, ("U8", shape))
    if kind != "U8":
        raise ValueError(f"{name} is {kind} in the checkpoint, not U8 (uint8): this package has not written it.")
    if own != shape:
        raise ValueError(
            f"{name} has shape {list(own)} in the checkpoint, not {list(shape)}: it does not fit the config's format and sizes."
        )


def stored_tensors(files: Iterable[str | os.PathLike]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What safetensors files hold, by name: the type, by their name for it, and the shape."""
    stored = {}
    for file in files:
        if str(file).endswith(".safetensors"):
            stored |= _tensors(file)
    return stored


def _tensors(file: str | os.PathLike) -> dict[str, tuple[str, tuple[int, ...]]]:
    check_file(file)
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut short ({error}): copy or write the checkpoint again.") from error


def check_loaded(name: str, module: MXMatrix, pre_quantized: bool) -> None:
    """ValueError for a layer that transformers has not read, or read as something else. pre_quantized: from a compressed checkpoint."""
    for tensor, value in module.named_parameters(recurse=False):
        if tensor == "bias" and not pre_quantized:
            continue  # transformers has made one
        if value.is_meta:
            raise ValueError(OFFLOADED.format(name))
        if not getattr(value, "_is_hf_initialized", False):
            raise ValueError(
                f"{name}.{tensor} is not in the checkpoint: a file of it is missing, or this package has not written it."
            )
        if tensor != "bias" and value.dtype != torch.uint8:
            raise ValueError(f"{name}.{tensor} is {value.dtype} in the checkpoint, not torch.uint8: this package has not written it.")


def as_bytes(layer: MXMatrix) -> None:
    """Codes and scales that were read in types of a byte of their own (float8), as bytes."""
    for name in ("weight", "weight_scale"):
        part = layer._parameters[name]
        if part.dtype.itemsize == 1 and part.dtype != torch.uint8 and not part.is_meta:
            own = layer._bytes(part.detach().view(torch.uint8))
            own._is_hf_initialized = getattr(part, "_is_hf_initialized", False)
            setattr(layer, name, own)
