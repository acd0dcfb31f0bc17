"""Training a feature drafter: like a draft of the target's parts, but it reads the target's hidden states, and its own further on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import DynamicCache

from .. import compat
from ..drafts import features
from . import drafter
from .batches import Batch, split
from .features import make_features
from .losses import LOSSES
from .processes import main_first, need_accelerate
from .shards import STATES
from .trainer import RunConfig, Trainer


@dataclass(frozen=True)
class FeatureRunConfig(RunConfig):
    """A `RunConfig` with: reads, the target's layers whose output the draft sees (the count of layers stands for what comes after
    the final norm); unroll, steps that it learns to go on from its own output (the training-time test of EAGLE-3), each
    weighing `decay` of the one before; single, optimiser steps at the beginning in which it learns the first of these alone,
    which cost a third. `begin` may be a drafter that reads no hidden states: this one takes no notice of them either, at first."""

    layers: tuple[int, ...] = (-1,)
    reads: tuple[int, ...] = ()
    unroll: int = 3
    decay: float = 0.8
    single: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.unroll < 1:
            raise ValueError(f"unroll={self.unroll!r} must be at least 1.")


class FeatureStudent(nn.Module):
    """Logits of every unrolled step at some places."""

    def __init__(self, draft: nn.Module, half: bool, unroll: int):
        super().__init__()
        self.draft, self.half, self.unroll = draft, half, unroll

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, where: torch.Tensor, unroll: int | None = None) -> list[torch.Tensor]:
        """tokens [B, L]; states [B, L, F] of the target at them. Step j's logits [N, V'] for the token after place where[n] (of
        B * L): from the target's states up to j + 1 places before it, and j of the draft's own from there on. unroll: fewer steps."""
        head, base = self.draft.get_output_embeddings(), self.draft.base_model
        batch, length = tokens.shape[0], tokens.shape[1] - 1
        row, column = where // tokens.shape[1], where % tokens.shape[1]
        place = row * length + (column - 1).clamp(min=0)
        logits = []
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.half):
            hidden, cache = features.fused(self.draft, states[:, :-1]), DynamicCache()
            positions = torch.arange(length, device=tokens.device)[None].expand(batch, -1)
            for step in range(unroll or self.unroll):
                out = base(inputs_embeds=features.inputs(self.draft, hidden, tokens[:, 1:]), position_ids=positions, use_cache=True,
                           attention_mask=unrolled_mask(length, step, states), **{compat.CACHE: cache}).last_hidden_state
                logits.append(getattr(head, "few", head)(out.flatten(0, 1)[place]).float())
                hidden = torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], dim=1)
        return logits


def unrolled_mask(length: int, step: int, like: torch.Tensor) -> torch.Tensor:
    """float [1, 1, L, (step + 1) * L], 0 where place t of step j may look: at the target's states up to t - j, and at its own past
    of step i at t - j + i."""
    t, k = torch.arange(length, device=like.device)[:, None], torch.arange(length, device=like.device)[None]
    seen = [k <= t - step if step else k <= t] + [k == t - step + i for i in range(1, step + 1)]
    seen[0] = seen[0] | ((t < step) & (k == 0))  # before there is a past: something, so that softmax has a sum
    return torch.zeros((), device=like.device).where(torch.cat(seen, dim=1), torch.finfo(torch.float32).min)[None, None]


class FeatureTrainer(Trainer):
    """A `Trainer` whose drafts read hidden states; these are computed once and kept in `data`/states."""

    config: FeatureRunConfig
    first = 1  # behind a token and the state before it

    def __init__(self, target, data: str | Path, out: str | Path, config: FeatureRunConfig, target_name: str = "", progress=None):
        need_accelerate()
        drafter.check_dtype(target, config)
        drafter.check_begin(config.begin)
        drafter.layer_numbers(config.layers, target)
        count = target.config.get_text_config().num_hidden_layers
        self.reads = self._reads(config, count)
        files = sorted({part.path for parts in split(Path(data)) for part in parts})
        self.states = Path(data) / STATES
        with main_first(target.device):
            make_features(files, target, self.reads, self.states, progress, config.half)
        super().__init__(target, data, out, config, target_name)

    def _reads(self, config: FeatureRunConfig, count: int) -> tuple[int, ...]:
        return tuple(config.reads) or (count // 4, count // 2, count)

    @property
    def what(self) -> str:
        return f"{super().what}, and that read the target's hidden states after layers {', '.join(map(str, self.reads))}"

    def _student(self) -> nn.Module:
        return FeatureStudent(self.draft, self.config.half, self.config.unroll)

    def _logits(self, batch: Batch) -> list[torch.Tensor]:
        return self.student(batch.tokens, batch.states, batch.where)

    def _loss(self, batch: Batch) -> torch.Tensor:
        alone = self.progress.step < self.config.single
        return weighted(self, batch, self.student(batch.tokens, batch.states, batch.where, 1) if alone else self._logits(batch))


def weighted(trainer: Trainer, batch: Batch, steps: list[torch.Tensor]) -> torch.Tensor:
    """The loss of logits [N, V'] of several steps, each weighing the config's `decay` of the one before."""
    losses = [LOSSES[trainer.config.loss](*trainer._laws(batch, logits)).mean() for logits in steps]
    weights = [trainer.config.decay**step for step in range(len(losses))]
    return sum(weight * loss for weight, loss in zip(weights, losses)) / sum(weights)
