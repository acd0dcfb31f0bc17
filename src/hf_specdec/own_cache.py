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
from .uploads import upload


class Columns(SlotPlan):
    """Where the next block of tokens goes, in the same columns of all rows, as in plain generate. pads: how many columns of padding each row begins with."""

    pads: list[int] = []

    def lay(self, starts: list[int], width: int, device, whole: bool = False) -> None:
        super().lay(starts, width, device, whole)
        if max(starts) <= 0 or not self.pads:
            self.pads = [max(-start, 0) for start in starts]
        self.cached = starts[0] + self.pads[0]
        self.visible = self.cached + width


class OwnCache(DynamicCache):
    """The cache that plain generate begins with; `plan` says where the next block is, as that of a `SlotCache`. Of a model that is `Handed` what it has made,
    the only one of the `layers` is that."""

    def __init__(self, config: Any, limit: int):
        super().__init__(config=None if config.model_type in MADE else config)
        self.plan = Columns(limit)

    def release(self) -> None:
        self.layers.clear()

    def keep(self, rows: torch.Tensor) -> None:
        """`Snapshots.keep` sees to it."""

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
        if self.name == "state":  # RWKV, which looks at no mask
            inputs["attention_mask"] = None
            block = inputs["inputs_embeds" if "inputs_embeds" in inputs else "input_ids"]
            if len(block) > 1 == block.shape[1]:
                made = made or self._nothing(len(block))
                made = [*map(LastToken, made[:2]), *made[2:]]
        outputs = self.model(**inputs, **{self.name: made})
        cache.layers = [[getattr(part, "rows", part) for part in outputs[self.name]] if self.name == "state" else outputs[self.name]]
        return outputs

    def _nothing(self, rows: int) -> list[torch.Tensor]:
        """What RWKV goes on from at the beginning of a text."""
        shape, dtypes = (rows, self.model.config.hidden_size, self.model.config.num_hidden_layers), [self.model.dtype] * 2 + [torch.float32] * 3
        state = [torch.zeros(shape, dtype=dtype, device=self.model.device) for dtype in dtypes]
        state[4] -= 1e30
        return state

    def _whole(self, cache: OwnCache, inputs: dict[str, Any]) -> Any:
        name = "inputs_embeds" if "inputs_embeds" in inputs else "input_ids"
        width, text = inputs[name].shape[1], torch.cat([*cache.layers, inputs[name]], dim=1)
        before, keep = text.shape[1] - width, inputs.pop("logits_to_keep", 0)
        keep = keep + before if isinstance(keep, torch.Tensor) else keep or width
        positions = (torch.arange(text.shape[1], device=text.device) - upload(cache.plan.pads or [0], text.device)[:, None]).clamp(min=0)
        if "position_ids" in inputs:
            positions[:, before:] = inputs["position_ids"]
        cache.layers = [text]
        return self.model(**{**inputs, name: text, "position_ids": positions}, logits_to_keep=keep)

    def _behind_the_text(self, cache: OwnCache, inputs: dict[str, Any]) -> Any:
        """CPM-Ant is given its text anew beside the cache, to count by, and puts a prompt of its own before it. It hides nothing in a pass: so it is with the prompt in plain generate,
        and later tokens are hidden here from those before them. Its token 0 is padding to all that is read with it, and is read by itself."""
        made, text = cache.layers or (DynamicCache(config=self.model.config), inputs["input_ids"][:, :0])
        ids, logits, mask = inputs["input_ids"], [], inputs.pop("attention_mask", None)
        if mask is not None and text.shape[1]:  # behind the tokens of a row that has fewer than others is no padding before it
            ids = ids.masked_fill(mask[:, -ids.shape[1] :] == 0, 1)
        self.prompt = self.prompt or ids.shape[1]
        first = 0 if text.shape[1] else min(self.prompt, ids.shape[1])
        rest = ids.shape[1] - first
        alone = rest > 1 and bool((ids[:, first:] == 0).any())
        for block in ids.split([first] * bool(first) + ([1] * rest if alone else [rest] * bool(rest)), dim=1):
            text = torch.cat([text, block], dim=1)
            with _causal(self.model.cpmant.encoder) if text.shape[1] > block.shape[1] > 1 else nullcontext():
                outputs = self.model(**{**inputs, "input_ids": text, CACHE: made})
            made, logits = outputs[CACHE], [*logits, outputs.logits]
        cache.layers, outputs.logits = [made, text], torch.cat(logits, dim=1)
        return outputs


class LastToken:
    """What RWKV has made of the last token of every row [B, H, layers]. For one token a row it would mix it with those of all rows: it is told of columns [B, 1, H] instead."""

    def __init__(self, rows: torch.Tensor):
        self.rows = rows

    def __getitem__(self, at: Any) -> torch.Tensor:
        return self.rows[at][:, None]

    def __setitem__(self, at: Any, last: torch.Tensor) -> None:
        self.rows[at] = last


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
    """An `OwnCache` after passes that may have to be returned to: how many columns it had, and its layers. What a pass is to do with it is asked as of
    `states.Checkpoints`.

    All rows go back to the same column, however much of each has been committed beyond: what layers hold is cut into blocks of columns, and padding stays where it is, so that
    each row is read as plain generate reads it.

    PENDING: most columns that are fed once more in front of candidates; more than that get a pass of their own. Rows are no more than this ahead of others.
    """

    PENDING = 16

    def __init__(self, cache: OwnCache):
        self.cache, self.empty = cache, cache.layers
        self.kept: list[tuple[int, list]] = []
        self.begun = self.final = False  # whether there has been a pass; whether all that the next one reads is committed

    def apart(self, fresh: list[list[int]], sizes: list[int]) -> bool:
        """Whether the `fresh` tokens of all rows, but for the last of the row that has the fewest, get a pass of their own, before one over candidates."""
        return min(map(len, fresh)) > self.PENDING

    def together(self, waiting: list[int], k: list[int]) -> list[int]:
        """As `CachedModel.together`, of rows of which so many tokens have not been read."""
        least = min(waiting)
        return [max(min(own, self.PENDING - (n - least)), 0) for own, n in zip(k, waiting)]

    @property
    def pads(self) -> list[int]:
        return self.cache.plan.pads

    @contextmanager
    def during(self, starts: list[int], width: int) -> Iterator[None]:
        """A pass that reads `width` tokens from position starts[b] on goes on from a copy of the last layers."""
        self.cache.layers = copied(self.kept[-1][1] if self.kept else self.empty)
        yield
        for _, layers in self.kept:
            _share(layers, self.cache.layers)
        column = starts[0] + (self.pads[0] if self.pads else 0)
        self.kept = [*([] if self.final else self.kept), (column + width, self.cache.layers)]
        self.begun, self.final = True, False

    def back_to(self, lengths: list[int], settled: bool = True) -> list[int]:
        """Forget what was read from position lengths[b] on in row b. How many tokens the cache holds then: so many or fewer. settled: nothing will go back to less."""
        pads = self.pads or [0] * len(lengths)
        most = min(map(sum, zip(lengths, pads)))
        kept = [own for own in self.kept if own[0] <= most]
        self.kept = kept[-1:] if settled else kept
        return [max(kept[-1][0] - pad, 0) if kept else 0 for pad in pads]

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        if rows != list(range(len(self.pads))):
            self.cache.plan.pads = [self.pads[row] for row in rows]
            self.kept = [(columns, copied(layers, torch.tensor(rows, device="cpu"))) for columns, layers in self.kept]

    def load(self, cache: DynamicCache, lengths: list[int]) -> None:
        """Go on from a filled cache of transformers."""
        self.kept = [(lengths[0], copied(cache.layers))]

    def store(self, cache: DynamicCache) -> None:
        """Put a copy of the last layers into a cache of transformers."""
        cache.layers = copied(self.kept[-1][1])


def copied(layers: list, rows: torch.Tensor | None = None) -> list:
    """Layers that a pass may change without changing these. transformers joins keys and values anew, and writes over states. rows: copy these alone, int64 [n]."""
    return [_copied(layer, rows) for layer in layers]


def _copied(layer: Any, rows: torch.Tensor | None) -> Any:
    if isinstance(layer, (list, torch.Tensor)):
        return _anew(layer, rows)
    own, anew = copy.copy(layer), rows is not None or isinstance(layer, LinearAttentionLayer) or not isinstance(layer, (Cache, CacheLayerMixin))
    for name, part in vars(own).items():
        if isinstance(part, dict):
            vars(own)[name] = {key: _anew(value, rows) if anew else value for key, value in part.items()}
        elif isinstance(part, list):
            vars(own)[name] = copied(part, rows) if name == "layers" else list(part) if rows is None else _anew(part, rows)
        elif anew and (rows is not None or name not in ("keys", "values")):
            vars(own)[name] = _anew(part, rows, int(name == "indexer_position_ids"))
    return own


def _anew(part: Any, rows: torch.Tensor | None, axis: int = 0) -> Any:
    """A copy, of `rows` along `axis` where there are rows: counters have none."""
    if isinstance(part, (list, tuple)):
        return type(part)(_anew(one, rows) for one in part)
    if not isinstance(part, torch.Tensor):
        return part
    return part.clone() if rows is None or part.ndim < 2 else part.index_select(axis, rows.to(part.device))


def _share(layers: list, longer: list) -> None:
    """Let the keys and values of `layers` lie in those of layers that have been read further, of which they are the beginning."""
    for own, other in zip(layers, longer):
        if isinstance(own, Cache):
            _share(own.layers, other.layers)
        elif getattr(type(own), "update", None) is DynamicLayer.update and own.is_initialized:
            own.keys, own.values = (part[:, :, : own.keys.shape[2]] for part in (other.keys, other.values))
