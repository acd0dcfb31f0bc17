"""What a drafter shares with its target, and what it has of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..mx.formats import BLOCK
from ..mx.kernels import cpu
from ..mx.linear import MXLinear
from .weights import check_at_hand, names, numbers


class PrunedHead(nn.Module):
    """An output head's rows [n, width] and bias [n], if it has one, of the tokens `ids` (int64 [n]); every other token gets minus infinity and is never drafted (FR-Spec,
    arXiv 2502.14856). Exact by construction: q is the law that the token is drawn from."""

    def __init__(self, rows: torch.Tensor, ids: torch.Tensor, vocab_size: int, bias: torch.Tensor | None = None):
        super().__init__()
        self.linear = nn.Linear(rows.shape[1], len(ids), bias=False, device="meta")
        self.linear.weight = nn.Parameter(rows, requires_grad=False)
        self.linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_buffer("ids", ids.to(rows.device, copy=True))
        self.vocab_size = vocab_size

    def prepare(self, format: str = "bf16") -> PrunedHead:
        """The same rows packed in the MX `format`, or in the kernels' tiles where they are bfloat16, if the kernels are there: less to read for
        every drafted token, and faster."""
        weight = self.linear.weight
        fits = weight.dtype in (cpu.DTYPES if format != "bf16" else (torch.bfloat16,)) and weight.device.type == "cpu" and weight.shape[1] % BLOCK == 0
        if fits and not isinstance(self.linear, MXLinear) and cpu.library() is not None:
            self.linear = MXLinear.from_linear(self.linear, format).prepare()
        return self

    def few(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., n] of the kept tokens alone."""
        return self.linear(hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab_size] from hidden [..., width]."""
        few = self.few(hidden)
        every = few.new_full((*few.shape[:-1], self.vocab_size), -torch.inf)
        return every.index_copy_(-1, self.ids, few)


def empty(target: PreTrainedModel, config) -> PreTrainedModel:
    """A model of that config without weights worth keeping and, for a moment, with a vocabulary of nothing."""
    vocab_size, config.vocab_size = config.vocab_size, 8
    special = {name: getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config.pad_token_id = None
    draft = AutoModelForCausalLM.from_config(config, dtype=target.dtype).to(target.device).eval()
    for own in (config, draft.config):
        own.vocab_size, own.tie_word_embeddings = vocab_size, False
        for name, value in special.items():
            setattr(own, name, value)
    return draft


def share(draft: PreTrainedModel, target: PreTrainedModel, head_ids: torch.Tensor | None) -> None:
    draft.set_input_embeddings(target.get_input_embeddings())
    draft.set_output_embeddings(output_head(target, head_ids))


def output_head(target: PreTrainedModel, head_ids: torch.Tensor | None) -> nn.Module:
    """The target's own output head, or one with its rows `head_ids` alone, which may not be offloaded."""
    head = target.get_output_embeddings()
    if head is None:
        raise ValueError(f"target: {type(target).__name__} hands out no output head (get_output_embeddings), which a draft of its parts shares. Use another draft.")
    if head_ids is None:
        return head
    whole = numbers(head, target.dtype)
    check_at_hand("its output head", whole)
    rows = {name: part.to(target.dtype)[head_ids] for name, part in whole.items()}
    return PrunedHead(rows["weight"], head_ids, target.config.get_text_config().vocab_size, rows.get("bias"))


def shared_names(draft: PreTrainedModel) -> set[str]:
    shared = {id(module) for module in (draft.get_input_embeddings(), draft.get_output_embeddings())}
    prefixes = tuple(f"{name}." for name, module in draft.named_modules() if id(module) in shared)
    return {name for name in names(draft) if name.startswith(prefixes)}


def own_parameters(draft: PreTrainedModel) -> list[nn.Parameter]:
    """What the draft does not share."""
    shared = shared_names(draft)
    return [p for name, p in draft.named_parameters() if name not in shared]


@contextmanager
def rounded(own: Sequence[nn.Parameter], dtype: torch.dtype) -> Iterator[None]:
    """Inside, what learns in float32 is as a draft's weights are in use, of the target's dtype."""
    kept = [p.data for p in own]
    for p in own:
        p.data = p.data.to(dtype)
    try:
        yield
    finally:
        for p, data in zip(own, kept):
            p.data = data


@contextmanager
def learning_again(model: nn.Module) -> Iterator[None]:
    """Afterwards, the model's weights that learned before do so again: a draft that shares some of them is trained without them."""
    learning = [p for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for p in learning:
            p.requires_grad_(True)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside, what is computed keeps no gradient for the model's own weights."""
    with learning_again(model):
        model.requires_grad_(False)
        yield
