"""Training a draft that is a model of its own, of any config, with the target's vocabulary: it shares nothing but the text."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from .trainer import RunConfig, Student, Trainer, no_begin


@dataclass(frozen=True)
class IndependentRunConfig(RunConfig):
    """A `RunConfig` with: model, a folder, a config.json or a hub id of transformers; fresh, whether the draft begins with random weights of that config
    (seeded by `seed`), or with that model's own, which are distilled further (DistillSpec, arXiv 2310.08461). It has all of the vocabulary (head None)
    and is stored in bfloat16, as a model that `from_pretrained` loads."""

    layers: tuple[int, ...] = ()
    head: int | None = None
    format: str = "bf16"
    model: str = ""
    fresh: bool = True

    def __post_init__(self):
        super().__post_init__()
        no_begin(self)
        if not self.model:
            raise ValueError("model='': name a folder, a config.json or a hub id of transformers.")
        for name, only in (("layers", ()), ("head", None), ("format", "bf16")):
            if getattr(self, name) != only:
                raise ValueError(f"{name}={getattr(self, name)!r}: a draft of its own config has layers, a head and dense weights of its own; leave it out.")


class WholeStudent(Student):
    """A `Student` of which no part is the target's: its whole forward is asked."""

    def forward(self, tokens: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] at the places where [N] of tokens [B, L]. Padding is on the right: a causal draft does not see it."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.half):
            return self.draft(input_ids=tokens, use_cache=False).logits.flatten(0, 1)[where].float()


class IndependentTrainer(Trainer):
    """A `Trainer` of a model of its own. target: in any dtype; it is only asked who it is.

    Raises ValueError for a config that cannot be read, of another vocabulary, of too few positions, or without causal attention, besides what `Trainer` raises.
    """

    of_the_target = False
    shares = "It shares nothing with the target but the vocabulary, and loads like any model."
    loading = 'from transformers import AutoModelForCausalLM\n\ndraft = AutoModelForCausalLM.from_pretrained("{folder}")'

    def _build(self, layers: list[int], ids: torch.Tensor | None) -> nn.Module:
        target, config = self.target, draft_config(self.config.model)
        check_config(config, target, self.config.model, max((b - a for _, a, b in [*self.corpus.texts, *self.held.texts]), default=0))
        if not self.config.fresh:
            try:
                return AutoModelForCausalLM.from_pretrained(self.config.model, dtype=torch.float32).to(target.device)
            except (OSError, SafetensorError) as error:
                raise ValueError(f"model={self.config.model!r}: its weights cannot be read ({' '.join(str(error).split())}); begin with random ones of its config, "
                                 "or name another model.") from error
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(target.config, name, None))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(target.device)

    def _own(self) -> list[nn.Parameter]:
        return list(self.draft.parameters())

    def _student(self) -> nn.Module:
        return WholeStudent(self.draft, self.config.half)

    def _save(self, notes: dict) -> Path:
        self.out.mkdir(parents=True, exist_ok=True)
        stored = copy.deepcopy(self.draft).to(torch.bfloat16)
        stored.config.name_or_path = ""
        stored.save_pretrained(self.out)
        (self.out / "training.json").write_text(json.dumps({"target": self.target_name, "notes": notes}, indent=1) + "\n", encoding="utf-8")
        return self.out

    @property
    def what(self) -> str:
        begun = "begun with random weights" if self.config.fresh else f"begun as {self.config.model}"
        return f"a {self.draft.config.model_type} of {self.draft.num_parameters() / 1e6:.1f} million parameters, {begun}"


def draft_config(name: str):
    """The transformers config in a folder, a config.json or of a hub id; ValueError for what is none, or has no causal language model."""
    if name.endswith(".json") and not Path(name).is_file():
        raise ValueError(f"config: there is no file {name}; name a config.json of transformers, a folder with one, or a hub id.")
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"config: {name} holds no config of transformers ({' '.join(str(error).split())}); name a config.json with its model_type, a folder with "
                         "one, or a hub id.") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"config: {name} is a {config.model_type}, of which transformers has no causal language model; name a decoder-only one.")
    return config


def check_config(config, target, name: str, longest: int = 0) -> None:
    """ValueError for another vocabulary than the target's, or too few positions for texts of `longest` tokens."""
    vocabulary, own = target.config.get_text_config().vocab_size, config.get_text_config().vocab_size
    if own != vocabulary:
        raise ValueError(f"config: {name} has a vocabulary of {own:,} tokens, the target one of {vocabulary:,}; set \"vocab_size\": {vocabulary}.")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < longest:
        raise ValueError(f"config: {name} has {positions} positions, the training texts up to {longest}; raise max_position_embeddings.")
