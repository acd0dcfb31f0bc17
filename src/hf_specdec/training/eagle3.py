"""A feature drafter in EAGLE-3's own form (arXiv 2503.01840), which vLLM's `LlamaForCausalLMEagle3` computes too; stored in the published layout.

Unlike the drafters of `drafter`, whose first layer norms a sum of state and embedding: one layer, whose attention reads the two side by side,
each with a norm of its own, and whose residual is the state alone. For targets of the Llama family.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import parts
from ..drafts.features import EachNorm
from . import published_eagle as published, shared
from .feature_trainer import FeatureRunConfig, FeatureTrainer
from .shards import save_whole
from .weights import dense, make_ready


def build(target: PreTrainedModel, layer: int, ids: torch.Tensor, reads: tuple[int, int, int]) -> PreTrainedModel:
    """A draft that starts from the target's layer `layer`, whose attention at first reads the state alone, with the rows `ids` (int64 [n]) of
    the target's output head and its final norm. In the target's dtype and on its device.

    Raises ValueError where the target is not of the Llama family, or `reads` are not three of its layers' numbers, in rising order.
    """
    config, (_, layers) = target.config.get_text_config(), parts.decoder_layers(target)
    if len(reads) != 3 or sorted(set(reads)) != list(reads) or not 0 <= reads[0] <= reads[2] < len(layers):
        raise ValueError(f"reads={reads!r}: EAGLE-3 reads what three of the layers 0..{len(layers) - 1} put out, in rising order.")
    draft = published.empty(Path("config.json"), config.to_dict(), target, 1)
    width, like = draft.config.hidden_size, target.get_input_embeddings().weight
    draft.reads = tuple(reads)
    draft.set_input_embeddings(target.get_input_embeddings())
    draft.feature_norm = EachNorm([torch.ones(width).to(like)] * 3, config.rms_norm_eps)
    draft.feature_fuse = nn.Linear(3 * width, width, bias=False, device=like.device, dtype=like.dtype)
    draft.feature_fuse.weight.data = torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], dim=1).to(like)
    draft.feature_join = nn.Identity()
    make_ready(target)
    weights = {name: tensor.to(like) for name, tensor in dense(layers[layer], like.dtype).items()}
    weights["hidden_norm.weight"] = weights["input_layernorm.weight"]
    for name in ("q_proj", "k_proj", "v_proj"):
        own = weights[f"self_attn.{name}.weight"]
        weights[f"self_attn.{name}.weight"] = torch.cat([torch.zeros_like(own), own], dim=1)
    draft.base_model.layers[0] = published.Eagle3Layer(draft.base_model.layers[0], False)
    draft.base_model.layers[0].load_state_dict(weights)
    norm, draft.base_model.norm = draft.base_model.norm, nn.Identity()
    norm.load_state_dict(target.base_model.norm.state_dict())
    rows = shared.output_head(target, ids).linear.weight.detach()
    draft.set_output_embeddings(published.NormedHead(norm, rows, ids, config.vocab_size))
    return draft.eval()


def tensors(draft: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What EAGLE-3 stores, under its names: midlayer.*, fc, fc_norm.I, norm, lm_head [n, H], d2t int64 [n] (the token of row i is i + d2t[i]) and
    t2d bool [V] (whether a token has a row). The embedding is the target's."""
    head, block = draft.get_output_embeddings(), draft.base_model.layers[0].state_dict()
    known = torch.zeros(head.vocab_size, dtype=torch.bool)
    known[head.ids.cpu()] = True
    own = {f"midlayer.{name}": tensor for name, tensor in block.items()} | {
        "fc.weight": draft.feature_fuse.weight, "norm.weight": head.norm.weight, "lm_head.weight": head.linear.weight,
        **{f"fc_norm.{i}.weight": weight for i, weight in enumerate(draft.feature_norm.weights)}}
    kept = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in own.items()}
    return kept | {"d2t": head.ids.cpu() - torch.arange(len(head.ids)), "t2d": known}


def save(draft: PreTrainedModel, folder: str | Path, notes: dict | None = None) -> Path:
    """Write config.json and model.safetensors (bfloat16) in the published layout: `training.load_drafter` and vLLM read it. Complete or absent."""
    folder, own = Path(folder), draft.config
    folder.mkdir(parents=True, exist_ok=True)
    before = [layer + 1 for layer in draft.reads]  # counted from the embedding on
    config = {name: getattr(own, name) for name in published.LLAMA_KEYS if getattr(own, name, None) is not None}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "vocab_size": own.vocab_size,
               "draft_vocab_size": len(draft.get_output_embeddings().ids), "tie_word_embeddings": False, "torch_dtype": "bfloat16", "fc_norm": True,
               "eagle_aux_hidden_state_layer_ids": before,  # as vLLM reads it; SGLang reads eagle_config
               "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(draft.reads), "use_aux_hidden_state": True}, "hf_specdec_notes": notes or {}}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_whole(tensors(draft), folder / "model.safetensors", {"format": "pt"})
    return folder


@dataclass(frozen=True)
class Eagle3RunConfig(FeatureRunConfig):
    """A `FeatureRunConfig` for EAGLE-3's form: one of the target's layers to start from; `format` is "bf16", as it is published."""

    format: str = "bf16"

    def __post_init__(self):
        super().__post_init__()
        if len(self.layers) != 1 or self.begin or self.format != "bf16":
            raise ValueError(f"layers={self.layers}, format={self.format!r}, begin={self.begin!r}: EAGLE-3's form has one layer, is stored in bf16 and begins "
                             f"from the target's own layer; give one layer, format=\"bf16\" and no begin.")


class Eagle3Trainer(FeatureTrainer):
    """A `FeatureTrainer` of drafts in EAGLE-3's form."""

    config: Eagle3RunConfig
    checkpoint = "checkpoint.state"  # whoever loads a published folder reads every *.safetensors in it

    def _reads(self, config: Eagle3RunConfig, count: int) -> tuple[int, ...]:
        return tuple(config.reads) or (count // 4, count // 2, count - 1)

    def _build(self, layers: list[int], ids: torch.Tensor | None) -> nn.Module:
        return build(self.target, layers[0], self.ids if ids is None else ids, self.reads)

    def _own(self) -> list[nn.Parameter]:
        return [*shared.own_parameters(self.draft), *self.draft.get_output_embeddings().norm.parameters()]

    def _save(self, notes: dict) -> Path:
        return save(self.draft, self.out, notes)
