"""Drafts whose cost is real and whose acceptance is not: what they propose is replaced. For measuring, where no trained pair is at hand."""

from __future__ import annotations

import random

import torch

from ..drafts.base import Context, Draft
from ..drafts.model import ModelDraft
from ..proposal import Proposal


class SimulatedDraft(ModelDraft):
    """`model` runs as in `ModelDraft`, step by step. Then each proposed token is replaced: with probability `rate` by the
    target's own greedy token at that place, else by another one. Acceptance is simulated, output and cost are not.

    oracle: the target's greedy continuation, recorded in a plain run. seed: of the coin. Only for greedy decoding, batch 1.
    """

    name = "simulated"
    trusted = False

    def __init__(self, model, oracle: list[int], rate: float, seed: int):
        super().__init__(model)
        self.oracle, self.rate, self.coin = oracle, rate, random.Random(seed)

    def start(self, context: Context) -> None:
        if context.sampler.do_sample or len(context.rows) != 1:
            raise ValueError("SimulatedDraft serves greedy decoding of one row.")
        super().start(context)
        self.prompt = len(context.rows[0])

    def propose(self, context: Context, k: list[int]) -> Proposal:
        proposal = super().propose(context, k)
        size = proposal.sizes[0]
        if not size:
            return proposal
        done = len(context.rows[0]) - self.prompt
        tokens = _tokens(self, self.oracle, done, size, context.vocab_size)
        # the draft's cache stands for these tokens from now on, so that what is accepted costs it nothing again
        self.drafted = Proposal.chain(torch.tensor([tokens], device=context.device), None, [size], self.name)
        return self.drafted


class SimulatedTable(Draft):
    """As `SimulatedDraft`, for a draft that costs nothing (an n-gram table, prompt lookup): k tokens, each right with probability `rate`. oracle: of one row, or
    of every row a list; then batches are served, too."""

    name = "simulated"
    trusted = False

    def __init__(self, oracle: list[int] | list[list[int]], rate: float, seed: int):
        self.oracles = oracle if oracle and isinstance(oracle[0], list) else [oracle]
        self.rate, self.coin = rate, random.Random(seed)

    def start(self, context: Context) -> None:
        if context.sampler.do_sample or len(context.rows) != len(self.oracles):
            raise ValueError("SimulatedTable serves greedy decoding of the rows that it knows: one, or as many as it was given lists.")
        self.rows, self.prompts = self.oracles, [len(row) for row in context.rows]

    def propose(self, context: Context, k: list[int]) -> Proposal:
        drafted = [_tokens(self, own, len(row) - prompt, size, context.vocab_size) for own, row, prompt, size in zip(self.rows, context.rows, self.prompts, k)]
        return Proposal.from_lists(drafted, context.device, self.name)

    def keep(self, rows: list[int]) -> None:
        self.rows, self.prompts = [self.rows[row] for row in rows], [self.prompts[row] for row in rows]


def _tokens(draft: SimulatedDraft | SimulatedTable, oracle: list[int], place: int, size: int, vocabulary: int) -> list[int]:
    """For each place the target's own token, or with probability 1 - rate the one after it in the vocabulary."""
    right = [oracle[i] if i < len(oracle) else 0 for i in range(place, place + size)]
    return [token if draft.coin.random() < draft.rate else (token + 1) % vocabulary for token in right]
