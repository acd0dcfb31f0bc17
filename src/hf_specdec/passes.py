"""How functions of passes are compiled by `torch.compile`, and what another part of the package adds to the passes of models it knows: the
kernels on a CPU do (`mx.passes`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch.fx import GraphModule
from transformers import PreTrainedModel

CALLED = {"aten", "prims", "hf_specdec"}  # libraries that generated C++ may call: it crashes at operators that may return None, as some of bitsandbytes do
FEW = 16  # tokens of a pass whose own loops have no use for threads
_numbers = count()


class PassAddition:
    """Additions that change how a pass runs and not what it computes. They are asked in the order in which they were added."""

    def runner(self, model: PreTrainedModel, compiled: bool, prompt: bool = False) -> tuple[int, Callable] | None:
        """(n, run): passes of `model` over at most n tokens are to be made by run(forward, *args, **kwargs). None: nothing to add. prompt: of compiled ones over the first
        tokens of a text, whose own loops have threads."""
        return None

    def prepare(self, model: PreTrainedModel) -> None:
        """What is to be done before passes of the model are compiled, or used again in another call."""

    def rewrite(self, graph: GraphModule) -> None:
        """Change a graph on its way to the compiler."""

    def options(self) -> dict:
        """More options for the compiler."""
        return {}


ADDITIONS: list[PassAddition] = []


def runner(model: PreTrainedModel, compiled: bool, prompt: bool = False) -> tuple[int, Callable | None]:
    """The first addition's runner; (0, None) where no addition has one."""
    return next(filter(None, (addition.runner(model, compiled, prompt) for addition in ADDITIONS)), (0, None))


def options(device: torch.device, places: int, whole: bool = True) -> dict:
    """What `torch.compile` is told for a pass over `places` tokens: CUDA graphs on a GPU, if it is the whole pass; on a CPU one C++ function, whose own loops (not
    the products) have no use for threads where the tokens are few, of the graph as the additions to passes leave it. It rounds where eager mode
    does: otherwise what is rounded would depend on the shape, and so would the bits of a token's logits."""
    if device.type == "cuda":
        return {"mode": "reduce-overhead"} if whole else {}
    from torch._inductor import compile as inductor
    from torch._inductor import list_options

    wanted = {"cpp_wrapper": True, "size_asserts": False, "alignment_asserts": False, "emulate_precision_casts": True}
    wanted |= {"cpp.threads": 1} if places <= FEW else {}
    for addition in ADDITIONS:
        wanted |= addition.options()
    wanted = {name: value for name, value in wanted.items() if name in list_options()}

    def backend(graph, inputs):
        for addition in ADDITIONS:
            addition.rewrite(graph)
        return inductor(graph, inputs, options=wanted | ({} if _libraries(graph) <= CALLED else {"cpp_wrapper": False}))

    return {"backend": backend}


def _libraries(graph: GraphModule) -> set[str]:
    """The libraries whose operators a graph calls."""
    targets = (node.target for part in graph.modules() if isinstance(part, GraphModule) for node in part.graph.nodes)
    names = (getattr(getattr(target, "overloadpacket", target), "_qualified_op_name", "") for target in targets)
    return {name.partition("::")[0] for name in names if name}


def unguarded(function: Callable) -> Callable:
    """What a compiled `forward` or `several` comes to, without guards; the function itself where torch has more than one version of it or does not tell."""
    try:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list as versions

        (only,) = versions(function.__wrapped__.__code__)
        return FunctionType(only.code, function.__wrapped__.__globals__)
    except (ImportError, AttributeError, TypeError, ValueError):
        return function


def shows_versions() -> bool:
    """Whether torch tells the versions of a compiled function."""
    try:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass
class Functions:
    """What was compiled for one model so far. One function serves caches of every number of slots, and several rows of any number, where torch lets it."""

    made: dict[tuple, Callable] = field(default_factory=dict)
    shapes: dict[tuple, tuple] = field(default_factory=dict)  # that each was made with: slots of the cache, and, of several rows, how many, and tokens of a row
    apart: set[tuple] = field(default_factory=set)  # keys of passes that want a function for each of these
    tried: set[Hashable] = field(default_factory=set)  # passes whose logits were compared with those of the same pass uncompiled

    def untried(self, key: tuple, shape: tuple) -> bool:
        """Whether no pass of that many slots, or of that many rows and tokens, has been compared yet."""
        return not self._marks(key, shape) <= self.tried

    def passed(self, key: tuple, shape: tuple) -> None:
        self.tried |= self._marks(key, shape)

    @staticmethod
    def _marks(key: tuple, shape: tuple) -> set[tuple]:
        return {(key, shape[0]), (key, *shape[1:])} if len(shape) > 1 else {(key, *shape)}

    def ask(self, key: tuple, shape: tuple, make: Callable[[bool], Callable], given: tuple) -> tuple[Callable, Any]:
        """The function for these arguments, without guards, and what it gives with them. make: called as make(whether there was one, and what its
        guards look at has changed) where there is none."""
        own = (key, *shape) if key in self.apart else key
        run = self.made.get(own)
        done = None if run is None else compiling(run, *given)
        if run is None or (unguarded(run) is run and shows_versions()):  # torch has compiled it again
            if self.made.pop(own, None) is not None and own == key and self.shapes[key] != shape:
                self.apart.add(key)
                own = (key, *shape)
            run = make(run is not None)
            done = compiling(run, *given)
            self.made[own], self.shapes[own] = run, shape
        return unguarded(run), done


def alone(function: Callable, device: torch.device, places: int, whole: bool = True, sizes: Sequence[tuple[torch.Tensor, int]] = ()) -> Callable:
    """`function` of a whole pass, or of a part of one, over `places` tokens, compiled, as one of its own: what torch keeps by its code is then one entry.
    sizes: tensors among its arguments, and dimensions of theirs, that may be of another size later."""
    if sizes:
        from torch._dynamo import maybe_mark_dynamic  # a second to import

        for part, dim in sizes:
            maybe_mark_dynamic(part, dim)
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    function = FunctionType(code, function.__globals__, code.co_name)
    return torch.compile(function, fullgraph=True, dynamic=None if sizes else False, **options(device, places, whole))


def compiling(function: Callable, *given):
    """function(*given) where that may compile it: without the marks for a profiler, which cost a function of one layer a tenth of its time in Python.
    In a context of its own, for torch leaves a variable of every patch in it."""
    return copy_context().run(_without_marks, function, *given)


def _without_marks(function: Callable, *given):
    from torch._dynamo import config

    marks = {"record_runtime_overhead": False} if hasattr(config, "record_runtime_overhead") else {}
    with config.patch(**marks):
        return function(*given)
