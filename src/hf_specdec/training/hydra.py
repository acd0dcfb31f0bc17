"""Hydra and Hydra++ heads (zankner/Hydra; Ankner et al. 2024, arXiv 2402.05109): head i reads a state of the target, or of a layer of attention over these, beside the embeddings
of the root and of the i tokens drafted before."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafts.prefixed import PrefixedDraft
from ..drafts.sequential import SequentialDraft
from . import published_eagle
from .storage import check_embedding, fit

ARCHITECTURES = ("mlp", "prefix-mlp")
PREFIX = "prefix_embeding_layer."  # so spelled there


class Residual(nn.Module):
    """way(x) + SiLU(linear(x)); way: the identity, or a Linear layer where the width changes."""

    def __init__(self, wide: int, width: int):
        super().__init__()
        self.linear = nn.Linear(wide, width)
        self.res_connection = nn.Linear(wide, width) if wide != width else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., wide]; [.., width]."""
        return self.res_connection(x) + nn.functional.silu(self.linear(x))


class HydraHeads(nn.Module):
    """depth heads of `layers` residual blocks and an output layer each. reads: the target's layer whose states go in; embedding: the target's, which is no part of this module;
    grounded: whether the heads read the tokens before, too."""

    def __init__(self, heads: int, layers: int, width: int, vocab_size: int, embedding: nn.Module, reads: int, grounded: bool = True):
        super().__init__()
        self.hydra_mlp = nn.ModuleList(nn.ModuleList(Residual((i + 2) * width if grounded and not j else width, width) for j in range(layers)) for i in range(heads))
        self.hydra_lm_head = nn.ModuleList(nn.Linear(width, vocab_size) for _ in range(heads))
        self.embedding, self.reads, self.grounded = (embedding,), reads, grounded  # in a tuple: another's module

    @property
    def depth(self) -> int:
        return len(self.hydra_mlp)

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        """What is carried, [B, H], from states [B, H]."""
        return states

    def step(self, d: int, carried: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, V] of head d, and what is carried on, [B, (d + 2) H], with the embeddings of `tokens` int64 [B] at its end."""
        if self.grounded:
            carried = torch.cat([carried, self.embedding[0](tokens).to(carried)], dim=-1)
        x = carried
        for block in self.hydra_mlp[d]:
            x = block(x)
        return self.hydra_lm_head[d](x), carried


def load(folder: Path, config: dict, tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> SequentialDraft | PrefixedDraft:
    """The draft of a checkpoint's config and tensors, for `target`, in its dtype and on its device. Raises ValueError naming what does not map."""
    kind, text = config.get("hydra_head_arch", "mlp"), target.config.get_text_config()
    if kind not in ARCHITECTURES:
        raise ValueError(f"{folder}: hydra_head_arch {kind!r} is not read; {' and '.join(ARCHITECTURES)} are.")
    offset = config.get("hidden_state_offset", 0)
    if not 0 <= offset < text.num_hidden_layers:
        raise ValueError(f"{folder}: hidden_state_offset {offset} goes beyond this target's {text.num_hidden_layers} layers.")
    check_embedding(folder, tensors.pop("input_embed_fn.weight", None), target)
    tensors = {_name(name, kind): tensor for name, tensor in tensors.items()}
    prefix = {name.removeprefix(PREFIX): tensors.pop(name) for name in list(tensors) if name.startswith(PREFIX)}
    heads, layers, embedding = config["hydra_num_heads"], config.get("hydra_num_layers", 1), target.get_input_embeddings()
    if not all(isinstance(n, int) and n > 0 for n in (heads, layers)):
        raise ValueError(f"{folder}: hydra_num_heads {heads!r} and hydra_num_layers {layers!r} have to be above 0; copy the checkpoint again.")
    reads = text.num_hidden_layers - (offset + 1 if offset else 0)
    with torch.device("meta"):
        made = HydraHeads(heads, layers, embedding.weight.shape[1], text.vocab_size, embedding, reads, config.get("grounded_heads", False))
    for name in made.state_dict():  # what follows a head's first block is one module there, of which a file may hold one copy
        if name not in tensors and (one := re.sub(r"^(hydra_mlp\.\d+)\.[1-9]\d*\.", rf"\1.{int(made.grounded)}.", name)) in tensors:
            tensors[name] = tensors[one]
    tensors = {name: tensor.to(target.device, target.dtype) for name, tensor in tensors.items()}
    fit(folder, made, tensors, assign=True)
    made = made.eval().requires_grad_(False)
    if kind == "mlp":
        return SequentialDraft(made, target)
    model = prefixed(folder, made, target)
    prefix = {name: tensor for name, tensor in prefix.items() if not name.endswith("rotary_emb.inv_freq") and name != "embed_tokens.weight"}  # neither is read there
    fit(folder, model.base_model, prefix, {name for name in model.base_model.state_dict() if name.startswith("embed_tokens.")})
    return PrefixedDraft(model, target)


def _name(name: str, kind: str) -> str:
    """With a prefix, there are dropouts between the blocks, and before the output layer."""
    if kind == "mlp":
        return name
    found = re.fullmatch(r"(hydra_mlp\.\d+)\.(\d+)\.(.*)", name)
    return f"{found[1]}.{int(found[2]) // 2}.{found[3]}" if found and int(found[2]) % 2 else re.sub(r"^(hydra_lm_head\.\d+)\.1\.", r"\1.", name)


def prefixed(folder: Path, heads: HydraHeads, target: PreTrainedModel) -> PreTrainedModel:
    """A new model of one layer of the target's own shape, with a final norm, that reads its states in the place of embeddings; with the heads."""
    config = target.config.get_text_config()
    if config.model_type != "llama":
        raise ValueError(f"{folder}: the layer of attention in front of Hydra++'s heads is one of Llama's; the target is a {config.model_type}.")
    draft = published_eagle.empty(folder, config.to_dict(), target, 1)
    width, like = draft.config.hidden_size, target.get_input_embeddings().weight
    draft.reads = (heads.reads,)
    draft.set_input_embeddings(target.get_input_embeddings())
    draft.feature_fuse = nn.Linear(width, width, bias=False, device="meta")
    draft.feature_fuse.weight = nn.Parameter(torch.eye(width).to(like))
    draft.feature_join, draft.heads = States(), heads
    draft.set_output_embeddings(nn.Identity())
    return draft.eval().requires_grad_(False)


class States(nn.Module):
    """Of states and embeddings side by side, [.., 2 H], the states [.., H]."""

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        return both.chunk(2, dim=-1)[0]
