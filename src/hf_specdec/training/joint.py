"""Training heads and the target together (Medusa-2, Cai et al. 2024, section 2.2). This makes another target: what it says differs from what the
given one says, and decoding with the heads is lossless relative to the changed model only. The given model is left as it is."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..drafts.medusa import MedusaHeads
from ..hints import check_int
from . import heads
from .batches import Batch
from .feature_trainer import weighted
from .heads import HeadsRunConfig, HeadsTrainer
from .losses import forward_kl
from .trainer import Trainer

CHANGED = "target"  # folder of the changed model beside the heads
WARNING = ("**These heads come with a changed target.** They were trained together with a copy of {target}, which lies in `{folder}`: a model of its own, "
           "whose answers differ from those of {target}. Decoding with the heads is lossless relative to the changed model only.\n")


@dataclass(frozen=True)
class JointRunConfig(HeadsRunConfig):
    """A `HeadsRunConfig` with: rank, of the LoRA adapters through which the copy of the target learns (0: all of its layers learn);
    share, the weight of the heads' loss beside that of the target's own; slower, the copy's learning rate relative to the heads'.
    The copy's own loss is its distance from the law of the given target, so that it changes no more than it has to; embedding and
    output head stay."""

    rank: int = 0
    share: float = 0.2
    slower: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        check_int("rank", self.rank, 0, 1024)
        for name in ("share", "slower"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number in (0, 1].")


class JointStudent(nn.Module):
    """Logits of the changed target and of every head."""

    def __init__(self, made: MedusaHeads, model: nn.Module, half: bool):
        super().__init__()
        self.made, self.model, self.half = made, model, half

    def forward(self, tokens: torch.Tensor, where: torch.Tensor) -> list[torch.Tensor]:
        """tokens [B, L]. Logits [N, V'] for the token after place where[n] (of B * L): the changed target's, then each head's as in
        `HeadsStudent`."""
        output = self.made.shared[0]
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.half):
            states = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            own = getattr(output, "linear", output)(states.flatten(0, 1)[where]).float()
        return [own, *heads.HeadsStudent(self.made, self.half)(tokens, states, where)]


class JointTrainer(HeadsTrainer):
    """A `Trainer` of heads and a copy of the target; ImportError where a rank is asked for without peft."""

    config: JointRunConfig
    writes = (CHANGED,)

    def __init__(self, target, data: str | Path, out: str | Path, config: JointRunConfig, target_name: str = "", progress=None):
        self.reads = (target.config.get_text_config().num_hidden_layers,)
        self.changed = copy.deepcopy(target).float().requires_grad_(False)
        self.adapted = _adapted(self.changed, config.rank) if config.rank else None
        Trainer.__init__(self, self.changed, data, out, config, target_name)  # the states change with the model: none are kept

    def _own(self) -> list[nn.Parameter]:
        fixed = {id(p) for part in (self.changed.get_input_embeddings(), self.changed.get_output_embeddings()) for p in part.parameters()}
        names = [(name, p) for name, p in self.changed.named_parameters() if id(p) not in fixed and (self.adapted is None or "lora_" in name)]
        self.learning = [p.requires_grad_(True) for _, p in names]
        return [*self.draft.parameters(), *self.learning]

    def _groups(self, own: list[nn.Parameter]) -> list[dict]:
        return [{"params": own[: len(own) - len(self.learning)]}, {"params": self.learning, "scale": self.config.slower}]

    def _student(self) -> nn.Module:
        return JointStudent(self.draft, self.changed, self.config.half)

    def _logits(self, batch: Batch) -> list[torch.Tensor]:
        return self.student(batch.tokens, batch.where)[1:]

    def _loss(self, batch: Batch) -> torch.Tensor:
        own, *ahead = self.student(batch.tokens, batch.where)
        return forward_kl(*self._laws(batch, own)).mean() + self.config.share * weighted(self, batch, ahead)

    @torch.no_grad()
    def measure(self, batches: int = 12) -> dict:
        """As of heads; `target_agreement`, how often the changed target's likeliest token is that of the given one."""
        hits, n = 0.0, 0
        for batch, best in self.held_out(batches):
            hits, n = hits + float((self.ids[self.student(batch.tokens, batch.where)[0].argmax(-1)] == best).sum()), n + len(best)
        return super().measure(batches) | {"target_agreement": hits / n}

    @property
    def what(self) -> str:
        how = f"LoRA of rank {self.config.rank}" if self.config.rank else "all layers"
        return f"{super().what}, trained together with a changed copy of it ({how}; Medusa-2)"

    @property
    def warning(self) -> str:
        """What the model card says first."""
        return WARNING.format(target=self.target_name or "the target", folder=self.out / CHANGED)

    def _save(self, notes: dict) -> Path:
        """The changed model in out/target, marked as such in its config, and the heads, which load with that model alone."""
        model = self.changed if self.adapted is None else copy.deepcopy(self.adapted).merge_and_unload()
        digest = hashlib.blake2b(digest_size=8)
        for p in self.learning:
            digest.update(p.detach().float().cpu().numpy().tobytes())
        mark = f"{self.target_name or 'a model'}, changed by Medusa-2 training, {digest.hexdigest()}"
        model.config.hf_specdec_changed = self.draft.changed = mark
        model.save_pretrained(self.out / CHANGED)
        (self.out / CHANGED / "README.md").write_text(f"# A changed model\n\n{self.warning}", encoding="utf-8")
        return super()._save(notes)


def _adapted(model: nn.Module, rank: int):
    """`model` with LoRA adapters in its linear layers, as peft has it; `model` itself then runs through them."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ImportError("rank: LoRA needs the package peft: pip install peft; or leave rank 0 to train all layers.") from None
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
