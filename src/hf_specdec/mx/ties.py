"""Weights that modules share beside a compressed head, which no longer does: one in memory, and one each in a file, whose config ties nothing."""

from __future__ import annotations

import torch
from torch import nn

from .linear import MXLinear


def untie(model: nn.Module) -> None:
    """A compressed head no longer shares the embedding's weight: the config must not say that it does. What else was tied (BART's two embeddings, BERT's bias of the head)
    stays so in memory."""
    if not _has_packed_head(model):
        return
    for config in _configs(model):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    if getattr(model, "all_tied_weights_keys", None):
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def apart(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """The model's tensors for a file, of which each holds what is only shared in memory: else it would be saved once, and the loaded model make up the others. None where
    nothing is."""
    state, found = model.state_dict(), False
    for name, source in _not_said(model).items():
        if name in state and source in state and not state[name].is_meta and state[name].data_ptr() == state[source].data_ptr():
            state[name], found = state[name].clone(), True
    return state if found else None


def share(model: nn.Module) -> None:
    """Weights of a file that `apart` has written, in one place again."""
    for name, source in _not_said(model).items():
        owner, _, own = name.rpartition(".")
        owner, other = model.get_submodule(owner), _parameter(model, source)
        one = owner._parameters.get(own)
        if one is not None and other is not None and one is not other and not one.is_meta and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device) and torch.equal(one, other):
            setattr(owner, own, other)


def _not_said(model: nn.Module) -> dict[str, str]:
    """Names of weights beside a packed head, and those that they were tied to, where the config says no longer that they are."""
    if not _has_packed_head(model) or not hasattr(model, "get_expanded_tied_weights_keys"):
        return {}
    configs = [(config, config.tie_word_embeddings) for config in _configs(model) if getattr(config, "tie_word_embeddings", None) is not None]
    try:
        for config, _ in configs:
            config.tie_word_embeddings = True
        every = model.get_expanded_tied_weights_keys(all_submodels=True)
    finally:
        for config, said in configs:
            config.tie_word_embeddings = said
    said = getattr(model, "all_tied_weights_keys", None) or {}
    packed = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, MXLinear)}
    return {name: source for name, source in every.items() if name not in said and packed.isdisjoint((name, source))}


def _has_packed_head(model: nn.Module) -> bool:
    find = getattr(model, "get_output_embeddings", None)
    return find is not None and isinstance(find(), MXLinear)


def _configs(model: nn.Module) -> list:
    return [model.config, model.config.get_text_config()]


def _parameter(model: nn.Module, name: str) -> nn.Parameter | None:
    owner, _, own = name.rpartition(".")
    return model.get_submodule(owner)._parameters.get(own)
