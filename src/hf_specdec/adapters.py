"""PEFT's wrapper of an enabled model hands out the model inside, without its adapters or with them merged: that one is enabled, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import standing


def taking_off(kind: type, enable: Callable[[Any], Any]) -> dict[str, Callable]:
    """Methods for the enabled subclass of `kind`: those of a wrapper of PEFT that return the model inside, which are its tuner's; none for another model."""
    return {name: _handing_on(name, enable) for name in ("merge_and_unload", "unload") if hasattr(kind, "get_base_model")}


def _handing_on(name: str, enable: Callable[[Any], Any]) -> Callable:
    def method(self, *args, **kwargs):
        inside = enable(getattr(self.base_model, name)(*args, **kwargs))
        standing.hand_on(self, inside)
        return inside

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"PEFT's `{name}`; what it returns understands `speculative=`, too, and does in calls without it what this model does."
    return method
