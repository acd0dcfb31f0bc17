"""Compiled passes: a model's forward over fixed shapes, by `torch.compile`.

A block is filled up to one of WIDTHS places, and the cache has a power of two of slots, so that a few functions serve a whole text.
What is at the places added is ignored, lies behind what is meant and is overwritten before any mask shows it. The prompt pass
is not compiled: every prompt has a length of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import count
from types import FunctionType
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from . import compat, passes
from .kv_cache import FixedCache, SlotCache
from .parts import read_at
from .tap import SHOWN, note, watched

FEW = 16
WIDTHS = (1, 4, 8, 16, 32, 64)  # reading the weights is what a pass of few tokens costs: two tokens cost no less than four
AGREES = {torch.float32: 0.01, torch.float64: 1e-6}  # relative error of the logits (root mean square) that is put up with
_functions: WeakKeyDictionary = WeakKeyDictionary()
_refusals: WeakKeyDictionary = WeakKeyDictionary()  # model -> {why it runs without: whether for good}
_numbers = count()


def forward(model, tokens, embeds, positions, mask, slots, keys, values):
    """One pass: tokens int64 [B, W], or embeds [B, W, H] in their place, positions int64 [B, W], mask float [B, 1, W, S] or one per layer type, slots
    int64 [W] or [B, W], and per layer keys and values [B, H, S, D], which are written; logits [B, W, V], and what the layers that are
    watched put out. Compiled as a whole."""
    cache = FixedCache(keys, values, slots)
    given = {"input_ids": tokens} if embeds is None else {"inputs_embeds": embeds}
    SHOWN.clear()
    logits = model(**given, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True, return_dict=True).logits
    states = tuple(SHOWN)
    SHOWN.clear()
    return logits, states


def options(device: torch.device, places: int) -> dict:
    """What `torch.compile` is told for a pass over `places` tokens: CUDA graphs on a GPU; on a CPU one C++ function, whose own loops (not
    the products) have no use for threads where the tokens are few, of the graph as the additions to passes leave it. It rounds where eager mode
    does: otherwise what is rounded would depend on the shape, and so would the bits of a token's logits."""
    if device.type == "cuda":
        return {"mode": "reduce-overhead"}
    from torch._inductor import compile as inductor
    from torch._inductor import list_options

    wanted = {"cpp_wrapper": True, "size_asserts": False, "alignment_asserts": False, "emulate_precision_casts": True}
    wanted |= {"cpp.threads": 1} if places <= FEW else {}
    for addition in passes.ADDITIONS:
        wanted |= addition.options()
    wanted = {name: value for name, value in wanted.items() if name in list_options()}

    def backend(graph, inputs):
        for addition in passes.ADDITIONS:
            addition.rewrite(graph)
        return inductor(graph, inputs, options=wanted)

    return {"backend": backend}


def unguarded(function: Callable) -> Callable:
    """What a compiled `forward` comes to, without guards; the function itself where torch has more than one version of it or does not tell."""
    try:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list as versions

        (only,) = versions(function.__wrapped__.__code__)
        return FunctionType(only.code, forward.__globals__)
    except (ImportError, AttributeError, TypeError, ValueError):
        return function


class CompiledPasses:
    """The compiled functions of one model in one call. They are kept with the model for the calls to come, as is the fact that it does not
    compile: it is then not tried again, and the reason is given once.

    untried: whether the last pass was the first of its function ever, so that its logits are to be compared (`judge`).
    checked: the functions without their guards (what torch checks before it reuses a function): evaluated once a call, because
        nothing that they look at changes within one, and they take up to a tenth of a small model's pass.
    """

    def __init__(self, model: PreTrainedModel, role: str):
        self.model, self.role = model, role
        self.functions: dict[tuple, Callable] = _functions.setdefault(model, {})
        self.checked: dict[tuple, Callable] = {}
        self.usable: bool | None = False if any(_refusals.get(model, {}).values()) else None
        self.untried = False
        self.most, self.runner = passes.runner(model, compiled=True)
        for addition in passes.ADDITIONS:
            addition.prepare(model)

    def places(self, width: int) -> int | None:
        """The places of the compiled block that takes `width` tokens; None where there is none."""
        if self.usable is None:
            self.usable = not any(part._forward_hooks or part._forward_pre_hooks for part in self.model.modules())
            if not self.usable:
                self.give_up("it has forward hooks", for_good=False)
        return next((places for places in WIDTHS if width <= places), None) if self.usable else None

    def give_up(self, why: str, for_good: bool = True) -> None:
        """No compiled pass in this call, nor in later ones where it is `for_good`."""
        self.usable, reasons = False, _refusals.setdefault(self.model, {})
        if why not in reasons:
            warnings.warn(f"{self.role}: {type(self.model).__name__} runs without compile=True: {why}.", stacklevel=2)
        reasons[why] = for_good

    def __call__(self, tokens: torch.Tensor, embeds: torch.Tensor | None, cache: SlotCache, reads: tuple[int, ...], position_ids: torch.Tensor,
                 attention_mask) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """Logits [B, n, V] of tokens [B, n], or of their embeddings [B, n, H], in the block that `cache.plan` has laid out, and what the layers
        `reads` put out, each [B, n, H]; None where the model does not compile."""
        width, plan = tokens.shape[1], cache.plan
        more = plan.width - width
        layers = [layer.settled() for layer in cache.layers]
        keys, values = [layer.keys for layer in layers], [layer.values for layer in layers]
        slots = plan.slots if len(tokens) > 1 else plan.slots[0]
        masks = attention_mask if isinstance(attention_mask, dict) else {None: attention_mask}
        masks = {name: _longer(mask, 2, more) for name, mask in masks.items()}
        embeds = None if embeds is None else _longer(embeds, 1, more)
        given = (self.model, pad(tokens, (0, more)), embeds, _longer(position_ids, 1, more), masks.get(None, masks), slots, keys, values)
        key = (tokens.shape[0], plan.width, plan.capacity, tokens.device, keys[0].dtype, len(keys), type(self.model), embeds is None, reads)
        self.untried = key not in self.functions
        if self.untried:
            self.functions[key] = self._made(tokens.device, tokens.shape[0] * plan.width)
        try:
            with watched(read_at(compat.unwrap(self.model), reads), note):
                if key not in self.checked:
                    logits, states = self.functions[key](*given)
                    self.checked[key] = unguarded(self.functions[key])
                else:
                    run = self.checked[key]
                    logits, states = self.runner(run, *given) if tokens.shape[0] * plan.width <= self.most else run(*given)
        except Exception as error:  # whatever tracing or the compiler says: the pass can be run without them
            self.functions.pop(key)
            self.give_up(f"torch.compile says {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            return None
        logits, *states = (part.clone() if tokens.device.type == "cuda" else part for part in (logits, *states))
        return logits[:, :width], [part[:, :width] for part in states]

    @staticmethod
    def _made(device: torch.device, places: int) -> Callable:
        """`forward`, compiled, as a function of its own: what torch keeps by its code is then one entry."""
        code = forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
        function = FunctionType(code, forward.__globals__, code.co_name)
        return torch.compile(function, fullgraph=True, dynamic=False, **options(device, places))

    def judge(self, logits: torch.Tensor, reference: torch.Tensor) -> None:
        """Compare the first pass of a function with the same pass uncompiled; both [B, n, V]."""
        logits, reference = logits.float(), reference.float()
        finite = reference.isfinite()  # a pruned head gives minus infinity to the tokens it lacks
        same = torch.equal(logits[~finite], reference[~finite])
        error = float((logits - reference)[finite].norm() / reference[finite].norm()) if same else torch.inf
        if not error <= AGREES.get(self.model.dtype, 0.2):
            self.functions.clear()
            self.give_up(f"compiled, its logits are off by {error:.2g} of their size")


def _longer(part: torch.Tensor, dim: int, more: int) -> torch.Tensor:
    """The last entry along `dim` once more, `more` times."""
    if not more:
        return part.contiguous()
    last = part.narrow(dim, part.shape[dim] - 1, 1)
    return torch.cat([part, *[last] * more], dim=dim)
