"""Prediction modules that transformers leaves in the checkpoint and has no class for (Qwen3.5, Qwen3-Next and their kin): what their tensors are called, and what to
make of them. As vLLM reads them (qwen3_5_mtp.py, qwen3_next_mtp.py, exaone_moe_mtp.py, exaone4_5_mtp.py, mimo_mtp.py; the last one reads zeros for the embedding at
position 0, which is not done here)."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import cached_file

from ..folders import json_object
from ..hints import first_line
from . import shared

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Layout:
    """Of one model_type.

    prefix, layer: what the names of the module's tensors begin with, and within that those of its decoder layer.
    state, embedding, join, norm: what it calls the two norms before, the matrix that brings both to one width, and the norm behind its layer.
    states_first: whether the matrix reads the state before the embedding.
    normed: whether it reads the target's last state behind the target's final norm.
    kind: the attention of its layer, "first" for that of the target's first one, or the name of the config's list that says it.
    dense: whether its layer has an MLP where the target's have experts.
    like: the model_type whose layer it has, where that is not the target's.
    """

    prefix: str = "mtp."
    layer: str = "layers.0."
    state: str = "pre_fc_norm_hidden"
    embedding: str = "pre_fc_norm_embedding"
    join: str = "fc"
    norm: str = "norm"
    states_first: bool = False
    normed: bool = True
    kind: str = "full_attention"
    dense: bool = False
    like: str = ""

    def place(self, name: str) -> str | None:
        """A tensor's name, prefix and all, as `Module` has it; None for one that is none of the first module's."""
        if not name.startswith(self.prefix):
            return None
        name = name.removeprefix(self.prefix)
        for own, part in (("state", self.state), ("embedding", self.embedding), ("join", self.join), ("norm", self.norm)):
            if name.startswith(f"{part}."):
                return own + name.removeprefix(part)
        if name.startswith(self.layer):
            return f"layer.{name.removeprefix(self.layer)}"
        return None if re.match(r"layers\.[1-9]", name) else name

    def named(self, place: str) -> str:
        """The way back."""
        part, _, rest = place.partition(".")
        return self.prefix + (self.layer + rest if part == "layer" else f"{getattr(self, part)}.{rest}" if part in ("state", "embedding", "join", "norm") else place)


LAYOUTS = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), Layout()),
    "exaone_moe": Layout(kind="mtp_layer_types", dense=True),
    "exaone4": Layout(kind="first"),  # what writes the text in EXAONE 4.5
    "mimo": Layout("model.mtp_layers.0.", "", "hidden_layernorm", "token_layernorm", "input_proj", "final_layernorm", states_first=True, normed=False, like="qwen2"),
}


class Module(nn.Module):
    """The parts of a prediction module: `layer`, a decoder layer; norms like `norm`."""

    def __init__(self, layer: nn.Module, norm: nn.Module):
        super().__init__()
        self.layer, self.state, self.embedding, self.norm = layer, copy.deepcopy(norm), copy.deepcopy(norm), norm
        width = len(norm.weight)
        self.join = nn.Linear(2 * width, width, bias=False, device=norm.weight.device, dtype=norm.weight.dtype)


def layout_of(target: PreTrainedModel) -> Layout | None:
    """That of the target's prediction module; None where none is known."""
    return LAYOUTS.get(target.config.get_text_config().model_type)


def read(target: PreTrainedModel, layout: Layout) -> tuple[PreTrainedModel, Module]:
    """A draft of one layer without embedding and head, and the module's parts, of which the draft's layer and final norm are two; with the weights in the checkpoint
    that `target` was loaded from, in its dtype and on its device. Of the checkpoint only the module's own tensors are read.

    Raises ValueError where the checkpoint is not there or not of safetensors, and for tensors that are missing, unknown or of another shape.
    """
    source = target.config.name_or_path
    found = {place: tensor for name, tensor in _tensors(target, source, layout).items() if (place := layout.place(name))}
    draft = shared.empty(target, _config(target, layout))
    module = Module(draft.base_model.layers[0], draft.base_model.norm)
    own = module.state_dict()
    tensors = _fused(source, own, found, layout)
    for complaint, places in (("holds no", set(own) - set(tensors)), ("holds a tensor that is not read:", set(tensors) - set(own))):
        if places:
            raise ValueError(f"mtp: {source} {complaint} {layout.named(sorted(places)[0])} ({len(places)} such). Modules of weights in numbers are read, in the layout of {_kind(target)}.")
    for place, tensor in tensors.items():
        if tensor.shape != own[place].shape:
            raise ValueError(f"mtp: {source}: {layout.named(place)} has shape {list(tensor.shape)}; the target's config makes it {list(own[place].shape)}.")
    module.load_state_dict(tensors)
    return draft, module


def _kind(target: PreTrainedModel) -> str:
    return target.config.get_text_config().model_type


def _config(target: PreTrainedModel, layout: Layout):
    """That of a text model with the module's layer alone."""
    text = target.config.get_text_config()
    if layout.like:
        said = {name: value for name, value in text.to_dict().items() if name not in ("model_type", "architectures", "auto_map")}
        text = AutoConfig.for_model(layout.like, **said)
    one = copy.deepcopy(text)
    types = {"full_attention": ["full_attention"], "first": getattr(text, "layer_types", None)}.get(layout.kind, getattr(text, layout.kind, None))
    if not types:
        raise ValueError(f"mtp: the config of {type(target).__name__} does not say what attention its prediction module has ({layout.kind}).")
    one.num_hidden_layers = 1
    if getattr(one, "layer_types", None):
        one.layer_types = list(types[:1])
    if layout.dense:
        one.mlp_layer_types = ["dense"]
    if windows := getattr(text, "mtp_sliding_windows", None):
        one.sliding_window = windows[0] or one.sliding_window
    return one


def _fused(source: str, own: dict[str, torch.Tensor], found: dict[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors with those of experts, stored one by one, in transformers' places: [E, 2 I, H] of gates and what they let through, [E, H, I] of the ways back."""
    for place in {match[1] for name in found if (match := EXPERT.fullmatch(name)) and f"{match[1]}.gate_up_proj" in own}:
        count, parts = len(own[f"{place}.gate_up_proj"]), {}
        for part in ("gate", "up", "down"):
            names = [f"{place}.{i}.{part}_proj.weight" for i in range(count)]
            if missing := [name for name in names if name not in found]:
                raise ValueError(f"mtp: {source} holds no {layout.named(missing[0])} ({len(missing)} such).")
            experts = [found.pop(name) for name in names]
            if strange := next((i for i, expert in enumerate(experts) if expert.shape != experts[0].shape), None):
                raise ValueError(f"mtp: {source}: {layout.named(names[strange])} has shape {list(experts[strange].shape)}, and {layout.named(names[0])} {list(experts[0].shape)}.")
            parts[part] = torch.stack(experts)
        found |= {f"{place}.gate_up_proj": torch.cat([parts["gate"], parts["up"]], dim=1), f"{place}.down_proj": parts["down"]}
    return found


def _tensors(target: PreTrainedModel, source: str, layout: Layout) -> dict[str, torch.Tensor]:
    """What the checkpoint `source`, a folder or a hub id, calls by the module's prefix."""
    if not source:
        raise ValueError(f"mtp: {type(target).__name__} was not loaded from a checkpoint (from_pretrained), where its prediction module would be.")
    index = _path(target, source, "model.safetensors.index.json")
    if index is None:
        files = ["model.safetensors"]
    else:
        places = json_object(Path(index)).get("weight_map", {})
        files = sorted({file for name, file in places.items() if name.startswith(layout.prefix)})
    tensors = {}
    for path in (_path(target, source, file) for file in files):
        if path is None:
            raise ValueError(f"mtp: {source} has no {files[0]}; prediction modules are read from whole checkpoints in safetensors.")
        try:
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name).to(target.device, target.dtype) for name in file.keys() if name.startswith(layout.prefix)}
        except SafetensorError as error:
            raise ValueError(f"mtp: {path} is damaged or cut short ({first_line(error)}): copy the checkpoint again.") from error
    if not tensors:
        raise ValueError(f"mtp: {source} holds no prediction module (tensors {layout.prefix}*). Checkpoints of finetuned models often come without it; use another draft.")
    return tensors


def _path(target: PreTrainedModel, source: str, name: str) -> str | None:
    """That of a file of the checkpoint, fetched if need be, at the commit that the target was loaded from where its config says which (5.24's does not), else at its newest;
    None where it has none of that name."""
    commit = getattr(target.config, "_commit_hash", None)
    try:
        return cached_file(source, name, revision=commit or "main", _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise ValueError(f"mtp: {source}, which the target was loaded from, cannot be read ({first_line(error)}).") from error
