"""The horizontal cascade: the first tokens of a round from a good draft, the late ones, which are seldom reached, from a cheaper one.
Chen et al. 2023 (arXiv 2312.11462)."""

from __future__ import annotations

import torch

from ..config import MAX_ASSISTANT_TOKENS
from ..hints import check_int
from ..proposal import Proposal
from .base import Context, Draft
from .inner import Composed, Inner, chains


class HorizontalCascadeDraft(Composed):
    """first: drafts at most `after` tokens a round. then: goes on from there, up to K. Both propose chains (ValueError otherwise);
    every token keeps the law that it was drawn from."""

    name = "horizontal_cascade"
    trusted = True

    def __init__(self, first: Draft, then: Draft, after: int = 2):
        for name, draft in (("first", first), ("then", then)):
            if not isinstance(draft, Draft):
                raise TypeError(f"{name}: expected a draft, got {type(draft).__name__}; make a model one with ModelDraft(model).")
        if first is then:
            raise ValueError("then: is the same object as first; make two.")
        check_int("after", after, 1, MAX_ASSISTANT_TOKENS)
        super().__init__((first, then))
        self.first, self.then, self.after = first, then, after

    def start(self, context: Context) -> None:
        self.context = context
        self.own = context.of(0)
        self.first.start(self.own)
        self.inner = Inner(self.then, context, turn=1)

    def evidence(self, context: Context) -> list[int]:
        """That of the first draft; 0 where only the second may have something to say."""
        self.strengths = self.first.evidence(self.own)
        self.forget_asked()
        return [max(strength, 0) for strength in self.strengths]

    def propose(self, context: Context, k: list[int]) -> Proposal:
        own = [min(n, self.after) if strength >= 0 else 0 for n, strength in zip(k, self.strengths)]
        early = self.first.propose(self.own, own)
        if not self.first.trusted:
            Proposal.check(early, len(k), context.vocab_size, self.first.name)
        self.asked[0] = early = _chain(early.within(own), "first", self.first)  # the second draft sees by its rows what stands
        rows = [row + tokens[:size] for row, tokens, size in zip(context.rows, early.listed(), early.sizes)]
        self.inner.follow(rows)
        self.inner.context.barred = {b for b, (row, own) in enumerate(zip(rows, context.rows)) if not self.own.allows(b, row[len(own):])}
        late = _chain(self.inner.propose([n - size for n, size in zip(k, early.sizes)]), "then", self.then)
        tokens = [one[:n] + other[:m] for one, other, n, m in
                  zip(early.listed(), late.listed(), early.sizes, late.sizes)]
        if early.probs is None and late.probs is None:
            return chains(tokens, None, context, self.name)
        laws = [_laws(early, b, context) + _laws(late, b, context) for b in range(len(k))]
        return chains(tokens, laws, context, self.name)

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        self.inner.follow(self.context.rows)  # the second draft sees the root where the first one does
        super().observe(proposal, logits)

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.inner.keep(rows)

    def rewind(self, context: Context, lengths: list[int]) -> None:
        self.forget_asked()
        self.first.rewind(self.own, lengths)

    def finish(self) -> None:
        self.context = self.own = self.inner = None
        super().finish()


def _chain(proposal: Proposal, argument: str, draft: Draft) -> Proposal:
    if not proposal.tree.is_chain:
        raise ValueError(f"{argument}: draft {draft.name!r} proposes trees; a horizontal cascade needs chains (branches=1).")
    return proposal


def _laws(proposal: Proposal, b: int, context: Context) -> list[torch.Tensor]:
    """float [V] per token of row b; the one-hot of a point mass."""
    size = proposal.sizes[b]
    if proposal.probs is not None:
        return list(proposal.probs[b, :size].to(context.device).float())
    return list(torch.nn.functional.one_hot(proposal.tokens[b, :size], context.vocab_size).to(context.device).float())
