"""What a model's forward takes, also where another one stands in front of it that hands on whatever it is given."""

from __future__ import annotations

import inspect

from torch import nn


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
