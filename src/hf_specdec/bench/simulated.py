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
        tokens = _tokens(self, done, size, context.vocab_size)
        # the draft's cache stands for these tokens from now on, so that what is accepted costs it nothing again
        self.drafted = torch.tensor([tokens], device=context.device)
        return Proposal.chain(self.drafted, None, [size], self.name)


class SimulatedTable(Draft):
    """As `SimulatedDraft`, for a draft that costs nothing (an n-gram table, prompt lookup): k tokens, each right with probability `rate`."""

    name = "simulated"
    trusted = False

    def __init__(self, oracle: list[int], rate: float, seed: int):
        self.oracle, self.rate, self.coin = oracle, rate, random.Random(seed)

    def start(self, context: Context) -> None:
        if context.sampler.do_sample or len(context.rows) != 1:
            raise ValueError("SimulatedTable serves greedy decoding of one row.")
        self.prompt = len(context.rows[0])

    def propose(self, context: Context, k: list[int]) -> Proposal:
        done = len(context.rows[0]) - self.prompt
        return Proposal.from_lists([_tokens(self, done, k[0], context.vocab_size)], context.device, self.name)


def _tokens(draft: SimulatedDraft | SimulatedTable, place: int, size: int, vocabulary: int) -> list[int]:
    """For each place the target's own token, or with probability 1 - rate the one after it in the vocabulary."""
    right = [draft.oracle[i] if i < len(draft.oracle) else 0 for i in range(place, place + size)]
    return [token if draft.coin.random() < draft.rate else (token + 1) % vocabulary for token in right]
