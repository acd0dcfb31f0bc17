"""An assistant without keys and values of its own, as Gemma 4 ships them: its layers attend to those of the target.

Multi-token prediction as in transformers' `SinglePositionMultiTokenCandidateGenerator`: the assistant reads the embedding of the last token beside the target's
last state, stays at the position of the root, and goes on from its own output.
"""

from __future__ import annotations

from time import perf_counter

import torch
from transformers import PreTrainedModel

from .. import assistants, compat, parts
from ..lockstep import shared_by_processes
from ..proposal import Proposal, Verdict
from ..uploads import upload
from .base import Context
from .last_states import LastStates
from .one_by_one import OneByOne
from .vocabulary import fitted

Shared = dict[str, tuple[torch.Tensor, torch.Tensor]]


class SharedKVDraft(OneByOne):
    """Drafts K tokens one by one with an assistant whose layers read the target's own keys and values, where its cache has them.

    model:  an assistant of transformers (`Gemma4AssistantForCausalLM`, `Gemma4UnifiedAssistantForCausalLM`), made for the target.
    target: the model that it drafts for, where that is to be known before a call, as `warmup` wants it.

    It has nothing to propose before the target has read the prompt, nor under stock assisted decoding, which has a way of its own for it. Raises ValueError if `model` is no such
    assistant, and at the start of a call if the target's states, heads or kinds of layers are not those that it reads.
    """

    name = "shared_kv"
    reads_pass = True

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel | None = None):
        if assistants.kind_of(compat.unwrap(model)) != "shared_kv":
            raise ValueError(f"model: {type(model).__name__} reads no keys and values of a target; a model with a cache of its own drafts by ModelDraft(model).")
        self.model, self.target, self.calls, self.forward_seconds = model, target, 0, 0.0
        self.seen: LastStates | None = None

    def start(self, context: Context) -> None:
        if context.source is not None:
            raise ValueError(f"assistant_model: {type(self.model).__name__} reads the states of a decoder-only target. Pass another draft with an encoder-decoder.")
        self.begin(context)
        self.calls, self.forward_seconds, self.seen = 0, 0.0, None
        if context.target is None:
            return
        target = compat.unwrap(context.target.model)
        if shared_by_processes(target):
            raise ValueError(f"assistant_model: {type(self.model).__name__} reads the target's keys and values, of which each of the processes that run it has some alone. "
                             "Pass another draft.")
        self.layers, self.embedding = self._layers(target), target.get_input_embeddings()
        self.seen = LastStates(context, target, _last_of(target))

    def _layers(self, target: PreTrainedModel) -> dict[str, int]:
        """The layers of the target that the assistant's layers read, by type. ValueError if it was made for another model."""
        about, remedy = f"assistant_model: {type(self.model).__name__}", "it was made for another model. Pass the assistant that belongs to the target."
        width, own = target.config.get_text_config().hidden_size, self.model.config.backbone_hidden_size
        if own != width:
            raise ValueError(f"{about} reads states of width {own}, and those of {type(target).__name__} have {width}: {remedy}")
        layers, (ours, theirs) = assistants.shared_layers(target), map(_heads, (target, self.model))
        for kind in ("sliding_attention", "full_attention"):  # transformers' masks read both, whatever layers there are
            if kind not in layers or kind not in ours or theirs.get(kind, ours[kind]) != ours[kind]:
                raise ValueError(f"{about} reads {kind} layers with {theirs.get(kind, 'any heads')}, and {type(target).__name__} has {ours.get(kind, 'none')}: {remedy}")
        return layers

    # --- the target's states ------------------------------------------------------------------------------------------

    def watching(self) -> tuple[int, ...]:
        return () if self.target is None else _last_of(self.target)

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        if self.seen is not None:
            self.seen.observe()

    def commit(self, verdict: Verdict) -> None:
        super().commit(verdict)
        if self.seen is not None:
            self.seen.commit(verdict)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def evidence(self, context: Context) -> list[int]:
        return [0 if ready else -1 for ready in self._ready()]

    def _ready(self) -> list[bool]:
        return [False] * len(self.context.rows) if self.seen is None else self.seen.ready()

    def propose(self, context: Context, k: list[int]) -> Proposal:
        k = [own if ready else 0 for own, ready in zip(k, self._ready())]
        if max(k):
            self.state, self.shared, self.mask = self.seen.last()[0], *self._shared(context)
        return super().propose(context, k)

    def _shared(self, context: Context) -> tuple[Shared, torch.Tensor | None]:
        """By kind of layer, the target's keys and values [B, H, n, D] of all tokens before the roots, such that all rows end in the last column; and what of them is
        no padding, int64 [B, n], None where all is."""
        held, device = context.target.lengths, self.model.device
        n, caches = max(held), {kind: context.target.cache.layers[layer] for kind, layer in self.layers.items()}
        found = {kind: (cache.keys[:, :, :n], cache.values[:, :, :n]) for kind, cache in caches.items()}
        mask = None
        if min(held) < n:
            columns = torch.arange(n, device="cpu") - (n - torch.tensor(held, device="cpu"))[:, None]
            mask, at = upload((columns >= 0).long(), device), columns.clamp(min=0)[:, None, :, None]
            found = {kind: tuple(part.gather(2, upload(at, part.device).expand(-1, part.shape[1], -1, part.shape[3])) for part in pair) for kind, pair in found.items()}
        return {kind: tuple(part.to(device, self.model.dtype) for part in pair) for kind, pair in found.items()}, mask

    def _scores(self, context: Context, tokens: list[torch.Tensor], k: list[int], step: int) -> torch.Tensor:
        begin, device = perf_counter(), self.embedding.weight.device
        token = tokens[-1].to(device) if tokens else upload([row[-1] for row in context.rows], device)
        embedded = self.embedding(token[:, None])
        inputs = torch.cat([embedded.to(self.model.device, self.model.dtype), self.state.to(self.model.device, self.model.dtype)], dim=-1)
        roots = [len(row) - 1 + ahead for row, ahead in zip(context.rows, context.target.ahead or [0] * len(k))]
        done = self.model(inputs_embeds=inputs, position_ids=upload(roots, self.model.device)[:, None], attention_mask=self.mask, shared_kv_states=self.shared, use_cache=False)
        self.state = done.last_hidden_state
        self.calls, self.forward_seconds = self.calls + 1, self.forward_seconds + perf_counter() - begin
        return fitted(done.logits.to(context.device), context.vocab_size)

    def relative_cost(self, target: PreTrainedModel) -> float:
        """c by size: a token reads every weight of the assistant once."""
        return parts.bytes_per_token(self.model) / max(parts.bytes_per_token(target), 1)

    # --- the end ------------------------------------------------------------------------------------------------------

    def rewind(self, context: Context, lengths: list[int]) -> None:
        if self.seen is not None:
            self.seen.rewind(lengths)

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        if self.seen is not None:
            self.seen.keep(rows)

    def finish(self) -> None:
        self.seen, self.embedding, self.state, self.shared, self.mask = None, None, None, None, None
        super().finish()


def _heads(model: PreTrainedModel) -> dict[str, str]:
    """By type of layer, how many heads of keys there are and of what width, in words, where the layers say so."""
    kinds, (_, layers) = getattr(model.config.get_text_config(), "layer_types", None) or (), parts.decoder_layers(model)
    found = {kind: getattr(layer, "self_attn", None) for kind, layer in zip(kinds, layers)}
    return {kind: f"{part.config.num_attention_heads // part.num_key_value_groups} key heads of {part.head_dim}" for kind, part in found.items()
            if all(hasattr(part, name) for name in ("head_dim", "num_key_value_groups", "config"))}


def _last_of(target: PreTrainedModel) -> tuple[int, ...]:
    """What comes after the final norm, as `Tap` counts layers."""
    return (target.config.get_text_config().num_hidden_layers,)
