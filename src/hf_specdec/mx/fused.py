"""Layers that a checkpoint's own format has in one tensor, such as the queries', keys' and values', and a model has apart."""

from __future__ import annotations

import re

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from .linear import MXLinear


def keep_apart(model: nn.Module) -> None:
    """Have `save_pretrained` write such layers as the model has them where some are stored otherwise than others: joined, the bytes of one would become the
    numbers of another. What is written either way is read."""
    found = getattr(model, "_weight_conversions", None)
    if found is None:  # as transformers itself does for a model that was not loaded
        found = [each for each in get_model_conversion_mapping(model, add_legacy=False) if type(each).__name__ != "PrefixChange"]
    kept = [each for each in found if not (isinstance(each, WeightConverter) and len(each.target_patterns) > 1 and len(_kinds(model, each.target_patterns)) > 1)]
    if len(kept) < len(found):
        model._weight_conversions = kept


def _kinds(model: nn.Module, patterns: list[str]) -> set[str | None]:
    """The formats of the Linear layers whose weights have such names; None for a dense one."""
    return {module.format.name if isinstance(module, MXLinear) else None for name, module in model.named_modules()
            if isinstance(module, (MXLinear, nn.Linear)) and any(re.search(pattern, f"{name}.weight") for pattern in patterns)}
