"""Training heads on the target's last hidden state (Medusa-1: the target is left as it is), storing and loading them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafts.medusa import MedusaDraft, MedusaHeads
from ..drafts.one_pass import OnePassDraft
from ..drafts.parallel import ParallelDraft
from ..drafts.pass_draft import PassDraft
from ..hints import check_int
from . import shared, storage
from .batches import Batch
from .feature_trainer import FeatureRunConfig, FeatureTrainer, weighted
from .trainer import Trainer, no_begin

RANKS = 8  # of every head, the ranks whose rates are kept


@dataclass(frozen=True)
class HeadsRunConfig(FeatureRunConfig):
    """A `RunConfig` with: heads, the tokens that are predicted at once; blocks, residual blocks of each head; decay, the weight of a head
    relative to the one before it. `layers`, `reads`, `unroll` and `single` have no meaning here."""

    heads: int = 4
    blocks: int = 1

    def __post_init__(self):
        super().__post_init__()
        no_begin(self)
        check_int("heads", self.heads, 1, 16)
        check_int("blocks", self.blocks, 0, 16)


class HeadsStudent(nn.Module):
    """Logits of every head at some places."""

    def __init__(self, heads: MedusaHeads, half: bool):
        super().__init__()
        self.heads, self.half = heads, half

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, where: torch.Tensor) -> list[torch.Tensor]:
        """tokens [B, L]; states [B, L, H] of the target at them. Head d's logits [N, V'] for the token after place where[n] (of B * L), from
        the state d + 1 places before it, where there is one."""
        row, column = where // tokens.shape[1], where % tokens.shape[1]
        flat, dtype = states.flatten(0, 1), self.heads.blocks[0][0].bias.dtype if len(self.heads.blocks[0]) else torch.float32
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.half):
            return [self.heads.head(d, flat[row * tokens.shape[1] + (column - d - 1).clamp(min=0)].to(dtype)).float()
                    for d in range(self.heads.depth)]


class HeadsTrainer(FeatureTrainer):
    """A `Trainer` of heads on the target's last hidden state."""

    config: HeadsRunConfig

    @property
    def first(self) -> int:
        """The first token of a text that every head can say something after."""
        return self.config.heads

    def _reads(self, config: HeadsRunConfig, count: int) -> tuple[int, ...]:
        return (count,)

    def _build(self, layers: list[int], ids: torch.Tensor | None) -> MedusaHeads:
        return build(self.target, self.config.heads, self.config.blocks, ids)

    def _own(self) -> list[nn.Parameter]:
        return list(self.draft.parameters())

    def _student(self) -> nn.Module:
        return HeadsStudent(self.draft, self.config.half)

    def _loss(self, batch: Batch) -> torch.Tensor:
        with shared.frozen(self.target):
            return weighted(self, batch, self._logits(batch))

    @property
    def what(self) -> str:
        return f"{self.config.heads} heads of {self.config.blocks} residual block(s) on the last hidden state of the target"

    @torch.no_grad()
    def measure(self, batches: int = 12) -> dict:
        """As for every draft; `rank_rates` [K][RANKS], how often the token that a head ranks r-th was the target's likeliest one."""
        return super().measure(batches) | {"rank_rates": rank_rates(self, batches)}

    def _save(self, notes: dict) -> Path:
        return save(self.draft, self.target.get_input_embeddings().weight, self.out, self.target_name, self.config.format, notes)


def rank_rates(trainer: Trainer, batches: int) -> list[list[float]]:
    """[K][RANKS] on held-out text."""
    found, n = 0, 0
    for batch, best in trainer.held_out(batches):
        hits = [trainer.ids[logits.topk(min(RANKS, logits.shape[-1])).indices] == best[:, None] for logits in trainer._logits(batch)]
        found, n = found + torch.stack(hits).sum(1).double(), n + len(best)
    return [[round(rate, 5) for rate in row] for row in (found / n).tolist()]


def build(target: PreTrainedModel, heads: int, blocks: int = 1, head_ids: torch.Tensor | None = None) -> MedusaHeads:
    """New heads for `target`, in its dtype and on its device; they share its output head, or the rows `head_ids` of it."""
    return MedusaHeads(heads, blocks, target.get_input_embeddings().weight.detach(), shared.output_head(target, head_ids))


def save(heads: nn.Module, embedding: torch.Tensor, folder: str | Path, target_name: str, format: str = "bf16", notes: dict | None = None) -> Path:
    """Write heads of any kind (with `about`, `rates` and `ids`), as `drafter.save` does a model. embedding: the target's [V, H], by which it is known again."""
    folder, notes = Path(folder), notes or {}
    folder.mkdir(parents=True, exist_ok=True)
    tensors = storage.stored(heads, set(), format)
    if heads.ids is not None:
        tensors["head_ids"] = heads.ids.int()
    about = {**heads.about, "rates": notes.get("rank_rates", list(heads.rates)), "notes": notes}
    return storage.write(folder, tensors, embedding, target_name, format, about)


def from_parts(about: dict, tensors: dict[str, torch.Tensor], ids: torch.Tensor | None, target: PreTrainedModel, folder: Path) -> OnePassDraft:
    """What `save` wrote, as a draft. Raises ValueError naming the folder if the parts do not fit."""
    from . import look_ahead, parallel

    ids = None if ids is None else ids.long()
    if about["kind"] == "medusa":
        heads, kind = build(target, about["heads"], about["blocks"], ids), MedusaDraft
    elif about["kind"] == "parallel":
        heads, kind = parallel.build(target, about["heads"], about["blocks"], tuple(about["reads"]), about["window"], ids), ParallelDraft
    elif about["kind"] == "pass":
        heads, kind = look_ahead.build(target, about["heads"]), PassDraft
    else:
        raise ValueError(f"{folder}: kind {about['kind']!r} is not known; a newer hf_specdec has written it.")
    heads.rates = about.get("rates") or ()
    if about.get("changed"):
        _check_changed(about, target, folder)
        heads.changed = about["changed"]
    storage.pack(heads, tensors, about["weights"])
    missing, unexpected = heads.load_state_dict(tensors, strict=False)
    if missing or unexpected:
        raise ValueError(f"{folder}: model.safetensors does not fit drafter.json ({sorted(set(missing) | set(unexpected))[0]}).")
    return kind(heads.eval(), target)


def _check_changed(about: dict, target: PreTrainedModel, folder: Path) -> None:
    """Heads of Medusa-2 go with the model that was changed together with them."""
    if getattr(target.config, "hf_specdec_changed", None) != about["changed"]:
        raise ValueError(f"{folder} holds heads that were trained together with a changed copy of {about['target']} (Medusa-2): a model of its own, whose "
                         f"answers differ. Load that model, {folder / 'target'}, as the target; decoding is lossless relative to it.")
