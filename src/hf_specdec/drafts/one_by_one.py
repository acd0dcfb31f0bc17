"""What drafts share that get one token after the other out of a model: each from the law of the place that the ones before have led to."""

from __future__ import annotations

from functools import cache

import torch

from ..law import draw
from ..proposal import Proposal, Verdict
from .base import Context, Draft


class OneByOne(Draft):
    """A subclass says what the scores of the next token are (`_scores`), and calls `begin` as a call starts.

    A token is the argmax where the target decodes greedily, else drawn from the draft's own law after the same processors as the target's.
    drafted: what was proposed last, until its verdict is known.
    """

    trusted = True
    stops = True

    def begin(self, context: Context) -> None:
        """A call starts, and nothing is drafted."""
        self.context = context
        self.drafted: Proposal | list[list[int]] = [[] for _ in context.rows]
        self.stop = context.stop.start(len(context.rows)) if context.stop is not None and self.stops else None

    def _scores(self, context: Context, tokens: list[torch.Tensor], k: list[int], step: int) -> torch.Tensor:
        """Logits [B, 1, V] after `tokens`, each int64 [B], which this proposal has so far: `step` of them."""
        raise NotImplementedError

    def _several(self, context: Context, tokens: list[torch.Tensor], k: list[int], step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """The next tokens, and the laws they were drawn from, where several can be had at once; None: one after the other."""
        return None

    def _forget_what_was_rejected(self, context: Context) -> None:
        """Before a proposal: of the last one, only what has been committed since stands."""

    def propose(self, context: Context, k: list[int]) -> Proposal:
        self._forget_what_was_rejected(context)
        if self.stop is not None:
            self.stop.begin()
        tokens, laws, step = [], [], 0
        drafted = cache(lambda i: tokens[i].tolist())  # is asked for where the law depends on the text
        while step < max(k):
            done = self._several(context, tokens, k, step)
            if done is not None:
                tokens, laws, step = tokens + done[0], laws + done[1], step + len(done[0])
                continue
            scores = self._scores(context, tokens, k, step)
            law = context.sampler(scores, [step < own for own in k], lambda b, _: context.text(b, [drafted(i)[b] for i in range(len(tokens))]), draft=True)
            if context.sampler.do_sample:
                laws.append(law.probs_at(torch.zeros(len(k), dtype=torch.long, device=scores.device)))
                tokens.append(draw(laws[-1], context.noise(f"draft:{step}", 1)[:, 0]))
            else:
                tokens.append(law.argmax[:, 0])
            if self.stop is not None:  # the token that makes a row stop is part of the proposal
                root = torch.zeros_like(tokens[-1])[:, None]
                k = self.stop.shortened(k, step, law.prob_of(tokens[-1][:, None], root)[:, 0].nan_to_num(0.0).tolist())
            step += 1
        if not tokens:
            return Proposal.from_lists([[] for _ in k], context.device, self.name)
        self.drafted = Proposal.chain(torch.stack(tokens, dim=1), torch.stack(laws, dim=1) if laws else None, list(k), self.name)
        return self.drafted

    def _drafted(self) -> list[list[int]]:
        return self.drafted.listed() if isinstance(self.drafted, Proposal) else self.drafted

    def commit(self, verdict: Verdict) -> None:
        if self.stop is not None:
            self.stop.learn([sum(path) - 1 for path in verdict.paths()])

    def keep(self, rows: list[int]) -> None:
        if self.stop is not None:
            self.stop.keep(rows)
        drafted = self._drafted()
        self.drafted = [drafted[row] for row in rows]
        super().keep(rows)

    def finish(self) -> None:
        self.context, self.drafted = None, []
        super().finish()
