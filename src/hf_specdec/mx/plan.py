"""Which layers of a model are compressed, and why the others are not."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from .formats import BLOCK, Format, get_format
from .linear import MXLinear


@dataclass(frozen=True)
class Choice:
    """One weight matrix: the format it gets, or None and the reason why it stays dense."""

    name: str
    module: nn.Module
    format: Format | None
    reason: str = ""


def plan(model: nn.Module, format: str | Format, skip: Iterable[str], lm_head: str | Format | None) -> list[Choice]:
    """A choice for every Linear layer, and for other modules that hold large matrices, in the model's own order.

    `skip` has module names: whole ones, their last parts (`down_proj`) or patterns (`model.layers.0.*`). The output head is
    left dense unless `lm_head` names a format for it.
    """
    fmt, head_format = get_format(format), None if lm_head is None else get_format(lm_head)
    patterns = check_skip(skip)
    head = _head(model)
    return [_choose(name, module, fmt, patterns, head, head_format) for name, module in model.named_modules() if _weighs(module)]


def _choose(name, module, fmt, patterns, head, head_format) -> Choice:
    if isinstance(module, MXLinear):
        return Choice(name, module, None, f"already {module.format.name}")
    if not isinstance(module, nn.Linear):
        return Choice(name, module, None, f"{type(module).__name__} is no nn.Linear")
    if type(module) is not nn.Linear:
        return Choice(name, module, None, f"{type(module).__module__}.{type(module).__name__} is a Linear of its own kind")
    if module is head or (head is None and name.rpartition(".")[2] == "lm_head"):
        if head_format is None:
            return Choice(name, module, None, "the output head: pass lm_head=FORMAT to compress it")
        fmt = head_format
    elif _matches(name, patterns):
        return Choice(name, module, None, "skipped on request")
    if module.in_features % BLOCK:
        return Choice(name, module, None, f"{module.in_features} inputs are no multiple of {BLOCK}")
    return Choice(name, module, fmt)


def _weighs(module: nn.Module) -> bool:
    """Linear layers, and modules with weight matrices of their own (experts, convolutions), but no embeddings."""
    if isinstance(module, (nn.Linear, MXLinear)):
        return True
    if isinstance(module, nn.Embedding):
        return False
    return any(p.dim() >= 2 and p.is_floating_point() and p.numel() >= 32 * BLOCK for p in module._parameters.values() if p is not None)


def _head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    try:
        return find() if find is not None else None
    except (AttributeError, NotImplementedError):
        return None


def check_skip(skip: Iterable[str]) -> tuple[str, ...]:
    """`skip` as a tuple. Raises TypeError for a lone string and for what holds no names."""
    names = tuple(skip) if isinstance(skip, Iterable) and not isinstance(skip, str) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f'skip must be a sequence of module names, such as ("down_proj",), not {skip!r}.')
    return names


def check_some(choices: list[Choice]) -> None:
    """ValueError with the reasons, if nothing would be compressed."""
    if not any(choice.format for choice in choices):
        reasons = ", ".join(sorted({choice.reason for choice in choices})) or "it has no nn.Linear layers"
        raise ValueError(f"model has no layer that can be compressed: {reasons}.")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(
        name == p or name.endswith("." + p) or name.startswith(p + ".") or fnmatch.fnmatchcase(name, p) for p in patterns
    )
