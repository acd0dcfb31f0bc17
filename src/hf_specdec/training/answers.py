"""The target writes: continuations of many prompts at once, with the law that it saw after every token."""

from __future__ import annotations

import torch

from .. import integration
from ..drafts.base import Context, Draft
from ..proposal import Proposal
from .shards import TOP, Sample


class Recorder(Draft):
    """Proposes nothing and keeps the target's `TOP` likeliest next tokens after every token of every row."""

    name = "recorder"
    trusted = True

    def start(self, context: Context) -> None:
        self.rows = list(range(len(context.rows)))
        self.seen: list[list] = [[] for _ in context.rows]

    def evidence(self, context: Context) -> list[int]:
        return [-1] * len(context.rows)

    def propose(self, context: Context, k: list[int]) -> Proposal:
        return Proposal.from_lists([[] for _ in k], context.device, self.name)

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        last = logits[:, 0].float()
        best = last.topk(TOP)
        logprobs = (best.values - last.logsumexp(-1, keepdim=True)).half().cpu()
        for row, ids, law in zip(self.rows, best.indices.int().cpu(), logprobs):
            self.seen[row].append((ids, law))

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


@torch.no_grad()
def continue_texts(model, rows: list[list[int]], max_new: int, seed: int, eos: list[int], **sampling) -> list[Sample]:
    """What `model` (enabled or not) writes after each of the token lists `rows`, until `eos` or `max_new` tokens; rows that end
    leave the batch. `sampling` goes to generate(): do_sample, temperature, top_p, ..."""
    width, pad = max(map(len, rows)), eos[0]
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
    recorder = Recorder()
    decoder = integration.SpeculativeDecoder(recorder, {"seed": seed})
    out = model.generate(input_ids=ids, attention_mask=mask, custom_generate=decoder, max_new_tokens=max_new, eos_token_id=eos,
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
