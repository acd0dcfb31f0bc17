"""`draft_of`: a model with fewer bits as its own draft."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from types import FunctionType

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import compat
from ..drafts.compressed import CompressedDraft
from ..hints import what
from .compress import check_model
from .experts import ExpertMatrix, ExpertWeights, matrices, put_back, unpack
from .formats import DEFAULT_FORMAT, DEFAULT_RULE, Format
from .in_place import compress_in_place
from .linear import MXLinear, MXMatrix
from .plan import Choice, plan
from .quantizer import MXConfig, attach
from .swap import HOOKS, detach, replace


def draft_of(
    target: PreTrainedModel,
    format: str | Format = DEFAULT_FORMAT,
    lm_head: str | Format | None = "mxint8",
    skip: Iterable[str] = (),
    layer_formats: Mapping[str, str | Format] | None = None,
    activations: str | None = None,
    scale_rule: str = DEFAULT_RULE,
) -> CompressedDraft:
    """`target`, which is left as it is, with compressed weights as its own draft: `target.generate(..., speculative=True, assistant_model=mx.draft_of(target))`,
    or `speculative={"draft": "compressed"}`.

    The arguments are those of `mx.compress`. The compressed matrices are all that is held beside the target: what stays dense is the target's
    own, and so is the cache. The target may be dense, in tiles, or have more bits; it is read layer after layer. For a calibrated copy, or one of another library:
    `CompressedDraft(target, copy)`.

    Raises TypeError for what is no model, and what `mx.compress` raises.
    """
    whole = compat.unwrap(target)
    if not isinstance(whole, PreTrainedModel):
        raise TypeError(f"target: expected a transformers model, got {what(target)}. Load one with from_pretrained.")
    config = MXConfig(format, scale_rule, skip, lm_head, activations=activations, layer_formats=layer_formats)
    made, packed = _twin(whole)
    choices = plan(made, format, config.skip, lm_head, layer_formats=layer_formats)
    check_model(made, choices, packed)
    _note(config, choices, packed, made.get_output_embeddings())
    compress_in_place(made, choices, scale_rule, activations, measure=False, fill=partial(_fill, made, packed))
    attach(made, config)
    return CompressedDraft(target, made)


def _twin(model: PreTrainedModel) -> tuple[PreTrainedModel, dict[str, MXMatrix]]:
    """A second tree of modules on the same tensors, in which layers without numbers stand for those that are packed; and these, by name."""
    shared = [*model.parameters(), *model.buffers(), *(part for part in model.modules() if isinstance(part, MXMatrix))]
    made, packed = copy.deepcopy(model, {id(each): each for each in shared}), {}
    for name in [name for name, own in vars(made).items() if isinstance(own, FunctionType) and hasattr(type(made), name)]:
        delattr(made, name)  # what accelerate puts before methods (`to`) is no copy: it holds the model
    for name, module in list(made.named_modules()):
        if isinstance(module, MXLinear):
            packed[name] = module
            dense = nn.Linear(module.in_features, module.out_features, bias=False, device="meta", dtype=made.dtype)
            dense.bias = module.bias
            replace(made, name, dense)
            vars(dense).update({key: copy.copy(vars(module)[key]) for key in HOOKS})  # what is hooked to the model later is no business of the copy
    for owner, name, layer in list(matrices(made)):
        packed[f"{_name(made, owner)}.{name}"] = layer
        count, n, k = layer.shape
        put_back(owner, name, torch.empty((count, k, n) if owner.is_transposed else (count, n, k), dtype=made.dtype, device="meta"))
    if packed:
        detach(made)
    return made.eval(), packed  # before layers of the model itself come back, whose mode is its own


def _note(config: MXConfig, choices: list[Choice], packed: dict[str, MXMatrix], head: nn.Module | None) -> None:
    """`MXConfig.note`, where layers that stay as they are may be packed: to who reads the file they are layers with a format of their own."""
    kept = {choice.name: packed[choice.name].format for choice in choices if choice.format is None and choice.name in packed}
    if kept:
        config.skip = [choice.name for choice in choices if choice.format is None and choice.name not in kept and isinstance(choice.module, (nn.Linear, ExpertWeights))]
        own_head = next((choice.name for choice in choices if choice.module is head and choice.name in kept), None)
        config.lm_head = kept[own_head].name if own_head else config.lm_head
        config.layer_formats |= {name: own.name for name, own in kept.items() if name != own_head}
    config.note([dataclasses.replace(choice, format=kept.get(choice.name, choice.format)) for choice in choices])


def _name(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, part in model.named_modules() if part is module)


def _fill(model: PreTrainedModel, packed: dict[str, MXMatrix], choice: Choice) -> Choice:
    """Give a layer that stands for a packed one its numbers; or, if it is not to be compressed, its place back to that one."""
    layer, dense = packed.get(choice.name), choice.module
    if layer is None:
        return choice
    if isinstance(layer, ExpertMatrix):
        del dense.owner._parameters[dense.name]
        dense.take(layer) if choice.format is None else unpack(dense.owner, dense.name, layer, model.dtype)
    elif choice.format is None:
        replace(model, choice.name, layer)
    else:
        dense.weight = nn.Parameter(layer.dequantize(model.dtype), requires_grad=False)
    return choice if choice.format else dataclasses.replace(choice, module=layer)
