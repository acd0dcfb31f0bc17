"""Passes in which one compiled function runs every decoder layer of a kind: the compiler is given one layer instead of the whole model.

The model's own forward runs as it is, and for the length of a pass its layers' forwards lead here. Layers of a kind consist of the same modules,
shapes and settings; only their numbers differ. The functions take a layer's weights from the layer that they are called with, so that what
was compiled for the first one runs all of them, and they know the cache of that layer alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, get_ident
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves
from transformers import Cache

from .fixed_cache import EmptyCache, FixedCache, Held, fixed, of_one_length
from .passes import Functions, alone
from .recurrences import telling

NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "idx")  # what tells layers of a kind apart
PLAIN = (bool, int, float, str, type(None), torch.dtype, tuple, list)
_changing = Lock()  # held while forwards are put in place or taken back
TRIAL = 61  # tokens of the text that a function for prompts is compiled on: a number that no size in a model is likely to be


def _forward(layer: nn.Module, cache: Cache, at: int | str, args: tuple, kwargs: dict):
    """The layer's own forward, with the cache at its place `at` among the arguments."""
    if isinstance(at, str):
        return type(layer).forward(layer, *args, **{**kwargs, at: cache})
    return type(layer).forward(layer, *args[:at], cache, *args[at:], **kwargs)


def at_slots(layer, at, args, kwargs, held, slots, count):
    """A layer over a block whose keys and values go to `slots` of the buffers that it has `held`: what it puts out, and the states that it has taken. It may ask for any
    of `count` layers. Compiled as a whole."""
    of_one_length([held], slots, *args, kwargs)
    own = fixed(held, slots)
    return telling(_forward, layer, FixedCache([own] * count), at, args, kwargs), own.taken


def from_start(layer, at, args, kwargs):
    """A layer over the first tokens of a text: what it puts out, and their keys and values [B, H, Q, D]. Compiled as a whole."""
    cache = EmptyCache()
    return _forward(layer, cache, at, args, kwargs), cache.states


def _stand_in(layer: nn.Module) -> Callable:
    """In place of the layer's forward while compiled passes go through it, of any thread and any model that the layer is part of: `passes` holds, by thread,
    whose pass that is, and which of its layers this one is."""
    passes: dict[int, tuple[Layerwise, int]] = {}

    def forward(*args, **kwargs):
        own = None if torch.compiler.is_dynamo_compiling() else passes.get(get_ident())
        if own is None:  # the same layer, in a thread of other passes
            return type(layer).forward(layer, *args, **kwargs)
        return own[0]._run(own[1], layer, args, kwargs)

    forward.stands_in, forward.passes = True, passes
    return forward


def own_forward(layer: nn.Module) -> bool:
    """Whether the forward of a layer is that of its class, or for now stands in for it in a pass of another thread."""
    forward = vars(layer).get("forward")
    return forward is None or getattr(forward, "stands_in", False)


def kinds(layers: list[nn.Module]) -> list[Hashable]:
    """What layers have in common when one function can run them. Asked in every call, because settings may have changed since the last one."""
    return [_traits(layer) for layer in layers]


def _traits(part: nn.Module) -> tuple:
    settings = [(key, repr(value)) for key, value in vars(part).items() if key[0] != "_" and key not in NUMBERS and issubclass(type(value), PLAIN)]
    tensors = [(key, own.shape, own.dtype) for held in (part._parameters, part._buffers) for key, own in held.items() if own is not None]
    below = [(name, _traits(child)) for name, child in part._modules.items() if child is not None]
    return type(part), part.extra_repr(), tuple(settings), tuple(tensors), tuple(below)


class NotCompiled(Exception):
    """There is no function for these arguments, and it is not the time to make one. changed: but there was one."""

    def __init__(self, changed: bool):
        super().__init__("not compiled")
        self.changed = changed


@dataclass
class Made:
    """What was compiled for one model so far: it outlives the call."""

    functions: Functions = field(default_factory=Functions)
    kinds: dict[Hashable, int] = field(default_factory=dict)
    changes: Counter[Hashable] = field(default_factory=Counter)  # of prompts: how often guards have had their function compiled again


class Layerwise:
    """The decoder layers of one model in one call.

    tried: passes whose logits have been compared with those of the same pass uncompiled.
    """

    def __init__(self, layers: list[nn.Module], made: Made, device: torch.device):
        self.layers, self.made, self.tried, self.changes, self.device = layers, made.functions, made.functions.tried, made.changes, device
        self.kinds = [made.kinds.setdefault(kind, len(made.kinds)) for kind in kinds(layers)]
        self.stand_ins = [_stand_in(layer) for layer in layers]
        self.checked: dict[tuple, Callable] = {}  # functions without guards
        self.steps: dict[tuple[Hashable, tuple], list] = {}  # by key of a pass and its shape: function and place of the cache per layer
        self.key = self.cache = self.places = self.shape = None

    @contextmanager
    def running(self, key: Hashable, cache: Cache, places: int | None, shape: tuple[int, ...] = ()) -> Iterator[None]:
        """Inside, a forward in this thread that is given `cache` runs its layers by compiled functions: a `FixedCache` over `places` tokens, of a `shape`
        (as `CompiledPasses` has it), or with None an empty cache of any kind over the first tokens of a text. key: what else decides of shapes and arguments."""
        self.key, self.cache, self.places, self.shape = key, cache, places, shape
        if places is None:  # guards may ask for the length of the text: they are evaluated in every such pass
            self.checked = {own: run for own, run in self.checked.items() if own[0][0] != key}
        if places is None or (key, shape) not in self.steps:
            self.steps[key, shape] = [None] * len(self.layers)
        thread = get_ident()
        with _changing:
            for i, layer in enumerate(self.layers):
                layer.__dict__.setdefault("forward", self.stand_ins[i]).passes[thread] = self, i
        try:
            yield
        except BaseException:
            del self.steps[key, shape]
            raise
        finally:
            with _changing:
                for layer in self.layers:
                    passes = layer.__dict__["forward"].passes
                    del passes[thread]
                    if not passes:
                        del layer.__dict__["forward"]
            self.cache = None

    def _run(self, i: int, layer: nn.Module, args: tuple, kwargs: dict):
        if self.places is None and self.steps[self.key, self.shape][i] is not None:
            raise ValueError("its layers run more than once in a pass")
        run, at = self.steps[self.key, self.shape][i] or (None, self._place(args, kwargs))
        if isinstance(at, str):
            del kwargs[at]
        else:
            args = args[:at] + args[at + 1 :]
        given = (layer, at, args, kwargs)
        if self.places is not None:
            given += (*self._held(i), len(self.layers))
        if run is None:
            run, done = self._function(i, given)
            self.steps[self.key, self.shape][i] = run, at
        else:
            done = run(*given)
        out, states = done
        if self.places is None:
            if states:  # none of a layer that looks at the keys of another
                self.cache.update(*states, i)
        elif states is not None:
            self.cache.layers[i].taken = states
        return out

    def _held(self, i: int) -> tuple[Held, torch.Tensor]:
        """What layer i holds, and where the block goes: nothing of the layers at the end that look at the keys of others."""
        own = self.cache.layers
        return (own[i].held, own[i].slots) if i < len(own) else (Held(None, None), own[0].slots)

    def _place(self, args: tuple, kwargs: dict) -> int | str:
        """Where the cache is among the arguments of a layer."""
        found = [at for at, part in [*enumerate(args), *kwargs.items()] if part is self.cache]
        if len(found) != 1:
            raise ValueError("its layers are not given the cache")
        return found[0]

    def _function(self, i: int, given: tuple) -> tuple[Callable, Any]:
        """The function for these arguments of layer i, and what it gives. The first layer of its kind is asked for with guards, once a call and
        shape (nothing they look at changes within one), or in every pass over the first tokens of a text, whose length they may look at."""
        leaves, structure = tree_flatten(given[1:4])
        key = (self.key, self.kinds[i], str(structure), *(part if isinstance(part, PLAIN) else type(part) for part in leaves))
        own = (key, self.shape)
        if own in self.checked:
            return self.checked[own], self.checked[own](*given)
        self.checked[own], done = self.made.ask(key, self.shape, lambda changed: self._compile(given, leaves, changed), given)
        return self.checked[own], done

    def _compile(self, given: tuple, leaves: list, changed: bool) -> Callable:
        tensors = [part for part in leaves if isinstance(part, torch.Tensor)]
        shared = [part for part in tree_leaves([dict(own) for own in leaves if isinstance(own, Mapping)]) if isinstance(part, torch.Tensor)]  # keys that later layers look at
        if self.places is not None:
            masks = [part for part in tensors if part.dim() == 4 and part.shape[-1] == self.shape[0]]
            buffers = [part for part in (*given[4][:2], *shared) if part is not None]
            sizes = [(mask, 3) for mask in masks] + [(part, 2) for part in buffers]
            return alone(at_slots, self.device, self.places, whole=False, sizes=sizes + self._of_rows(tensors, masks, buffers, given[5]))
        sizes = [(part, dim) for part in (*tensors, *shared) for dim, size in enumerate(part.shape) if size == TRIAL]
        if not sizes:
            raise NotCompiled(changed)
        return alone(from_start, self.device, TRIAL, whole=False, sizes=sizes)

    def _of_rows(self, tensors: list, masks: list, buffers: list, slots: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """Where tensors have a dimension of rows, or of the tokens of one, if that may be of another size later."""
        if len(self.shape) < 3:
            return []
        _, rows, width = self.shape
        given = [part for part in tensors if part.dim() in (2, 3) and part.shape[:2] == (rows, width)]
        found = [(part, 0) for part in (*given, *masks, *buffers, slots)] + [(part, 1) for part in (*given, slots)] + [(part, 2) for part in masks]
        return [(part, dim) for part, dim in found if part.shape[dim] > 1]
