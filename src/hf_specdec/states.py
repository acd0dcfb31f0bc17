"""Layers that carry a state from token to token instead of keys and values: state-space models (Mamba), linear attention (gated delta rules), short
convolutions; alone, or beside attention in a hybrid model.

No token can be taken out of a state again. It is therefore kept as it was before a pass, with what the pass has told it (`recurrences`): from these follows the state
after the tokens that were accepted. That of a convolution consists of its last inputs. Of layers that are not known there, states are put back to where an earlier
pass has left them; tokens that have been committed since are fed once more, in front of the next candidates, and only where there are none may that take passes of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import inf
from threading import RLock

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache, LinearAttentionLayer

from . import rglru  # noqa: F401  (its blocks are among those that `Recurrences` finds)
from .checkpoint import Checkpoint, State
from .fixed_cache import Held
from .kv_cache import SlotLayer, SlotPlan
from .recurrences import BEFORE, Block, Recurrences, Told

ANY = (0.0, inf)  # of a time step's limits
HELD = ("conv_states", "recurrent_states", "conv_kernel_size", "has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized", "dtype", "device")
_limits = RLock()  # who holds it may change them


class StateLayer(SlotLayer, LinearAttentionLayer):
    """`count` states, and the keys and values of a layer that has attention, too. In a pass, convolutions record all their inputs."""

    def __init__(self, plan: SlotPlan, index: int, count: int):
        SlotLayer.__init__(self, plan, index)
        LinearAttentionLayer.__init__(self, count)
        self.activate_past_recording()

    def lazy_initialization(self, *keys_and_values, **states) -> None:
        (SlotLayer if keys_and_values else LinearAttentionLayer).lazy_initialization(self, *keys_and_values, **states)

    def is_recurrent(self) -> bool:
        return any(state is not None for state in self.recurrent_states.values())

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        """Padding before a text is nothing to a convolution, also where a bias has made something of it. What is kept [B, C, n] lies in memory as layers make it,
        token after token, and so does what is put together."""
        if self.plan.padded and conv_states.shape[-1] == self.plan.width:  # Zaya gives the last states alone, and hides padding itself
            conv_states = conv_states.masked_fill((self.plan.slots < 0).to(conv_states.device)[:, None], 0)
        if not self.has_previous_state[state_idx]:
            return LinearAttentionLayer.update_conv_state(self, conv_states, state_idx=state_idx, **kwargs)
        parts = self.conv_states[state_idx].transpose(1, 2), conv_states.transpose(1, 2)
        self.conv_states[state_idx] = torch.cat(parts, dim=1).transpose(1, 2)
        return self.conv_states[state_idx]

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        """Keep the state itself, in the number format of the first; transformers copies it into that one's place, for graphs."""
        before = self.recurrent_states[state_idx]
        self.recurrent_states[state_idx] = recurrent_states if before is None else recurrent_states.to(before.dtype)
        self.is_recurrent_states_initialized[state_idx] = True
        return self.recurrent_states[state_idx]

    def held(self) -> Held:
        """Laid out in memory as ever: a compiled function does not look again."""
        inputs, recurrent = self.conv_states.values(), self.recurrent_states.values()
        return Held(*super().held()[:2], tuple(part if part is None else _apart(part) for part in inputs), tuple(map(_in_order, recurrent)))

    def taken(self, more: int) -> State:
        """The states after a pass; of what convolutions have read as much as the next token needs, and `more` tokens before that."""
        inputs = {i: None if part is None else _apart(self._last(i, part, more)) for i, part in self.conv_states.items()}
        return inputs, dict(self.recurrent_states)

    def put(self, state: State | None, copied: bool = True) -> None:
        """Go on from a copy of `state`, because models change theirs in place; without one, from nothing. copied: False where nobody wants it any more."""
        inputs, recurrent = state or ({}, {})
        for i in range(self.number_of_states):
            part, other = inputs.get(i), recurrent.get(i)
            short = 0 if part is None else max(self.conv_kernel_size[i] - part.shape[-1], 0)
            self.conv_states[i] = None if part is None else pad(part, (short, 0)) if short else _apart(self._last(i, part))
            self.recurrent_states[i] = other.clone() if copied and other is not None else other
            self.is_conv_states_initialized[i], self.is_recurrent_states_initialized[i] = part is not None, other is not None
            self.has_previous_state[i] = part is not None or other is not None

    def _last(self, i: int, inputs: torch.Tensor, more: int = 0) -> torch.Tensor:
        return inputs[..., -self.conv_kernel_size[i] - more :]


class Checkpoints:
    """The states of `layers` of one cache after passes of `model` that may have to be returned to, row by row.

    PENDING: most tokens of a lone row that are fed once more in front of candidates; more than that get a pass of their own, which is a checkpoint, too.
    REACH: by how many tokens of a pass its states can be cut.
    """

    PENDING, REACH = 16, 128

    def __init__(self, layers: list[SlotLayer], model: nn.Module):
        self.layers = [layer for layer in layers if isinstance(layer, StateLayer)]
        self.kept: list[Checkpoint] = []
        self.begun = False  # whether there has been a pass in this call
        self.final = False  # whether all that the next pass reads is committed: nothing goes back to before it
        self.recurrences = Recurrences(model)
        with _limits:
            self.limited = [part for part in model.modules() if tuple(getattr(part, "time_step_limit", None) or ANY) != ANY]

    def apart(self, fresh: list[list[int]], sizes: list[int]) -> bool:
        """Whether all but the last of the `fresh` tokens of each row get passes of their own, before one over sizes[b] candidates: if a lone row has many, or if
        nothing is proposed and rows are unequal, because the shorter ones could not go on from a pass that pads them."""
        if len(fresh) == 1:
            return len(fresh[0]) > self.PENDING
        return not any(sizes) and len(set(map(len, fresh))) > 1

    @contextmanager
    def during(self, starts: list[int], width: int) -> Iterator[None]:
        """A pass that reads `width` tokens from position starts[b] on goes on from the last states, and leaves others. starts[b] < 0: of a text, after padding."""
        known = self.recurrences.layers
        for layer, state in zip(self.layers, self.kept[-1].states if self.kept else [None] * len(self.layers)):
            layer.put(state, copied=not self.final and (width == 1 or layer.index not in known))  # functions over several tokens leave a state alone
        read = Block({layer.index: layer.recurrent_states[0] for layer in self.layers if layer.recurrent_states.get(0) is not None},
                     kept=1 < width <= self.REACH and not self.final)
        with self._heeding(prompt=not self.kept or not self.begun and width > 1) if self.limited else nullcontext(), self.recurrences.reading(read):
            yield
        self.begun = True
        self.add(self._taken(starts, width, [read.after.get(layer.index) if layer.is_recurrent() else None for layer in self.layers]))

    def _taken(self, starts: list[int], width: int, after: list[Callable | None], open: bool = False) -> Checkpoint:
        """What the layers hold after a pass."""
        reach = min(self.REACH, width) if all(make or not layer.is_recurrent() for make, layer in zip(after, self.layers)) else 0
        states, block = [layer.taken(reach) for layer in self.layers], (starts, after) if any(after) else None
        return Checkpoint([start + width for start in starts], reach, states, block, open)

    def add(self, taken: Checkpoint) -> None:
        """These are the states now."""
        self.kept, self.final = [*([] if self.final else self.kept), taken], False

    # --- a compiled pass ----------------------------------------------------------------------------------------------------

    def why_not_compiled(self) -> str | None:
        """What a pass that is not the first has against being compiled."""
        known = {index for index, (form, _) in self.recurrences.forms.items() if form in BEFORE}
        if any(layer.is_recurrent() and layer.index not in known for layer in self.layers):
            return "it carries states that are made token by token, or by layers of another kind, or with hooks of accelerate on them"
        return None

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A compiled pass goes on from the last states."""
        for layer, state in zip(self.layers, self.kept[-1].states):
            layer.put(state, copied=False)
        with self._heeding(prompt=False) if self.limited else nullcontext(), self.recurrences.reading(Block({}, kept=False)):
            yield

    def told(self, starts: list[int], width: int, taken: list[tuple[tuple, tuple]]) -> Checkpoint:
        """What a compiled pass over `width` places from position starts[b] on has taken, per layer. Those at the end of the places are not all meant."""
        after: list[Callable | None] = [None] * len(self.layers)
        for i, (layer, (inputs, recurrent)) in enumerate(zip(self.layers, taken)):
            layer.conv_states = dict(enumerate(inputs))
            if isinstance(recurrent[0], Told):
                after[i] = self.recurrences.after(layer.index, recurrent[0], layer.recurrent_states[0])
            else:
                layer.recurrent_states = dict(enumerate(recurrent))
        return self._taken(starts, width, after, open=any(after))

    def beside(self, other: Checkpoint) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The states of `other`, which stands for as many tokens or more, beside the last ones."""
        last = self.kept[-1]
        other.cut(last.lengths)
        for layer, (inputs, recurrent), (own_inputs, own_recurrent) in zip(self.layers, other.states, last.states):
            yield from ((layer._last(i, part), layer._last(i, own_inputs[i])) for i, part in inputs.items() if part is not None)
            yield from ((part, own_recurrent[i]) for i, part in recurrent.items() if part is not None)

    @contextmanager
    def _heeding(self, prompt: bool) -> Iterator[None]:
        """transformers limits the time steps of Mamba 2 in prompts and not in decoding. Of several threads one at a time."""
        with _limits:
            limits = [part.time_step_limit for part in self.limited]
            try:
                for part in () if prompt else self.limited:
                    part.time_step_limit = ANY
                yield
            finally:
                for part, limit in zip(self.limited, limits):
                    part.time_step_limit = limit

    def back_to(self, lengths: list[int], settled: bool = True) -> list[int]:
        """Forget what was read from position lengths[b] on in row b. How many tokens the states stand for then: so many or fewer. settled: nothing will go
        back to states of much before; without it all are kept."""
        kept: list[Checkpoint] = []
        for own in self.kept:
            wanted = [min(length, most) for length, most in zip(own.lengths, lengths)]
            if max(length - least for length, least in zip(own.lengths, wanted)) <= own.reach and min(wanted) > 0:
                own.cut(wanted)
            before = kept[-1] if kept else None
            own = own.rows_of(before, [length > most for length, most in zip(own.lengths, lengths)])
            if own is not before and any(own.lengths) and (before is None or own.lengths != before.lengths):
                kept.append(own)
        self.kept = kept[-2:] if settled else kept  # drafts inside a cascade go back once more
        return list(kept[-1].lengths) if kept else [0] * len(lengths)

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        self.kept = [one.keep(rows) for one in self.kept]

    # --- a caller's own cache, of one row -----------------------------------------------------------------------------------

    def load(self, cache: Cache, lengths: list[int]) -> None:
        """Go on from a copy of the states in a filled cache of transformers, which stand for so many tokens."""
        for own, given in zip(self.layers, _holders(cache)):
            for name in HELD:
                setattr(own, name, copy.copy(getattr(given, name)))
        self.kept = [Checkpoint(lengths, 0, [(dict(given.conv_states), dict(given.recurrent_states)) for given in _holders(cache)])]

    def store(self, cache: Cache) -> None:
        """Put a copy of the last states into a cache of transformers."""
        for own, state, into in zip(self.layers, self.kept[-1].states, _holders(cache)):
            own.put(state)
            for name in HELD:
                setattr(into, name, copy.copy(getattr(own, name)))


def _apart(inputs: torch.Tensor) -> torch.Tensor:
    """A copy of what a convolution has read [B, C, n], token after token in memory."""
    return inputs.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _in_order(state: torch.Tensor | None) -> torch.Tensor | None:
    """The state, contiguous in memory."""
    return state if state is None or state.is_contiguous() else state.contiguous()


def _holders(cache: Cache) -> list[LinearAttentionLayer]:
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
