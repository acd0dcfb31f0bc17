"""Heads on the target's last hidden state, one for each token ahead: blockwise parallel decoding (Stern et al. 2018, arXiv
1811.03115), Medusa (Cai et al. 2024, arXiv 2401.10774). All K tokens come out of one small pass; proposals are point masses.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import parts
from ..proposal import Proposal, Verdict
from ..tree import Tree
from ..tree_shapes import DynamicTree
from ..uploads import upload
from .base import Context
from .last_states import LastStates
from .one_pass import OnePassDraft


class MedusaHeads(nn.Module):
    """K heads: `layers` residual blocks x + SiLU(W x + b) each, and an output head. New ones are the identity, that is, all say what the
    target's own head says.

    like:   a tensor [.., width] of the dtype and on the device that they are to have.
    output: the module from hidden states [.., width] to logits, shared by the heads and not part of this module's state. One with
            `linear` and `ids` (a pruned head) is asked for logits of `ids` only.
    own:    output heads of their own, [V', width] each, or None.
    rates:  rates[d][r], how often the token that head d ranks r-th was the one, measured; () if it was not.
    """

    window = 1  # last states that are read
    changed = ""  # the mark of the changed target that they were trained together with (Medusa-2), if any

    def __init__(self, heads: int, layers: int, like: torch.Tensor, output: nn.Module, own: Sequence[torch.Tensor] | None = None,
                 rates: Sequence[Sequence[float]] = ()):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(_zeros(like) for _ in range(layers)) for _ in range(heads))
        self.outputs = None if own is None else nn.ModuleList(linear_of(weight.to(like)) for weight in own)
        self.shared, self.rates = (output,), rates  # in a tuple: another's module

    @property
    def depth(self) -> int:
        """K, the tokens that one pass proposes."""
        return len(self.blocks)

    @property
    def about(self) -> dict:
        """What it takes to make another one, as JSON has it."""
        changed = {"changed": self.changed} if self.changed else {}
        return {"kind": "medusa", "heads": self.depth, "blocks": len(self.blocks[0])} | changed

    @property
    def ids(self) -> torch.Tensor | None:
        """int64 [V'], the tokens that the logits stand for, None for all."""
        return getattr(self.shared[0], "ids", None) if self.outputs is None else None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [.., K, V'] from the target's states [.., H] at a token: head d's are of the token d + 2 places after it, since
        the target itself says what comes next."""
        return torch.stack([self.head(d, states) for d in range(self.depth)], dim=-2)

    def head(self, d: int, x: torch.Tensor) -> torch.Tensor:
        """Logits [.., V'] of one head from states [.., H]."""
        for linear in self.blocks[d]:
            x = x + nn.functional.silu(linear(x))
        output = self.shared[0] if self.outputs is None else self.outputs[d]
        return getattr(output, "linear", output)(x)

    def predict(self, states: torch.Tensor, roots: torch.Tensor, known: list[int]) -> torch.Tensor:
        """Logits [B, K, V'] after the tokens `roots` [B], from the last states [B, window, H] before them, known[b] of which are there."""
        return self(states[:, -1])


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


def _zeros(like: torch.Tensor) -> nn.Linear:
    width = like.shape[-1]
    return linear_of(like.new_zeros(width, width), like.new_zeros(width))


class MedusaDraft(OnePassDraft):
    """Drafts with `MedusaHeads` from the state of the last token before the root, which the target's own pass has left.

    heads:  made by `training` (`training.load_drafter` makes the whole draft), or of a published checkpoint.
    target: the model whose generate() it is used in. Its passes show their hidden states; nothing of it is touched.
    tree:   as in `OnePassDraft`; all proposals are point masses.

    It has nothing to propose before the target has read the prompt. Raises ValueError naming the argument for a tree that the heads
    cannot fill.
    """

    name = "medusa"
    reads_pass = True

    def __init__(self, heads: MedusaHeads, target: PreTrainedModel, tree: Tree | DynamicTree | Sequence[int] | int | None = None):
        self.check(heads)
        super().__init__(heads, tree)
        self.target = target
        self.layers = getattr(heads, "reads", None) or (target.config.get_text_config().num_hidden_layers,)
        self.seen: LastStates | None = None
        self.context: Context | None = None

    def watching(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.layers)))

    def check(self, heads: nn.Module) -> None:
        """Raise ValueError unless `heads` are what this draft drafts with."""
        if type(heads) is not MedusaHeads:
            raise ValueError(f"heads: {type(heads).__name__} is not MedusaHeads; load them with training.load_drafter.")

    def start(self, context: Context) -> None:
        if context.source is not None:
            raise ValueError(f"assistant_model: a {self.name} draft reads the states of a decoder-only target. Pass another draft with an "
                             f"encoder-decoder.")
        parts.of_one_dtype(next(self.heads.parameters(), None), self.target.dtype)
        self.context, self.calls, self.forward_seconds = context, 0, 0.0
        self.seen = LastStates(context, self.target, self.layers, self.heads.window)

    # --- the target's states ------------------------------------------------------------------------------------------

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        self.seen.observe()

    def commit(self, verdict: Verdict) -> None:
        self.seen.commit(verdict)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _ready(self) -> list[bool]:
        return self.seen.ready()

    def _logits(self, context: Context, k: list[int]) -> torch.Tensor:
        last, known = self.seen.last()
        roots = upload([row[-1] for row in context.rows], last.device)
        begin = perf_counter()
        logits = self.heads.predict(last.to(self.target.dtype), roots, known)[:, : max(k)].to(context.device)
        self.calls, self.forward_seconds = self.calls + 1, self.forward_seconds + perf_counter() - begin
        return logits

    def relative_cost(self, target: PreTrainedModel) -> float:
        """c by size: a pass reads the heads once, for K tokens."""
        size = sum(p.nbytes for module in (self.heads, *self.heads.shared) for p in module.parameters())
        return size / self.heads.depth / max(parts.bytes_per_token(target), 1)

    # --- the end ------------------------------------------------------------------------------------------------------

    def rewind(self, context: Context, lengths: list[int]) -> None:
        self.seen.rewind(lengths)

    def keep(self, rows: list[int]) -> None:
        self.seen.keep(rows)

    def finish(self) -> None:
        self.seen, self.context = None, None
        super().finish()
