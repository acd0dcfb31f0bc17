"""Training a parallel drafter (`drafts.parallel`): every place of the text is the root of a block, whose masked places are to say what the
target says there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafts.parallel import BlockDrafter
from ..hints import check_int
from . import shared
from .heads import HeadsRunConfig, HeadsTrainer


@dataclass(frozen=True)
class ParallelRunConfig(HeadsRunConfig):
    """A `RunConfig` with: heads, the masked places of a block (K); blocks, layers of the drafter; window, states that a block looks
    back at; reads, as in `FeatureRunConfig`; decay, the weight of a place relative to the one before it. A step costs K + 1 places of
    the drafter for every token of the batch."""

    blocks: int = 2
    window: int = 16

    def __post_init__(self):
        super().__post_init__()
        check_int("window", self.window, 1, 256)


class ParallelStudent(nn.Module):
    """Logits of every masked place, where it was the one to say what comes next."""

    def __init__(self, block: BlockDrafter, half: bool):
        super().__init__()
        self.block, self.half = block, half

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, where: torch.Tensor) -> list[torch.Tensor]:
        """tokens [B, L]; states [B, L, F] of the target at them. Masked place d's logits [N, V'] for the token after place where[n] (of B * L),
        in the block whose last state is d + 1 places before it, where there is one."""
        length = tokens.shape[1]
        row, column = where // length, where % length
        last = torch.stack([row * length + (column - d - 1).clamp(min=0) for d in range(self.block.depth)])
        blocks, number = last.unique(return_inverse=True)
        back = torch.arange(1 - self.block.window, 1, device=tokens.device)
        seen = (blocks % length)[:, None] + back >= 0
        window = torch.where(seen, blocks[:, None] + back, blocks[:, None])
        roots = tokens.flatten()[(blocks + 1).clamp(max=tokens.numel() - 1)]
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.half):
            hidden = self.block(states.flatten(0, 1).to(self.block.masks.dtype), roots, window, seen)
            return [self.block.logits(hidden[number[d], d]).float() for d in range(self.block.depth)]


class ParallelTrainer(HeadsTrainer):
    """A `Trainer` of parallel drafters."""

    config: ParallelRunConfig

    def _reads(self, config: ParallelRunConfig, count: int) -> tuple[int, ...]:
        return tuple(config.reads) or tuple(dict.fromkeys((count // 4, count // 2, count)))

    def _build(self, layers: list[int], ids: torch.Tensor | None) -> BlockDrafter:
        return build(self.target, self.config.heads, self.config.blocks, self.reads, self.config.window, ids, self.config.seed)

    def _student(self) -> nn.Module:
        return ParallelStudent(self.draft, self.config.half)

    @property
    def what(self) -> str:
        return (f"A block of {self.config.heads} masked places, {self.config.blocks} bidirectional layer(s) that read the last {self.config.window} "
                f"hidden states of the target after layers {', '.join(map(str, self.reads))}")


def build(target: PreTrainedModel, tokens: int, layers: int, reads: tuple[int, ...], window: int = 16, head_ids: torch.Tensor | None = None,
          seed: int = 0) -> BlockDrafter:
    """A new drafter for `target`, in its dtype and on its device; it shares its embedding and its output head, or the rows `head_ids` of it.
    ValueError unless the last of `reads` is what comes after the final norm."""
    config = target.config.get_text_config()
    if not reads or reads[-1] != config.num_hidden_layers:
        raise ValueError(f"reads={reads!r}: the last one has to be {config.num_hidden_layers}, the state after the final norm, which the head reads.")
    return BlockDrafter(tokens, layers, reads, target.get_input_embeddings().weight.detach(), config.num_attention_heads,
                        target.get_input_embeddings(), shared.output_head(target, head_ids), window, seed=seed)
