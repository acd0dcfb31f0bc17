"""Models that keep what they have read in a way of their own: keys compressed by groups (DeepSeek-V4), keys of an indexer beside states (Qwen4-Exp, GLM-5.3, MiniMax-M3), layers
that run several times (Inkling 2). Their cache is the one that plain generate gives them, or one that they make themselves (MiniMax, RWKV, xLSTM, CPM-Ant); OpenAI GPT has none and
reads its text again in every pass, as it does in plain generate.

Nothing is taken out of it again. Passes go on from a copy, so that the cache as it was before is there still: after a rejected token it takes that one's place, and
what was accepted is read again in front of the next candidates.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionLayer

from .caches import CACHE, MADE
from .kv_cache import SlotPlan


class OwnCache(DynamicCache):
    """The cache that plain generate begins with, of one row; `plan` says where the next block is, as that of a `SlotCache`. Of a model that is `Handed` what it has made,
    the only one of the `layers` is that."""

    def __init__(self, config: Any, limit: int):
        super().__init__(config=None if config.model_type in MADE else config)
        self.plan = SlotPlan(limit)

    def release(self) -> None:
        self.layers.clear()

    def keep(self, rows: torch.Tensor) -> None:
        """There is one row."""

    def load(self, layers: list, columns: list[list[int]], device: torch.device) -> None:
        """`Snapshots.load` reads a caller's."""

    def row(self, b: int, length: int, last: bool) -> list:
        """`Snapshots.store` hands it back."""
        return []


class Handed:
    """A model that makes what it keeps itself, and is given it in its next pass under a name of its own, called as one that is given an `OwnCache`. "": there is no such name,
    and the text so far stands before the tokens of a pass. prompt: how many tokens the first pass had."""

    def __init__(self, model: PreTrainedModel, config: Any):
        self.model, self.name, self.prompt = model, MADE[config.model_type], 0
        kinds = getattr(config, "layer_types", None) or ()
        self.attends = kinds.index("full_attention") if "full_attention" in kinds else 0

    def __call__(self, **inputs) -> Any:
        cache = inputs.pop(CACHE)
        if hasattr(self.model, "cpmant"):
            return self._behind_the_text(cache, inputs)
        if not self.name:
            return self._whole(cache, inputs)
        made = cache.layers[0] if cache.layers else None
        if isinstance(made, Cache) and made.layers:  # MiniMax asks the first one how long the text is, which knows where it attends
            made.layers[0] = made.layers[self.attends]
        outputs = self.model(**inputs, **{self.name: made})
        cache.layers = [outputs[self.name]]
        return outputs

    def _whole(self, cache: OwnCache, inputs: dict[str, Any]) -> Any:
        name = "inputs_embeds" if "inputs_embeds" in inputs else "input_ids"
        width, text = inputs[name].shape[1], torch.cat([*cache.layers, inputs[name]], dim=1)
        before, keep = text.shape[1] - width, inputs.pop("logits_to_keep", 0)
        keep = keep + before if isinstance(keep, torch.Tensor) else keep or width
        positions = torch.arange(text.shape[1], device=text.device)[None]
        cache.layers = [text]
        return self.model(**{**inputs, name: text, "position_ids": positions}, logits_to_keep=keep)

    def _behind_the_text(self, cache: OwnCache, inputs: dict[str, Any]) -> Any:
        """CPM-Ant is given its text anew beside the cache, to count by, and puts a prompt of its own before it. It hides nothing in a pass: so it is with the prompt in plain generate,
        and later tokens are hidden here from those before them. Its token 0 is padding to all that is read with it, and is read by itself."""
        made, text = cache.layers or (DynamicCache(config=self.model.config), inputs["input_ids"][:, :0])
        ids, keep, logits = inputs["input_ids"], inputs.pop("logits_to_keep", 0), []
        self.prompt = self.prompt or ids.shape[1]
        first = 0 if text.shape[1] else min(self.prompt, ids.shape[1])
        rest = ids.shape[1] - first
        alone = rest > 1 and bool((ids[:, first:] == 0).any())
        for block in ids.split([first] * bool(first) + ([1] * rest if alone else [rest] * bool(rest)), dim=1):
            text = torch.cat([text, block], dim=1)
            with _causal(self.model.cpmant.encoder) if text.shape[1] > block.shape[1] > 1 else nullcontext():
                outputs = self.model(**{**inputs, "input_ids": text, CACHE: made})
            made, logits = outputs[CACHE], [*logits, outputs.logits]
        cache.layers, whole = [made, text], torch.cat(logits, dim=1)
        outputs.logits = whole[:, keep] if isinstance(keep, torch.Tensor) else whole[:, -keep:]
        return outputs


@contextmanager
def _causal(encoder: nn.Module) -> Iterator[None]:
    """Inside, this thread's passes of `encoder` hide from every token those behind it."""
    thread = get_ident()

    def hide(module, args):
        states, mask, *rest = args
        if get_ident() == thread:
            return states, mask & torch.ones_like(mask, dtype=torch.bool).tril(mask.shape[-1] - mask.shape[-2]), *rest

    hook = encoder.register_forward_pre_hook(hide)
    try:
        yield
    finally:
        hook.remove()


class Snapshots:
    """An `OwnCache` after passes that may have to be returned to: how many tokens it held, and its layers. What a pass is to do with it is asked as of
    `states.Checkpoints`.

    PENDING: most tokens that are fed once more in front of candidates; more than that get a pass of their own.
    """

    PENDING = 16

    def __init__(self, cache: OwnCache):
        self.cache, self.empty = cache, cache.layers
        self.kept: list[tuple[int, list]] = []
        self.begun = self.final = False  # whether there has been a pass; whether all that the next one reads is committed

    def apart(self, fresh: list[list[int]], sizes: list[int]) -> bool:
        """Whether all but the last of the `fresh` tokens get a pass of their own, before one over candidates."""
        return len(fresh[0]) > self.PENDING

    @contextmanager
    def during(self, starts: list[int], width: int) -> Iterator[None]:
        """A pass that reads `width` tokens from position starts[0] on goes on from a copy of the last layers."""
        self.cache.layers = copied(self.kept[-1][1] if self.kept else self.empty)
        yield
        for _, layers in self.kept:
            _share(layers, self.cache.layers)
        self.kept = [*([] if self.final else self.kept), (starts[0] + width, self.cache.layers)]
        self.begun, self.final = True, False

    def back_to(self, lengths: list[int], settled: bool = True) -> list[int]:
        """Forget what was read from position lengths[0] on. How many tokens the cache holds then: so many or fewer. settled: nothing will go back to less."""
        kept = [own for own in self.kept if own[0] <= lengths[0]]
        self.kept = kept[-1:] if settled else kept
        return [kept[-1][0] if kept else 0]

    def keep(self, rows: list[int]) -> None:
        """There is one row."""

    def load(self, cache: DynamicCache, lengths: list[int]) -> None:
        """Go on from a filled cache of transformers."""
        self.kept = [(lengths[0], copied(cache.layers))]

    def store(self, cache: DynamicCache) -> None:
        """Put a copy of the last layers into a cache of transformers."""
        cache.layers = copied(self.kept[-1][1])


def copied(layers: list) -> list:
    """Layers that a pass may change without changing these. transformers joins keys and values anew, and writes over states."""
    return [_copied(layer) for layer in layers]


def _copied(layer: Any) -> Any:
    if isinstance(layer, (list, torch.Tensor)):
        return _anew(layer)
    own, anew = copy.copy(layer), isinstance(layer, LinearAttentionLayer) or not isinstance(layer, (Cache, CacheLayerMixin))
    for name, part in vars(own).items():
        if isinstance(part, dict):
            vars(own)[name] = {key: _anew(value) if anew else value for key, value in part.items()}
        elif isinstance(part, list):
            vars(own)[name] = copied(part) if name == "layers" else list(part)
        elif anew and name not in ("keys", "values"):
            vars(own)[name] = _anew(part)
    return own


def _anew(part: Any) -> Any:
    if isinstance(part, (list, tuple)):
        return type(part)(map(_anew, part))
    return part.clone() if isinstance(part, torch.Tensor) else part


def _share(layers: list, longer: list) -> None:
    """Let the keys and values of `layers` lie in those of layers that have been read further, of which they are the beginning."""
    for own, other in zip(layers, longer):
        if isinstance(own, Cache):
            _share(own.layers, other.layers)
        elif getattr(type(own), "update", None) is DynamicLayer.update and own.is_initialized:
            own.keys, own.values = (part[:, :, : own.keys.shape[2]] for part in (other.keys, other.values))
