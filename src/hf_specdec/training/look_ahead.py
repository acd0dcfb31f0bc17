"""Training look-ahead embeddings (`drafts.pass_draft`): the target stays as it is, a few vectors learn to make it look ahead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import compat
from ..drafts.pass_draft import LookAhead, traits_of
from ..hints import check_int
from . import heads
from .batches import Batch
from .feature_trainer import weighted
from .shared import frozen
from .trainer import RunConfig, Trainer, no_begin


@dataclass(frozen=True)
class LookAheadRunConfig(RunConfig):
    """A `RunConfig` with: heads, the look-ahead embeddings n (K is n + 1, the first token being the target's own); decay, the weight of a place
    relative to the one before it. `layers` has no meaning here. A step is a pass of the whole target, back and forth, over n + 1
    places for every token of the batch."""

    head: int | None = None
    format: str = "bf16"
    heads: int = 3
    decay: float = 0.8

    def __post_init__(self):
        super().__post_init__()
        no_begin(self)
        check_int("heads", self.heads, 1, 16)
        if self.head is not None:
            raise ValueError(f"head={self.head!r}: the target's whole head says what comes at look-ahead places; leave it None.")


class LookAheadStudent(nn.Module):
    """What the target says at look-ahead places, behind every token of a text at once."""

    def __init__(self, look: LookAhead, target: PreTrainedModel, half: bool):
        super().__init__()
        self.look, self.target, self.half = look, (target,), half

    def forward(self, tokens: torch.Tensor, where: torch.Tensor) -> list[torch.Tensor]:
        """tokens [B, L]. Look-ahead place j's logits [N, V] for the token after place where[n] (of B * L), j + 1 places behind its root,
        where there is one."""
        (batch, length), n, target = tokens.shape, len(self.look.embeddings), self.target[0]
        row, column = where // length, where % length
        with frozen(target), torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.half):
            ahead = self.look.embeddings.repeat(length, 1).expand(batch, -1, -1)
            inputs = torch.cat([target.get_input_embeddings()(tokens), ahead], dim=1)
            positions, masks = layout(length, n, target)
            hidden = target.base_model(inputs_embeds=inputs, attention_mask=masks, position_ids=positions.expand(batch, -1),
                                       use_cache=False).last_hidden_state.flatten(0, 1)
            first = row * inputs.shape[1] + length
            places = [first + (column - j - 1).clamp(min=0) * n + j for j in range(n)]
            return [target.get_output_embeddings()(hidden[place]).float() for place in places]


def layout(length: int, n: int, target: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor | dict]:
    """Positions int64 [1, S] and additive masks [1, 1, S, S] (one, or one per layer type) of L tokens and then the n look-ahead places
    behind each of them, S = L * (n + 1): a look-ahead place sees the text up to its root and the places between."""
    device = target.device
    roots = torch.cat([torch.arange(length), torch.arange(length).repeat_interleave(n)]).to(device)
    step = torch.cat([torch.zeros(length, dtype=torch.long), torch.arange(1, n + 1).repeat(length)]).to(device)
    text = step == 0
    seen = text & (roots <= roots[:, None]) | ~text & (roots == roots[:, None]) & (step <= step[:, None])
    positions = roots + step
    masks = {}
    for key, kind, size in compat.traits_of(target, "target").masks:
        near = torch.ones_like(seen)
        if kind == "sliding":
            near = positions > positions[:, None] - size
        elif kind == "chunked":
            near = positions // size == positions[:, None] // size
        masks[key] = torch.zeros(seen.shape, device=device).masked_fill(~(seen & near), torch.finfo(torch.float32).min)[None, None]
    return positions[None], masks.get(None, masks)


class LookAheadTrainer(Trainer):
    """A `Trainer` of look-ahead embeddings; ValueError for a target that makes its own masks, which training cannot use."""

    config: LookAheadRunConfig

    @property
    def first(self) -> int:
        """The first token of a text that every look-ahead place can say something after."""
        return self.config.heads

    def _build(self, layers: list[int], ids: torch.Tensor | None) -> LookAhead:
        traits_of(self.target)
        return build(self.target, self.config.heads)

    def _own(self) -> list[nn.Parameter]:
        return list(self.draft.parameters())

    def _student(self) -> nn.Module:
        return LookAheadStudent(self.draft, self.target, self.config.half)

    def _loss(self, batch: Batch) -> torch.Tensor:
        return weighted(self, batch, self._logits(batch))

    def _logits(self, batch: Batch) -> list[torch.Tensor]:
        return self.student(batch.tokens, batch.where)

    @property
    def what(self) -> str:
        return f"{self.config.heads} look-ahead embeddings, which the target reads behind its text"

    @torch.no_grad()
    def measure(self, batches: int = 12) -> dict:
        """As for every draft, of the look-ahead places; `rank_rates` [K][RANKS], the target's own place first, which is always right."""
        own = [1.0] + [0.0] * (heads.RANKS - 1)
        return super().measure(batches) | {"rank_rates": [own, *heads.rank_rates(self, batches)]}

    def _save(self, notes: dict) -> Path:
        return heads.save(self.draft, self.target.get_input_embeddings().weight, self.out, self.target_name, self.config.format, notes)


def build(target: PreTrainedModel, n: int) -> LookAhead:
    """n new look-ahead embeddings for `target`: the mean of its token embeddings, in its dtype and on its device."""
    mean = target.get_input_embeddings().weight.detach().float().mean(0)
    return LookAhead(mean.to(target.dtype).repeat(n, 1))
