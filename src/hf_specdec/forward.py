"""One forward of a model over a block of tokens, behind what its cache holds: compiled or not, with what drafts want to see of it.

It knows positions and cache slots, and what is in sight of them, from where each row's block begins.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from . import compat, passes
from .caches import MADE, seeing
from .compiled import WIDTHS, CompiledPasses, FixedBuffers
from .head import READ, head_at, places_of
from .kv_cache import SlotCache, SlotLayer
from .layerwise import TRIAL
from .lengths import check_counting, counts_itself
from .lockstep import in_stages, shared_by_processes
from .masks import Placing
from .media import Media
from .own_cache import Handed, OwnCache, Snapshots
from .parts import read_at
from .positions import FIRST, counted_by_row, counting
from .seq2seq import BLIND, Decoder, Source
from .states import Checkpoints, StateLayer
from .tap import Tap, layers_of, show, watched, without_padding
from .tree import Tree
from .uploads import upload

if TYPE_CHECKING:
    from .elsewhere import Elsewhere
    from .per_token import PerToken


class Forward:
    """limit: most slots a row can need. role: how errors name the model. source: what the decoder of an encoder-decoder reads.

    lengths: tokens per row that come before a block.
    media: what the prompts show beside their text; the first pass reads it.
    ahead: per row, by how much the positions of its tokens exceed their number; [] where they are the same.
    sight: what the tokens behind the prompts look at of what these show, as `Media.sight` has it.
    reader: called as reader(firsts, logits) in a pass over more than the root, with the logits [B, n, V] of the block's last n
        places, the first of which is position firsts[b] of row b; n is cut so that they are at most READ numbers. None: not wanted.
    embed: makes the inputs [B, L, H] of a pass from its tokens [B, L]; None: the model's own embedding does.
    per_token: where hidden states and attentions are kept that a call is to return; None where it is not.
    taps: who sees what layers put out (`watch`).
    calls, seconds: forwards run, and the time they took on the host.
    elsewhere: where keys and values are that are not simply on the device; such passes are not compiled.
    compiled: the passes over fixed shapes, where compile=True; the prompt pass, and what does not compile, runs without.
    """

    def __init__(self, model: PreTrainedModel, limit: int, role: str = "target", traits: compat.ModelTraits | None = None,
                 source: Source | None = None, compile: bool | str = False, elsewhere: Elsewhere | None = None):
        self.model, self.role, self.elsewhere = model, role, elsewhere
        self.run = model if source is None else Decoder(model, source)
        self.traits = traits or compat.traits_of(compat.unwrap(model), role)
        aligned = self.traits.own_positions and not self.traits.states
        self.cache, self.states = self._caches(limit, bool(compile), aligned)
        if self.traits.own_cache and compat.unwrap(model).config.model_type in MADE:
            self.run = Handed(model, compat.unwrap(model).config)
        self.counting = counting(compat.unwrap(model)) if aligned and not self.traits.placed else []
        self.shares = bool(getattr(compat.unwrap(model).config.get_text_config(), "num_kv_shared_layers", 0))
        self.blind = source is not None and compat.unwrap(model).config.model_type in BLIND
        self.compiled = CompiledPasses(model, role, compile, source is not None) if compile else None
        self.most, self.runner = passes.runner(model, compiled=False)
        flash, own = self.traits.flash, self.traits.own_positions and not self.traits.states
        if compile and (own and (source is None or flash) or counts_itself(compat.unwrap(model), limit)):
            self.compiled.give_up("it runs flash attention, which takes no mask over buffers of fixed shapes" if flash else
                                  "it makes its masks or positions itself", for_good=not flash)
        if compile and self.traits.own_cache and self.compiled.usable is not False:
            self.compiled.give_up("it has a cache of its own kind", for_good=True)
        if compile and shared_by_processes(model):
            self.compiled.give_up("several processes run it together", for_good=False)
        self.device, self.dtype = compat.device_of(model), model.dtype
        self.media: Media | None = None
        self.lengths: list[int] = []
        self.ahead: list[int] = []
        self.sight: dict[str, torch.Tensor] = {}
        self.begin = FIRST.get(compat.unwrap(model).config.model_type, 0)
        self.reader: Callable[[list[int], torch.Tensor], None] | None = None
        self.embed: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.taps: list[Tap] = []
        self.per_token: PerToken | None = None
        self.calls, self.seconds = 0, 0.0
        self.placing = Placing(self.traits, self.dtype, self.device)

    def _caches(self, limit: int, compile: bool, aligned: bool) -> tuple[SlotCache | OwnCache, Checkpoints | Snapshots | None]:
        """What is read from, and what of it is put back after a rejection, where slots are not simply written over."""
        model = compat.unwrap(self.model)
        if self.traits.own_cache:
            cache = OwnCache(model.config, limit)
            return cache, Snapshots(cache)
        plain, carrying = (SlotLayer, StateLayer) if self.elsewhere is None else (self.elsewhere.layer, self.elsewhere.layer)
        cache = SlotCache(limit, FixedBuffers(self.model, self.role) if compile else None, self.traits.states, carrying, aligned, seeing(model.config), plain)
        return cache, Checkpoints(cache.layers, model) if self.traits.states else None

    @property
    def blocks(self) -> tuple[int, ...]:
        """Tokens of a row that compiled passes are filled up to; () where there are none."""
        return () if self.compiled is None or self.compiled.usable is False else WIDTHS

    def watch(self, layers: tuple[int, ...]) -> Tap:
        """Show, from now on, what these layers put out in every pass."""
        if in_stages(self.model):
            raise ValueError("assistant_model: it reads what layers of the target put out, and these lie in several processes, one after the other (pipeline parallel). "
                             "Pass another draft.")
        looking = seeing(compat.unwrap(self.model).config)
        if self.media is None and not set(layers).isdisjoint(looking):
            raise ValueError(f"assistant_model: it reads what the layers {list(layers)} of the target put out, and {list(looking)} look at images, without which they do not "
                             "run. Pass another draft.")
        self.taps.append(Tap(layers))
        return self.taps[-1]

    def _forward(self, tokens: torch.Tensor, tree: Tree | None, sizes: list[int], columns: torch.Tensor | None = None,
                 first: int = 0) -> torch.Tensor:
        """Logits at `columns` int64 [B, m] of the block, on the CPU, or at all of them; sizes[b]: places of row b that are meant. first: the node
        of the tree at which the block begins."""
        begin = perf_counter()
        if tokens.shape[1] == 1 and self.blind and len(set(self.lengths)) > 1:  # a place of padding more, and the mask hides what is before shorter rows
            tokens = torch.nn.functional.pad(tokens, (0, 1))
            columns = torch.zeros((len(tokens), 1), dtype=torch.long, device="cpu")
        most = (0 if self.shares else None) if self.reader is None else max(READ // (len(tokens) * self.traits.vocab_size), 1)
        places, columns = (None, None) if columns is None else places_of(columns, tokens.shape[1], most)
        last = len(places) if places is not None and int(places[0]) == tokens.shape[1] - len(places) else 0
        wanted, columns = (None, None) if columns is None else (upload(places, self.device), upload(columns, self.device))
        apart = columns is not None and self.reader is None and self.compiled is None and self.traits.logits_to_keep \
            and len(wanted) > columns.shape[1]
        with head_at(self.model, columns if apart else None):
            logits = self._logits(tokens, tree, sizes, first, wanted, last)
        if columns is not None and logits.shape[1] == len(wanted):
            if self.reader is not None:
                self.reader(*without_padding([length + int(places[0]) for length in self.lengths], logits))
            logits = logits[torch.arange(len(sizes), device=logits.device)[:, None], columns.to(logits.device)]
        self.calls += 1
        self.seconds += perf_counter() - begin
        return logits

    def _logits(self, tokens: torch.Tensor, tree: Tree | None, sizes: list[int], first: int, wanted: torch.Tensor | None, last: int) -> torch.Tensor:
        """One forward; logits at the places `wanted` int64 [n] of the block, or at all of them. last: n where these are the last ones, else 0."""
        width, starts, layers = tokens.shape[1], [length + first for length in self.lengths], layers_of(self.taps)
        logits = taken = None
        embeds = self.embed and self.embed(tokens)
        places = self._compiled_places(width, starts)
        if places is not None:
            self.cache.plan.lay(starts, places, self.device, whole=True)
            with nullcontext() if self.states is None else self.states.telling():
                done = self.compiled(tokens, embeds, self.cache, layers, **self._positions_and_masks(width, tree, sizes, first))
            logits, states, parts = done or (None, [], ())
            taken = self.states.told(starts, places, [own for own in parts if own is not None]) if done and self.states is not None else None
            if done and not self.compiled.untried:
                if taken is not None:
                    self.states.add(taken)
                show(self.taps, states, starts)
                return logits if wanted is None else logits[:, wanted.to(logits.device)]
        self.cache.plan.lay(starts, width, self.device)
        seen = self.media is not None and max(starts) <= 0
        inputs = self.media.first_pass(tokens, [-start for start in starts], sizes, self.cache) if seen else self._positions_and_masks(width, tree, sizes, first)
        keep = wanted is not None and self.traits.logits_to_keep
        counted = last and self.shares and self.compiled is None and not layers and self.per_token is None  # told a number, such a model leaves other places out of layers without keys of their own
        inputs |= {"logits_to_keep": last if counted else wanted} if keep else {}
        inputs |= {compat.CACHE: self.cache, "use_cache": True, "return_dict": True} | ({} if self.per_token is None else self.per_token.asked)
        if "inputs_embeds" not in inputs:
            inputs |= {"input_ids": tokens} if embeds is None else {"inputs_embeds": embeds}
        if self.compiled is not None and not any(starts) and not seen and self.states is None:
            logits, states = self.compiled.start(self.run, inputs, layers, self._trial) or (None, [])
            if logits is not None and not self.compiled.untried:
                show(self.taps, states, starts)
                return logits if keep or wanted is None else logits[:, wanted.to(logits.device)]
        kept = nullcontext() if self.states is None else self.states.during(starts, width)
        apart = any(self.ahead) or self.cache.plan.columns is not None  # positions are not those that the model would count
        told = counted_by_row(self.counting, [start + own for start, own in zip(starts, self.ahead or [0] * len(starts))], width) if apart else nullcontext()
        drawn = torch.random.fork_rng([self.device] if self.device.type == "cuda" else []) if seen and self.role != "target" else nullcontext()  # noise of sounds
        with kept, told, drawn, watched(read_at(compat.unwrap(self.model), layers)) as states:
            outputs = self.runner(self.run, **inputs) if tokens.numel() <= self.most and not seen else self.run(**inputs)
        reference = outputs.logits
        if not self.cache.layers:
            raise ValueError(f"{self.role}: the forward of {type(compat.unwrap(self.model)).__name__} has left its cache empty. It has to hand on {compat.CACHE}=, or use speculative=False.")
        if self.per_token is not None:
            self.per_token.update(outputs, starts)
        show(self.taps, [state[:, -width:] for state in states], starts)
        reference = reference if keep or wanted is None else reference[:, wanted.to(reference.device)]
        if logits is not None:
            self.compiled.judge(logits if wanted is None or logits.shape == reference.shape else logits[:, wanted.to(logits.device)], reference)
            for state, meant in () if taken is None else self.states.beside(taken):
                self.compiled.judge(state, meant, "states")
        return reference

    def _compiled_places(self, width: int, starts: list[int]) -> int | None:
        """The places of the compiled block that takes `width` tokens; None where there is none."""
        if self.compiled is None or not any(self.lengths) or not self._told(starts):
            return None
        if not isinstance(self.run, Decoder):
            return self.compiled.places(width, len(starts))
        if self.compiled.usable is not False and len(starts) > 1:
            self.compiled.give_up("it counts the positions of all rows of a batch alike", for_good=False)
        places = self.compiled.places(max(width, 1 + self.blind))
        if places is None or self.traits.max_positions and starts[0] + places > self.traits.max_positions:
            return None
        self.compiled.read = self.run.read()
        return places

    def _told(self, starts: list[int]) -> bool:
        """Whether a pass may be compiled: of layers that carry states all but those over prompts, if states follow from what layers are told."""
        if self.states is None:
            return True
        if not self.states.begun or not self.states.kept or min(starts) < 0:
            return False
        if self.compiled.usable is not False and (why := self.states.why_not_compiled()):
            self.compiled.give_up(why, for_good=False)  # hooks may be gone in the next call
        return self.compiled.usable is not False

    def _trial(self, ragged: bool) -> None:
        """A pass over the first tokens of texts that nobody wants, with the compiled passes of this model."""
        trial = Forward(self.model, 2 * TRIAL, self.role, self.traits, compile=self.compiled.way)
        trial.compiled, trial.embed, trial.lengths = self.compiled, self.embed, [0] * len(self.lengths)
        text = upload([[(7 * i + 1) % self.traits.vocab_size for i in range(TRIAL)]], self.device)
        sizes = [TRIAL] + [TRIAL - ragged] * (len(self.lengths) - 1)
        trial._forward(text.expand(len(sizes), -1), None, sizes, torch.tensor(sizes, device="cpu")[:, None] - 1)

    def _positions_and_masks(self, width: int, tree: Tree | None, sizes: list[int], first: int = 0) -> dict:
        chain = tree is None or tree.is_chain
        if not chain and self.role == "target":  # a draft is exact whatever it computes
            check_counting(compat.unwrap(self.model), self.cache.plan.limit, self.role)
        if not chain and self.traits.own_positions:
            raise ValueError(compat.own_mask_refusal(self.model, self.role, branches=True))
        inputs = self.placing(self.cache.plan, self.lengths, width, tree, sizes, first)
        if any(self.ahead) and "position_ids" in inputs:
            inputs["position_ids"] = inputs["position_ids"] + upload(self.ahead, self.device)[:, None]
        if self.begin and "position_ids" in inputs:
            inputs["position_ids"] = inputs["position_ids"] + self.begin
        whole = self.cache.plan.cached + width  # of which models before transformers 5.24 cut off what is cached, and later ones, too, where it is more than the block
        inputs |= {name: value.to(self.device).expand(-1, whole, *value.shape[2:]) for name, value in self.sight.items()}
        return inputs
