"""What another part of the package adds to the forward passes of models it knows: the kernels on a CPU do (`mx.passes`)."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule
from transformers import PreTrainedModel


class PassAddition:
    """Additions that change how a pass runs and not what it computes. They are asked in the order in which they were added."""

    def runner(self, model: PreTrainedModel, compiled: bool) -> tuple[int, Callable] | None:
        """(n, run): passes of `model` over at most n tokens are to be made by run(forward, *args, **kwargs). None: nothing to add."""
        return None

    def prepare(self, model: PreTrainedModel) -> None:
        """What is to be done before passes of the model are compiled, or used again in another call."""

    def rewrite(self, graph: GraphModule) -> None:
        """Change a graph on its way to the compiler."""

    def options(self) -> dict:
        """More options for the compiler."""
        return {}


ADDITIONS: list[PassAddition] = []


def runner(model: PreTrainedModel, compiled: bool) -> tuple[int, Callable | None]:
    """The first addition's runner; (0, None) where no addition has one."""
    return next(filter(None, (addition.runner(model, compiled) for addition in ADDITIONS)), (0, None))
