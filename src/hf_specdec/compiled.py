"""Compiled passes: a model's forward over fixed shapes, by `torch.compile`, whole or layer by layer (`layerwise`).

A block is filled up to one of WIDTHS places, and the cache has a power of two of slots, so that a few functions serve a whole text.
What is at the places added is ignored, lies behind what is meant and is overwritten before any mask shows it. A prompt, which has a length of
its own, is compiled layer by layer only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from . import compat, passes
from .block import Block
from .fixed_cache import CountingCache, FixedCache, Read, fixed, of_one_length, why_not_compiled
from .kv_cache import SlotCache
from .layerwise import TRIAL, Layerwise, Made, NotCompiled, own_forward
from .parts import decoder_layers, modules, read_at, read_once
from .recurrences import telling
from .tap import SHOWN, note, watched

if TYPE_CHECKING:
    from .distributions import Drawing

WIDTHS = (1, 4, 8, 16, 32, 64)  # reading the weights is what a pass of few tokens costs: two tokens cost no less than four
UNROLLED = (64, 256)  # layers in one function that makes several passes, on a CPU and on a GPU
AGREES = {torch.float32: 0.01, torch.float64: 1e-6}  # relative error of the logits (root mean square) that is put up with
MOST_CHANGES = 3  # of what guards look at in prompts, after which these are not compiled any more
KEPT = ("cuda",)  # kinds of devices on which buffers are kept from call to call
WAYS = ("layers", "model")
CAPTURING = "transformers.utils.output_capturing"  # its hooks stay after a call with output_hidden_states=True, and do nothing in others
FLAT = 4  # layers up to which a model is compiled whole in any case
_functions: WeakKeyDictionary = WeakKeyDictionary()
_by_layers: WeakKeyDictionary = WeakKeyDictionary()  # model -> what `Layerwise` has made, and the passes that were tried
_idle: WeakKeyDictionary = WeakKeyDictionary()  # model -> {what for: a buffer that no call uses}
_refusals: WeakKeyDictionary = WeakKeyDictionary()  # model -> {why it runs without: whether for good}


def forward(model, tokens, embeds, positions, mask, slots, layers, read):
    """One pass over a `Block`: logits [B, W, V], what the layers that are watched put out, and the states that layers have taken. Compiled as a whole."""
    of_one_length(layers, slots, mask)
    return telling(over, _cache(layers, slots, read), model, tokens, embeds, positions, mask, read)


def _cache(layers, slots, read) -> FixedCache:
    return (FixedCache if read is None else CountingCache)([fixed(held, slots) for held in layers])


def over(cache: FixedCache, model, tokens, embeds, positions, mask, read=None):
    """`forward` with its cache made."""
    if read is None:
        first = {"input_ids": tokens} if embeds is None else {"inputs_embeds": embeds}
        given = {"position_ids": positions, "attention_mask": mask, compat.CACHE: cache, **first}
    else:
        given = {**read.inputs(tokens, mask), compat.CACHE: read.beside(cache)}
    SHOWN.clear()
    logits = model(**given, use_cache=True, return_dict=True).logits
    states = tuple(SHOWN)
    SHOWN.clear()
    return logits, states, tuple(layer.taken for layer in cache.layers)


def several(model, tokens, embeds, positions, mask, slots, layers, read, vocab, drawing, uniform):
    """Passes over one token each, every one over that of the first `vocab` tokens which `drawing` (a `distributions.Drawing`) takes after the one
    before, with uniform float64 [B, n]: int64 [B, n], their laws [B, n, vocab] or None, and the last states that were noted. The others are those of a
    `Block`; make(model, states, tokens) makes the inputs of a pass of the states noted in the one before."""
    of_one_length(layers, None, mask)
    drawn, laws, (make, states) = [], [], embeds or (None, None)
    for i in range(positions.shape[1]):
        masks = {name: each[:, :, i : i + 1] for name, each in mask.items()} if isinstance(mask, dict) else mask[:, :, i : i + 1]
        cache = _cache(layers, slots[..., i : i + 1], read)
        given = None if make is None else make(model, states, tokens)
        logits, shown, _ = over(cache, model, tokens, given, positions[:, i : i + 1], masks, read)
        states = shown[-1] if shown else None
        token, law = drawing(logits[:, -1, :vocab], uniform[:, i])
        tokens = token[:, None]
        drawn.append(tokens)
        laws.append(law)
    return torch.cat(drawn, dim=1), None if law is None else torch.stack(laws, dim=1), states


class CompiledPasses:
    """The compiled functions of one model in one call. They are kept with the model for the calls to come, as is the fact that it does not
    compile: it is then not tried again, and the reason is given once.

    untried: whether the last pass was the first of its function ever, so that its logits are to be compared (`judge`).
    checked: the functions without their guards (what torch checks before it reuses a function): evaluated once a call, because
        nothing that they look at changes within one, and they take up to a tenth of a small model's pass.
    any_rows: whether a function of several rows serves any number of them, and of tokens of each.
    read: what an encoder has read, where the model looks at it; such a model is compiled as a whole.
    """

    read: Read | None = None

    def __init__(self, model: PreTrainedModel, role: str, way: bool | str = True, reads: bool = False):
        self.model, self.role = model, role
        self.way = way if isinstance(way, str) else WAYS[compat.device_of(model).type != "cpu"]
        self.functions: passes.Functions = _functions.setdefault(model, passes.Functions())
        self.layerwise = None if reads else self._layerwise()
        self.by_layers = self.way == "layers" and self.layerwise is not None
        self.checked: dict[tuple, Callable] = {}
        self.usable: bool | None = False if any(_refusals.get(model, {}).values()) else None
        self.untried = False
        self.any_rows = compat.device_of(model).type == "cpu" and not reads and not compat.traits_of(compat.unwrap(model), role).states
        self.most, self.runner = passes.runner(model, compiled=True)
        for addition in passes.ADDITIONS:
            addition.prepare(model)
        if why := why_not_compiled(compat.unwrap(model)):
            self.give_up(why)

    def places(self, width: int, rows: int = 1) -> int | None:
        """The places of the compiled block that takes `width` tokens of each of `rows` rows; None where there is none."""
        if self.usable is None:
            apart = read_once(compat.unwrap(self.model))  # transformers leaves hooks on what reads images
            hooks = [hook for part in modules(self.model) if id(part) not in apart for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
            self.usable = all(getattr(hook, "__module__", None) == CAPTURING for hook in hooks)
            if not self.usable:
                self.give_up("it has forward hooks", for_good=False)
        most = next((places for places in WIDTHS if width <= places), None) if self.usable else None
        return width if most and rows > 1 and self.any_rows else most

    def give_up(self, why: str, for_good: bool = True) -> None:
        """No compiled pass in this call, nor in later ones where it is `for_good`."""
        self.usable, reasons = False, _refusals.setdefault(self.model, {})
        if why not in reasons:
            warnings.warn(f"{self.role}: {type(self.model).__name__} runs without compile=True: {why}.", stacklevel=2)
        reasons[why] = for_good

    def __call__(self, tokens: torch.Tensor, embeds: torch.Tensor | None, cache: SlotCache, reads: tuple[int, ...], attention_mask,
                 position_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, list[torch.Tensor], tuple] | None:
        """Logits [B, n, V] of tokens [B, n], or of their embeddings [B, n, H], in the block that `cache.plan` has laid out, what the layers
        `reads` put out, each [B, n, H], and per layer the states after the whole block; None where the model does not compile."""
        width, plan = tokens.shape[1], cache.plan
        more = plan.width - width
        masks = attention_mask if isinstance(attention_mask, dict) else {None: attention_mask}
        masks = {name: _longer(mask, 2, more) for name, mask in masks.items()}
        block = Block.laid_out(cache, pad(tokens, (0, more)), _longer(embeds, 1, more), _longer(position_ids, 1, more), masks.get(None, masks), self.read)
        rows, free = len(tokens), len(tokens) > 1 and self.any_rows  # one function for any number of rows, and of tokens, from two on
        size = (2, min(plan.width, 2), rows * plan.width <= passes.FEW) if free else (rows, plan.width)
        key = (*size, tokens.device, *block.kind, type(self.model), embeds is None, reads)
        run = self._run_by_layers if self.by_layers else self._run
        done = run(key, forward, rows * plan.width, (plan.capacity, rows, plan.width) if free else (plan.capacity,), reads, block)
        if done is None:
            return None
        logits, states, taken = done
        return logits[:, :width], [part[:, :width] for part in states], taken

    def start(self, run: Callable, inputs: dict, reads: tuple[int, ...], trial: Callable[[bool], None]) -> tuple | None:
        """Logits and states, as above, of a pass run(**inputs) over the first tokens of a text; None where there is no function for it, and on a GPU. trial: called
        as trial(whether a mask is given) to have it made: runs such a pass over texts of `TRIAL` tokens."""
        tokens, mask = inputs.get("input_ids", inputs.get("inputs_embeds")), inputs["attention_mask"]
        if self.layerwise is None or self.places(1) is None or tokens.shape[1] < 2 or tokens.device.type != "cpu":
            return None
        key = (tokens.shape[0], mask is None, tokens.device, self.model.dtype, type(self.model), "input_ids" in inputs)
        if self.layerwise.changes[key] > MOST_CHANGES:  # a function that asks for the length, it seems
            return None
        if key not in self.layerwise.tried and tokens.shape[1] != TRIAL:
            trial(mask is not None)
            if not self.usable or self.layerwise.changes[key] > MOST_CHANGES:
                return None
        self.untried, (most, team) = key not in self.layerwise.tried, passes.runner(self.model, compiled=True, prompt=True)
        try:
            with watched(read_at(compat.unwrap(self.model), reads)) as states, self.layerwise.running(key, inputs[compat.CACHE], None):
                logits = (team(run, **inputs) if tokens.numel() <= most and not self.untried else run(**inputs)).logits
            self.layerwise.tried.add(key)
            return logits, states
        except NotCompiled as error:
            self.layerwise.changes[key] += error.changed
            self.layerwise.tried -= {key} if error.changed else set()
            return None
        except (MemoryError, torch.OutOfMemoryError) as error:
            self._refuse(error)
            return None
        except Exception:  # a layer that does not compile by itself: passes over few tokens may, or the whole model
            self.layerwise.changes[key] = MOST_CHANGES + 1
            self.layerwise.tried.discard(key)
            return None

    def most_steps(self) -> int:
        """Passes that one function may make, a power of two: what the compiler takes grows with their layers."""
        layers = self.model.config.get_text_config().num_hidden_layers
        if self.by_layers or compat.traits_of(compat.unwrap(self.model), self.role).states:  # these are kept after every token
            return 1
        return 1 << max(UNROLLED[self.model.device.type == "cuda"] // layers, 1).bit_length() - 1

    def several(self, tokens: torch.Tensor, embeds: tuple[Callable, torch.Tensor] | None, cache: SlotCache, reads: tuple[int, ...], vocab: int,
                drawing: Drawing, uniform: torch.Tensor, position_ids: torch.Tensor, attention_mask) -> tuple | None:
        """What the function `several` gives for the n tokens that `cache.plan` has laid out; None where the model does not compile."""
        block = Block.laid_out(cache, tokens, embeds, position_ids, attention_mask, self.read)
        key = (tokens.shape[0], -cache.plan.width, tokens.device, *block.kind, type(self.model), vocab, embeds and embeds[0], drawing.settings, reads)
        return self._run(key, several, tokens.shape[0], (cache.plan.capacity,), reads, block, vocab, drawing, uniform.contiguous())

    def _run(self, key: tuple, function: Callable, places: int, shape: tuple[int, ...], reads: tuple[int, ...], block: Block, *more):
        """The compiled `function` of these arguments, while `reads` are noted; None where it does not compile. shape: slots of the cache, and of several rows, how many, and their tokens."""
        device, given = block.tokens.device, (self.model, *block, *more)
        key, own = key if device.type == "cpu" else (key, *shape), (key, *shape)  # a CUDA graph is for one number of slots
        self.untried = self.functions.untried(key, shape)
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()  # else every pass is a graph behind the graphs of all passes before it
        try:
            with watched(read_at(compat.unwrap(self.model), reads), note):
                if own not in self.checked:
                    sizes = block.sizes(slots=device.type == "cpu", rows=len(shape) > 1)
                    self.checked[own], done = self.functions.ask(key, shape, lambda _: passes.alone(function, device, places, sizes=sizes), given)
                else:
                    run = self.checked[own]
                    done = self.runner(run, *given) if places <= self.most else run(*given)
        except Exception as error:  # whatever tracing or the compiler says: the pass can be run without them
            self._refuse(error)
            return None
        self.functions.passed(key, shape)
        return tree_map_only(torch.Tensor, torch.clone, done) if device.type == "cuda" else done  # the next graph writes where this one did

    def _run_by_layers(self, key: tuple, function: Callable, places: int, shape: tuple[int, ...], reads: tuple[int, ...], block: Block):
        """`_run` of `forward`, whose layers are compiled."""
        cache = FixedCache([fixed(held, block.slots) for held in block.layers])
        self.untried = self.layerwise.made.untried(key, shape)
        try:
            with watched(read_at(compat.unwrap(self.model), reads), note), self.layerwise.running(key, cache, places, shape):
                team = places <= self.most and not self.untried
                arguments = (cache, self.model, block.tokens, block.embeds, block.positions, block.mask)
                done = self.runner(over, *arguments) if team else over(*arguments)
            self.layerwise.made.passed(key, shape)
            return done
        except Exception as error:
            self._refuse(error)
            return None

    def _refuse(self, error: Exception) -> None:
        why = f"torch.compile says {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        self.give_up(why, for_good=not isinstance(error, (MemoryError, torch.OutOfMemoryError)))

    def _layerwise(self) -> Layerwise | None:
        """None for a model of few layers, of none that are known, or whose layers' forwards are somebody else's, and where torch shows no versions."""
        try:
            layers = list(decoder_layers(compat.unwrap(self.model))[1])
        except ValueError:
            return None
        if len(layers) <= FLAT or not passes.shows_versions() or not all(map(own_forward, layers)):
            return None
        return Layerwise(layers, _by_layers.setdefault(self.model, Made()), compat.device_of(self.model))

    def judge(self, logits: torch.Tensor, reference: torch.Tensor, what: str = "logits") -> None:
        """Compare what the first pass of a function has made with the same of that pass uncompiled."""
        logits, reference = logits.float(), reference.float()
        finite = reference.isfinite()  # a pruned head gives minus infinity to the tokens it lacks
        same = torch.equal(logits[~finite], reference[~finite])
        error = float((logits - reference)[finite].norm() / reference[finite].norm().clamp(min=1e-30)) if same else torch.inf
        if not error <= AGREES.get(self.model.dtype, 0.2):
            self.functions.made.clear()
            self.give_up(f"compiled, its {what} are off by {error:.2g} of their size")


class FixedBuffers:
    """Keys and values of the compiled passes of one model in one `role` in one call. A CUDA graph writes into those that it was recorded with: they
    are marked as inputs whose address stays (without the mark torch records no graph of a function that writes into its inputs), and on a GPU the next
    call gets them again. Two calls at a time never share one."""

    def __init__(self, model: PreTrainedModel, role: str):
        self.role, self.idle = role, _idle.setdefault(compat.unwrap(model), {})

    def take(self, purpose: Hashable, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Zeros of that shape, with dtype and device of `like`: the one given back for this purpose, if there is one."""
        buffer = self.idle.pop(self._key(purpose, shape, like), None)
        if buffer is not None:
            return buffer.zero_()
        buffer = torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)
        if not torch.compiler.is_dynamo_compiling():  # by the caller, who has compiled the model
            from torch._dynamo import mark_static_address

            mark_static_address(buffer, guard=False)  # at another address a graph is recorded anew
        return buffer

    def give_back(self, purpose: Hashable, buffer: torch.Tensor) -> None:
        """Keep the buffer for the next call, on devices where that helps; nobody may read it any more."""
        if buffer.device.type in KEPT:
            self.idle.setdefault(self._key(purpose, buffer.shape, buffer), buffer)

    def _key(self, purpose: Hashable, shape: Sequence[int], like: torch.Tensor) -> tuple:
        return self.role, purpose, tuple(shape), like.dtype, like.device, torch.is_inference_mode_enabled()  # such tensors are of no use outside


def free(model: PreTrainedModel) -> None:
    """Let go of the buffers that are kept for the model's next call."""
    _idle.pop(compat.unwrap(model), None)


def _longer(part: torch.Tensor | None, dim: int, more: int) -> torch.Tensor | None:
    """`part`, if there is one, with its last entry along `dim` repeated `more` times."""
    if part is None or not more:
        return part
    last = part.narrow(dim, part.shape[dim] - 1, 1)
    return torch.cat([part, *[last] * more], dim=dim)
