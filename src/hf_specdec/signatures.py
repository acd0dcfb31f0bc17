"""What a call of `generate` was given, by name; what a model's forward takes, also where another one stands in front of it that hands on whatever it is given."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import GenerationMixin


def taken_by(model: nn.Module, handed_on: str = "") -> dict[str, inspect.Parameter]:
    """The arguments that `model.forward` takes, by name. One of the form (*args, **kwargs), of a subclass or put in the place of the class's own, is
    held to hand all on: what the next one takes is taken, too. handed_on: an argument that one with **kwargs is held to hand on, if a class behind it takes it."""
    found = dict(inspect.signature(model.forward).parameters)
    for kind in type(model).__mro__:
        if kind is nn.Module or all(each.kind is not inspect.Parameter.VAR_POSITIONAL for each in found.values()):
            break
        if "forward" in vars(kind):
            behind = dict(inspect.signature(kind.forward).parameters)
            behind.pop("self", None)
            found = {name: each for name, each in found.items() if each.kind is not inspect.Parameter.VAR_POSITIONAL} | behind
    if handed_on and handed_on not in found and any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found.values()):
        behind = [inspect.signature(kind.forward).parameters for kind in type(model).__mro__ if "forward" in vars(kind) and kind is not nn.Module]
        found |= {handed_on: own[handed_on] for own in behind if handed_on in own}
    return found


def named_arguments(stock, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `stock`, the model's own `generate`, by name, those that were passed by position, too."""
    if not args:
        return kwargs
    signature = inspect.signature(stock)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):  # PEFT's hands all on
        signature = inspect.signature(GenerationMixin.generate.__get__(stock))
    named = signature.bind_partial(*args, **kwargs).arguments
    return {name: value for name, value in {**named, **named.get("kwargs", {})}.items() if name not in ("self", "kwargs")}
