"""An assistant that fills a block of masked places in one pass over the target's hidden states, as Muse Glimmer ships one (DFlash: Chen, Liang and Liu 2026, arXiv
2602.06036). The layout is that of transformers' `DFlashTokenCandidateGenerator`. `drafts.parallel` is this package's own, smaller drafter of the kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from types import SimpleNamespace

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import assistants, compat, parts
from ..kv_cache import SlotCache
from ..proposal import Proposal, Verdict
from ..tree import Tree
from ..tree_shapes import DynamicTree
from ..uploads import upload
from .base import Context
from .last_states import LastStates
from .layout import Block, Choices, Layout, Refined, Steps
from .one_pass import OnePassDraft
from .vocabulary import fitted


class Unread(LastStates):
    """The target's states that the assistant's cache does not have yet. read: places of every row that it has; first: the first of them, behind what the target
    has read in an earlier call."""

    def __init__(self, context: Context, target: PreTrainedModel, layers: tuple[int, ...]):
        super().__init__(context, target, layers, window=2**31)
        self.read, self.first = [0] * len(context.rows), [0] * len(context.rows)

    def _remember(self, b: int, start: int, states: torch.Tensor) -> None:
        if start > self.known[b]:
            self.read[b] = self.first[b] = start
        super()._remember(b, start, states)

    def _forget(self, b: int, start: int) -> None:
        self.read[b], self.first[b] = min(self.read[b], start), min(self.first[b], start)
        super()._forget(b, start)

    def ready(self) -> list[bool]:
        return [first < known == len(row) - 1 for first, known, row in zip(self.first, self.known, self.context.rows)]

    def take(self, like: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """What is unread, [B, n, F] with padding behind, as `like` [.., F] has dtype and device; and how many of each row's are there."""
        there = [0 if states is None else len(states) for states in self.recent]
        taken = like.new_zeros((len(there), max(there), like.shape[-1]))
        for b, states in enumerate(self.recent):
            if there[b]:
                taken[b, : there[b]] = states
        self.recent, self.read = [None] * len(there), [read + own for read, own in zip(self.read, there)]
        return taken, there

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.read, self.first = [self.read[row] for row in rows], [self.first[row] for row in rows]


class DFlashDraft(OnePassDraft):
    """Drafts with an assistant whose one pass over the root and masked places gives the laws of all of them.

    model:  an assistant of transformers (`MuseGlimmerAssistantModel`), made for the target, whose embedding and head it uses.
    target: the model that it drafts for, where that is to be known before a call, as `warmup` wants it.
    tree:   as in `OnePassDraft`. Without one, a chain; where the target samples, its tokens are drawn each from the law of its place.
    layout: what a published drafter says of itself beyond that (`training.load_drafter` reads them).

    It has nothing to propose before the target has read the prompt, nor under stock assisted decoding, which has a way of its own for it. Raises ValueError if `model` is no such
    assistant, and at the start of a call if it was made for a model of another width or with fewer layers.
    """

    name = "dflash"
    drawn = True
    reads_pass = True

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel | None = None, tree: Tree | DynamicTree | Sequence[int] | int | None = None,
                 layout: Layout = Layout()):
        if assistants.kind_of(compat.unwrap(model)) != "dflash":
            raise ValueError(f"model: {type(model).__name__} fills no masked places from a target's states; a model that reads text drafts by ModelDraft(model).")
        depth = model.config.block_size - layout.first
        if depth < 1:
            raise ValueError(f"model: {type(model).__name__} has block_size={model.config.block_size}, so that no place behind the root's is left to draft at. Take one of more places.")
        super().__init__(SimpleNamespace(depth=depth, ids=None, rates=()), tree)
        self.model, self.target, self.seen, self.layout = model, target, None, layout
        self.choices: Choices | Steps | Refined | None = None
        self.hidden: torch.Tensor | None = None  # [B, K, H] of the places ahead
        self.cache: SlotCache | None = None

    @property
    def stops(self) -> bool:
        return not self.may_branch

    def start(self, context: Context) -> None:
        if context.source is not None:
            raise ValueError(f"assistant_model: {type(self.model).__name__} reads the states of a decoder-only target. Pass another draft with an encoder-decoder.")
        self.context, self.calls, self.forward_seconds, self.seen = context, 0, 0.0, None
        self.stop = context.stop.start(len(context.rows)) if context.stop is not None and self.stops else None
        if context.target is None:
            return
        target = compat.unwrap(context.target.model)
        self.check(target)
        self.embedding, self.head = target.get_input_embeddings(), self.layout.head or target.get_output_embeddings()
        self.cache = SlotCache(context.max_length + self.model.config.block_size)
        self.seen = Unread(context, target, self._layers(target))

    def check(self, target: PreTrainedModel) -> None:
        """ValueError if the assistant was made for another model, or runs an attention without masks."""
        config, own = target.config.get_text_config(), self.model.config
        attention = getattr(own, "_attn_implementation", None) or "eager"
        if any(word in attention for word in ("flash", "flex", "paged")):
            raise ValueError(f"assistant_model: {type(self.model).__name__} runs attn_implementation={attention!r}, which takes no masks of numbers, as its places need. "
                             f'Call its set_attn_implementation("sdpa") (or "eager"); the target may run another.')
        if own.hidden_size != config.hidden_size or max(own.target_layer_ids) >= config.num_hidden_layers:
            raise ValueError(f"assistant_model: {type(self.model).__name__} reads states of width {own.hidden_size} of the layers {list(own.target_layer_ids)}, and "
                             f"{type(target).__name__} has {config.num_hidden_layers} layers of width {config.hidden_size}: it was made for another model. Pass the assistant "
                             f"that belongs to the target.")
        if not 0 <= own.mask_token_id < len(target.get_input_embeddings().weight):
            raise ValueError(f"assistant_model: {type(self.model).__name__} masks places by the token {own.mask_token_id}, of which {type(target).__name__} has no embedding: "
                             f"it was made for another model. Pass the assistant that belongs to the target.")

    def _layers(self, target: PreTrainedModel) -> tuple[int, ...]:
        """The layers whose outputs are read; of the last one, what comes after the final norm, as transformers counts hidden states, unless the layout says otherwise."""
        count = target.config.get_text_config().num_hidden_layers
        return tuple(count if layer == count - 1 and self.layout.normed else layer for layer in self.model.config.target_layer_ids)

    # --- the target's states ------------------------------------------------------------------------------------------

    def watching(self) -> tuple[int, ...]:
        return () if self.target is None else tuple(sorted(set(self._layers(self.target))))

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        if self.seen is not None:
            self.seen.observe()

    def commit(self, verdict: Verdict) -> None:
        if self.seen is not None:
            self.seen.commit(verdict)
        if self.stop is not None:
            self.stop.learn([sum(path) - 1 for path in verdict.paths()])

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _ready(self) -> list[bool]:
        return [False] * len(self.context.rows) if self.seen is None else self.seen.ready()

    def _logits(self, context: Context, k: list[int]) -> torch.Tensor:
        begin, config = perf_counter(), self.model.config
        like = torch.empty(0, dtype=self.model.dtype, device=self.model.device)
        starts = list(self.seen.read)
        states, fresh = self.seen.take(like.new_zeros((0, len(config.target_layer_ids) * config.hidden_size)))
        self.cache.plan.lay(starts, states.shape[1] + config.block_size, like.device)
        positions, masks = self._places(starts, fresh, states.shape[1], like)
        block = self.model(noise_embeds=self._noise(context).to(like), context_hidden_states=states, position_ids=positions, attention_mask=masks,
                           **{compat.CACHE: self.cache}).last_hidden_state
        logits = self._said(block, max(k)).to(context.device)
        self.calls, self.forward_seconds = self.calls + 1, self.forward_seconds + perf_counter() - begin
        return fitted(logits, context.vocab_size)

    def _said(self, block: torch.Tensor, k: int) -> torch.Tensor:
        """Logits [B, k, V] of the places ahead in a block of states [B, P, H]; where a selector is to choose, its choices are kept."""
        first, selector = self.layout.first, self.layout.selector
        self.hidden = block[:, first : first + k]
        logits = self.layout.capped(self.head(self.hidden.to(next(self.head.parameters()).device, self.embedding.weight.dtype)))
        self.choices = selector and selector.ahead(Block(block, fitted(logits, self.context.vocab_size).to(block.device), first, self._known))
        return logits

    def _place(self, logits: torch.Tensor, step: int, tokens: list[torch.Tensor]) -> torch.Tensor:
        if self.choices is None:
            return super()._place(logits, step, tokens)
        return self.choices.after(self._before(tokens), step, logits.shape[-1])[:, None].to(logits.device)

    def _before(self, tokens: list[torch.Tensor]) -> torch.Tensor:
        """[B]: the last of the drafted tokens, or the roots."""
        return tokens[-1] if tokens else self._known(0)

    def _known(self, back: int) -> torch.Tensor:
        """[B]: the tokens that many places before the roots; the roots stand for what would be before the text."""
        return upload([row[-1 - back] if back < len(row) else row[-1] for row in self.context.rows], self.context.device)

    def _foretold(self, step: int, tokens: list[torch.Tensor]) -> list[float] | None:
        return self.layout.confidence and self.layout.confidence(self.hidden[:, step], self._before(tokens)).nan_to_num(0.0).tolist()

    def _noise(self, context: Context) -> torch.Tensor:
        """What goes in at the block's places [B, P, H]: the roots, then masks; an embedding's own norm is left out."""
        masks = [self.model.config.mask_token_id] * (self.model.config.block_size - 1)
        tokens = upload([[row[-1], *masks] for row in context.rows], self.embedding.weight.device)
        if self.layout.scale is not None:
            return nn.functional.embedding(tokens, self.embedding.weight) * self.layout.scale
        return nn.Embedding.forward(self.embedding, tokens) if hasattr(self.embedding, "embed_norm") else self.embedding(tokens)

    def _places(self, starts: list[int], fresh: list[int], width: int, like: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Positions [B, width + P] of the fresh states, padded to `width`, and of the block behind them; and float masks [B, 1, P, S] of the slots that the block's places
        see: all states of the row and one another, in windows by distance, in layers that are causal none behind them."""
        plan, block = self.cache.plan, self.model.config.block_size
        begin, own, first = upload([starts, fresh, self.seen.first], like.device)[:, :, None]
        place, slot = torch.arange(width + block, device=like.device), torch.arange(plan.visible, device=like.device)[None]
        positions = begin + torch.where(place < width, torch.minimum(place, own), place - width + own)
        blocks = slot >= begin + width
        seen = (slot >= first) & (slot < begin + own) | blocks & (slot < begin + width + block)
        at, queries = torch.where(blocks, slot - (width - own), slot), positions[:, width:]
        ahead, reach = at[:, None] - queries[:, :, None], self.layout.reach
        reach = (self.model.config.sliding_window or plan.visible) if reach is None else reach
        near = (blocks | (begin + own - at <= reach + 1))[:, None] if self.layout.from_root else ahead.abs() <= reach
        visible = {"full_attention": seen[:, None].expand_as(ahead), "sliding_attention": seen[:, None] & near}
        low = torch.finfo(like.dtype).min
        for kind in self.layout.causal:
            visible[kind] = visible[kind] & (ahead <= 0)
        return positions, {kind: like.new_zeros(ahead.shape).masked_fill_(~own, low)[:, None] for kind, own in visible.items()}

    def relative_cost(self, target: PreTrainedModel) -> float:
        """c by size: a pass reads the assistant and the target's head once, for K tokens."""
        size = parts.bytes_per_token(self.model) + sum(p.nbytes for p in (self.layout.head or target.get_output_embeddings()).parameters())
        return size / self.heads.depth / max(parts.bytes_per_token(target), 1)

    # --- the end ------------------------------------------------------------------------------------------------------

    def rewind(self, context: Context, lengths: list[int]) -> None:
        if self.seen is not None:
            self.seen.rewind(lengths)

    def keep(self, rows: list[int]) -> None:
        if self.stop is not None:
            self.stop.keep(rows)
        if self.seen is not None:
            self.seen.keep(rows)
            self.cache.keep(upload(rows, self.model.device))

    def finish(self) -> None:
        if self.cache is not None:
            self.cache.release()
        self.cache, self.seen, self.embedding, self.head, self.choices, self.hidden, self.context = (None,) * 7
        super().finish()
