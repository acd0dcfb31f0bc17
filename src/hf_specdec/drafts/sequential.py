"""Heads on the target's last hidden state that know the tokens drafted before: Hydra (Ankner et al. 2024, arXiv 2402.05109), IBM's MLP speculator (Wertheimer et al. 2024,
arXiv 2404.19124). One token after the other, each from a head of its own."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import parts
from ..proposal import Proposal, Verdict
from ..uploads import upload
from .base import Context
from .last_states import LastStates
from .one_by_one import OneByOne
from .vocabulary import fitted


class SequentialDraft(OneByOne):
    """Drafts with heads from the state of the last token before the root, which the target's own pass has left.

    heads:  with `depth`, the most tokens of a proposal; `reads`, the target's layer whose state goes in; `begin(states [B, H])`, which gives what is carried, and
            `step(d, carried, tokens int64 [B])`, which gives the logits [B, V'] of the token after the root and the d that were drafted, `tokens` being the last of
            these, and what is carried on. `training.load_drafter` makes the whole draft.
    target: the model whose generate() it is used in. Its passes show their hidden states; nothing of it is touched.

    It has nothing to propose before the target has read the prompt, nor under stock assisted decoding. Raises ValueError if `heads` are of another kind.
    """

    name = "sequential"
    reads_pass = True

    def __init__(self, heads: nn.Module, target: PreTrainedModel):
        check(heads)
        self.heads, self.target, self.layers, self.calls, self.forward_seconds = heads, target, (heads.reads,), 0, 0.0
        self.seen: LastStates | None = None

    def start(self, context: Context) -> None:
        if context.source is not None:
            raise ValueError(f"assistant_model: a {self.name} draft reads the states of a decoder-only target. Pass another draft with an encoder-decoder.")
        parts.of_one_dtype(next(self.heads.parameters()), self.target.dtype)
        self.begin(context)
        self.calls, self.forward_seconds = 0, 0.0
        self.seen = LastStates(context, self.target, self.layers)

    # --- the target's states ------------------------------------------------------------------------------------------

    def watching(self) -> tuple[int, ...]:
        return self.layers

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        self.seen.observe()

    def commit(self, verdict: Verdict) -> None:
        super().commit(verdict)
        self.seen.commit(verdict)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def evidence(self, context: Context) -> list[int]:
        return [0 if ready else -1 for ready in self.seen.ready()]

    def propose(self, context: Context, k: list[int]) -> Proposal:
        k = [min(own, self.heads.depth) if ready else 0 for own, ready in zip(k, self.seen.ready())]
        if max(k):
            self.carried = self.heads.begin(self.seen.last()[0][:, -1].to(self.target.dtype))
        return super().propose(context, k)

    def _scores(self, context: Context, tokens: list[torch.Tensor], k: list[int], step: int) -> torch.Tensor:
        begin = perf_counter()
        logits, self.carried = said(self.heads, step, self.carried, tokens, context)
        self.calls, self.forward_seconds = self.calls + 1, self.forward_seconds + perf_counter() - begin
        return logits

    def relative_cost(self, target: PreTrainedModel) -> float:
        """c by size: a token reads one head, and of embeddings a row."""
        read = {id(p): p.nbytes for module in self.heads.modules() if not isinstance(module, nn.Embedding) for p in module.parameters(recurse=False)}
        return sum(read.values()) / self.heads.depth / max(parts.bytes_per_token(target), 1)

    # --- the end ------------------------------------------------------------------------------------------------------

    def rewind(self, context: Context, lengths: list[int]) -> None:
        self.seen.rewind(lengths)

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.seen.keep(rows)

    def finish(self) -> None:
        self.seen, self.carried = None, None
        super().finish()


def check(heads: nn.Module) -> None:
    """ValueError unless these are heads that know the tokens before."""
    if not all(hasattr(heads, name) for name in ("depth", "reads", "begin", "step")):
        raise ValueError(f"heads: {type(heads).__name__} are no heads that go on from token to token; load some with training.load_drafter.")


def said(heads: nn.Module, step: int, carried: torch.Tensor, tokens: list[torch.Tensor], context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, 1, V] of the token after the rows and the drafted `tokens`, and what is carried on."""
    last = tokens[-1].to(carried.device) if tokens else upload([row[-1] for row in context.rows], carried.device)
    logits, carried = heads.step(step, carried, last)
    return fitted(logits.to(context.device), context.vocab_size)[:, None], carried
