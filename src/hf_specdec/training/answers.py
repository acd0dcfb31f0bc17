"""The target writes: continuations of many prompts at once, with the law that it saw after every token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import compat, integration
from ..bench.arms import Nothing, eos_tokens
from ..drafts.base import Context
from ..proposal import Proposal
from .shards import TOP, Sample


class Recorder(Nothing):
    """Proposes nothing and keeps the target's `TOP` likeliest next tokens after every token of every row. wrote: told of every pass's new tokens."""

    name = "recorder"
    trusted = True

    def __init__(self, wrote: Callable[[int], None] | None = None):
        self.wrote = wrote

    def start(self, context: Context) -> None:
        self.rows = list(range(len(context.rows)))
        self.seen: list[list] = [[] for _ in context.rows]

    def evidence(self, context: Context) -> list[int]:
        return [-1] * len(context.rows)

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        last = logits[:, 0].float()
        best = last.topk(TOP)
        logprobs = (best.values - last.logsumexp(-1, keepdim=True)).half().cpu()
        for row, ids, law in zip(self.rows, best.indices.int().cpu(), logprobs):
            self.seen[row].append((ids, law))
        if self.wrote:
            self.wrote(len(self.rows))

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


def stops(model, tokenizer) -> list[int]:
    """The tokens that end what `model` writes: the tokenizer's own and those of its generation config (chat models have one for the end of a turn)."""
    return list(dict.fromkeys(token for token in (tokenizer.eos_token_id, *eos_tokens(model)) if token is not None))


def room(*models) -> int | None:
    """The tokens that a text of all these models can have; None without a limit."""
    limits = [compat.traits_of(model, "target").max_positions for model in models]
    return min((limit for limit in limits if limit is not None), default=None)


@torch.no_grad()
def continue_texts(model, rows: list[list[int]], max_new: int, seed: int, eos: list[int], wrote: Callable[[int], None] | None = None,
                   **sampling) -> list[Sample]:
    """What `model` (enabled or not) writes after each of the token lists `rows`, until `eos`, `max_new` tokens, or the longest text fills the context;
    rows that end leave the batch. wrote: called with the number of new tokens after every pass. `sampling` goes to generate(): do_sample, top_p, ..."""
    width, pad, most = max(map(len, rows)), eos[0] if eos else 0, room(model)
    max_new = max_new if most is None else min(max_new, most - width)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    recorder = Recorder(wrote)
    decoder = integration.SpeculativeDecoder(recorder, {"seed": seed})
    out = model.generate(input_ids=ids, attention_mask=mask, custom_generate=decoder, max_new_tokens=max_new, eos_token_id=eos or None,
                         pad_token_id=pad, **sampling)
    samples = []
    for b, row in enumerate(rows):
        laws = recorder.seen[b]
        new = out[b, width : width + len(laws)].tolist()
        samples.append(Sample(row + new, len(row) - 1, torch.stack([ids for ids, _ in laws]), torch.stack([law for _, law in laws])))
    return samples


@torch.no_grad()
def judge_texts(model, rows: list[list[int]], first: list[int]) -> list[Sample]:
    """What `model` thinks comes after every token from first[b] on of given texts, in one pass, padded on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    samples = []
    for row, start, own in zip(rows, first, logits):
        own = own[start : len(row)].float()
        best = own.topk(TOP)
        law = (best.values - own.logsumexp(-1, keepdim=True)).half()
        samples.append(Sample(row, start, best.indices.int().cpu(), law.cpu()))
    return samples
