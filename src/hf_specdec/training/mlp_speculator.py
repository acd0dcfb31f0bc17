"""IBM's MLP speculators (foundation-model-stack/fms-extras; Wertheimer et al. 2024, arXiv 2404.19124; ibm-fms/llama3-8b-accelerator and others): a state that starts as the target's
takes in one token after the other."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafts.sequential import SequentialDraft
from .storage import fit

EPS = 1e-6


class Scaled(nn.Module):
    """A root mean square brought to 1, then a scale and a shift of every number."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, EPS) + self.bias


class MLPSpeculator(nn.Module):
    """n heads of width `inner`, the first of which reads states of width `wide`. tied: they are one and the same, but for that first projection. scaled: states are brought to a
    root mean square of 1 / sqrt(2). reads: the target's layer whose states go in."""

    def __init__(self, n: int, wide: int, inner: int, vocab_size: int, reads: int, tied: bool = False, scaled: bool = False):
        super().__init__()

        def several(make, count: int = n) -> list[nn.Module]:
            return [make()] * count if tied else [make() for _ in range(count)]

        self.emb, self.head = nn.ModuleList(several(lambda: nn.Embedding(vocab_size, inner))), nn.ModuleList(several(lambda: nn.Linear(inner, vocab_size, bias=False)))
        self.proj = nn.ModuleList([nn.Linear(wide, inner, bias=False), *several(lambda: nn.Linear(inner, inner, bias=False), n - 1)])
        self.ln = nn.ModuleList(several(lambda: Scaled(inner)))
        self.reads, self.scaled, self.state_weight = reads, scaled, 0.5 ** (0.5 / n)
        self.emb_weight = math.sqrt((1 - self.state_weight**2) * inner / 2)

    @property
    def depth(self) -> int:
        return len(self.head)

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        """What is carried, [B, H], from states [B, H]."""
        return nn.functional.rms_norm(states, states.shape[-1:], eps=EPS) / 2**0.5 if self.scaled else states

    def step(self, d: int, carried: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, V] of head d after `tokens` int64 [B], and the state [B, inner] that is carried on."""
        known = self.emb[d](tokens.clamp(max=self.emb[d].num_embeddings - 1))
        carried = nn.functional.gelu(self.ln[d](self.proj[d](carried) * self.state_weight + known * self.emb_weight))
        return self.head[d](carried), carried


def load(folder: Path, config: dict, tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> SequentialDraft:
    """The draft of a checkpoint's config and tensors, for `target`, in its dtype and on its device. Raises ValueError naming what does not map."""
    text = target.config.get_text_config()
    width, vocab = target.get_input_embeddings().weight.shape[1], text.vocab_size
    other = next((name for name in config.get("architectures") or () if "MLPSpeculator" not in name or "Arctic" in name), None)
    if other:
        raise ValueError(f"{folder}: a speculator of the kind {other} is not read; IBM's MLPSpeculatorPreTrainedModel is.")
    n, wide, own = config.get("n_predict", 3), config.get("emb_dim", 4096), config.get("vocab_size", 32000)
    tied, inner = bool(config.get("tie_weights", config.get("tie_wts"))), config.get("inner_dim") or wide
    if not all(isinstance(size, int) and size > 0 for size in (n, wide, own, inner)):
        raise ValueError(f"{folder}: n_predict, emb_dim, vocab_size and inner_dim have to be above 0, not {n!r}, {wide!r}, {own!r}, {inner!r}; copy the checkpoint again.")
    if wide != width or min(own, vocab) < 0.9 * max(own, vocab):
        raise ValueError(f"{folder} was made for a target of width {wide} with {own} tokens; this one has width {width} and {vocab} tokens.")
    with torch.device("meta"):
        made = MLPSpeculator(n, wide, inner, own, text.num_hidden_layers, tied, bool(config.get("scale_input")))
    tensors = {name.removeprefix("speculator."): tensor.to(target.device, target.dtype) for name, tensor in tensors.items()}
    for name in made.state_dict() if tied else ():  # a file may hold one copy of them
        one = re.sub(r"\.\d+\.", ".1." if name.startswith("proj.") else ".0.", name, count=1)
        if name not in tensors and one in tensors and name != "proj.0.weight":
            tensors[name] = tensors[one]
    fit(folder, made, tensors, assign=True)
    return SequentialDraft(made.eval().requires_grad_(False), target)
