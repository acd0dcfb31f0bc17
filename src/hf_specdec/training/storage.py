"""What a drafter's folder holds: `drafter.json`, and `model.safetensors` with what the drafter does not share, in 16 bit or MX formats."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ..mx.formats import BLOCK, get_format
from ..mx.linear import MXLinear
from ..mx.packed import quantize
from ..mx.swap import replace
from .shards import probe, save_whole

FORMAT = "hf_specdec drafter 1"
TOLD = ("target", "weights", "vocab_size", "hidden_size", "probe")  # what every drafter.json of that format says


def stored(draft: nn.Module, shared: set[str], format: str) -> dict[str, torch.Tensor]:
    linear = {f"{name}.weight" for name, module in draft.named_modules() if type(module) is nn.Linear}
    tensors = {}
    for name, tensor in draft.state_dict().items():
        if name in shared:
            continue
        if format != "bf16" and name in linear and tensor.shape[1] % BLOCK == 0:
            packed = quantize(tensor.float(), format)
            tensors[name], tensors[f"{name}_scale"] = packed.codes.contiguous(), packed.scales.contiguous()
        else:
            tensors[name] = tensor.to(torch.bfloat16).contiguous()
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, target_name: str, format: str, more: dict) -> Path:
    about = {"format": FORMAT, "target": target_name, "weights": get_format(format).name, "vocab_size": embedding.shape[0],
             "hidden_size": embedding.shape[1], "probe": probe(embedding), **more}
    made = folder / "drafter.json"
    made.unlink(missing_ok=True)  # until all is there, the folder holds no drafter
    save_whole(tensors, folder / "model.safetensors", {"format": FORMAT})
    made.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return folder


def read(folder: Path) -> dict:
    """The folder's `drafter.json`. Raises ValueError where it is damaged, or written by a newer version."""
    try:
        about = json.loads((folder / "drafter.json").read_text(encoding="utf-8"))
        if not isinstance(about, dict):
            raise ValueError("no JSON object")
        if about.get("format") == FORMAT and (lacking := [name for name in TOLD if name not in about]):
            raise ValueError(f"no {lacking[0]!r}")
    except ValueError as error:
        raise ValueError(f"{folder}: drafter.json is not whole ({error}); copy the folder again, or train into it anew.") from None
    if about.get("format") != FORMAT:
        raise ValueError(f"{folder}: format {about.get('format')!r} is not {FORMAT!r}; a newer hf_specdec has written it.")
    return about


def pack(draft: nn.Module, tensors: dict[str, torch.Tensor], format: str) -> None:
    """MX layers where the file has codes, on the device of the dense ones."""
    for name, module in list(draft.named_modules()):
        if type(module) is nn.Linear and f"{name}.weight_scale" in tensors:
            weight = module.weight
            packed = MXLinear(module.in_features, module.out_features, module.bias is not None, format, weight.device, weight.dtype)
            replace(draft, name, packed)


def fit(folder: Path, module: nn.Module, tensors: dict[str, torch.Tensor], shared: Set[str] = frozenset(), assign: bool = False) -> None:
    """Give a module the tensors of a published checkpoint, all but what is `shared`; ValueError saying what does not map. assign: as they are, to parameters without numbers."""
    own = {name: tensor for name, tensor in module.state_dict().items() if name not in shared}
    for complaint, names in (("has no", set(own) - set(tensors)), ("has a tensor that does not map:", set(tensors) - set(own))):
        if names:
            raise ValueError(f"{folder} {complaint} {sorted(names)[0]} ({len(names)} such). Only the published layouts are read.")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise ValueError(f"{folder}: {name} has shape {list(tensor.shape)}; its config and this target make it {list(own[name].shape)}.")
    module.load_state_dict(tensors, strict=False, assign=assign)


def alike(weight: torch.Tensor, own: torch.Tensor, rtol: float = 0.02, atol: float = 1e-3) -> bool:
    """Whether two weights are the same but for rounding to 16 bits."""
    return weight.shape == own.shape and torch.allclose(weight.to(own), own, rtol=rtol, atol=atol)


def check_embedding(folder: Path, weight: torch.Tensor | None, target: PreTrainedModel) -> None:
    """ValueError where heads come with the embedding of their target, and it is another one's."""
    if weight is not None and not alike(weight, target.get_input_embeddings().weight):
        raise ValueError(f"{folder} holds heads with the embedding of another model than this target; pass the model that they were made for.")
