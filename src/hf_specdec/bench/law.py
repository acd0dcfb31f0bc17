"""Does sampling follow the target's law? Enumeration of the first tokens over a reduced support, samples, chi-square."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..drafts.base import Context, Draft
from ..proposal import Proposal
from .arms import eos_tokens

Law = dict[tuple[int, ...], float]
# in the place of what a model's own generation config asks for, and the enumerated law does not know
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


@torch.no_grad()
def enumerate_law(model, prompt: list[int], depth: int, top_k: int) -> dict[tuple[int, ...], Law]:
    """For every prefix of fewer than `depth` new tokens that top-k sampling can reach: the law of the next token.

    End-of-sequence tokens are excluded, as `min_new_tokens` excludes them.
    """
    laws: dict[tuple[int, ...], Law] = {}
    prefixes: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        ids = torch.tensor([prompt + list(prefix) for prefix in prefixes], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, -1].double()
        logits[:, eos_tokens(model)] = -torch.inf
        values, tokens = logits.topk(top_k)
        for prefix, probs, support in zip(prefixes, values.softmax(-1).tolist(), tokens.tolist()):
            laws[prefix] = {(token,): p for token, p in zip(support, probs)}
        prefixes = [prefix + token for prefix in prefixes for token in laws[prefix]]
    return laws


def joint(laws: dict[tuple[int, ...], Law], depth: int) -> Law:
    """The law of the first `depth` tokens together."""
    law: Law = {(): 1.0}
    for _ in range(depth):
        law = {prefix + token: p * q for prefix, p in law.items() for token, q in laws[prefix].items()}
    return law


def sample(
    model,
    prompt: list[int],
    n: int,
    depth: int,
    top_k: int,
    batch: int,
    step: Callable[..., None] = lambda **_: None,
    **speculation,
) -> tuple[Counter, int, int]:
    """Counts of the first `depth` tokens in n sampled continuations, tokens proposed, tokens accepted.

    One token more than `depth` is generated, so that the last one compared can be a drafted one too.
    """
    counts, proposed, accepted = Counter(), 0, 0
    while (left := n - counts.total()) > 0:
        rows = min(batch, left)
        ids = torch.tensor([prompt] * rows, device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            num_beams=1,
            top_k=top_k,
            **NEUTRAL,
            max_new_tokens=depth + 1,
            min_new_tokens=depth + 1,
            return_dict_in_generate=True,
            **speculation,
        )
        counts.update(map(tuple, out.sequences[:, len(prompt) : len(prompt) + depth].tolist()))
        proposed, accepted = proposed + out.speculation.proposed, accepted + out.speculation.accepted
        step(steps=rows)
    return counts, proposed, accepted


@dataclass(frozen=True)
class ChiSquare:
    """statistic over `freedom` degrees of freedom; p: probability of one at least as large if the law is right."""

    statistic: float
    freedom: int
    p: float


def chi_square(counts: Counter, law: Law) -> ChiSquare:
    """Pearson's test; cells with fewer than 5 expected are pooled. A sample outside the law's support has p = 0."""
    n = counts.total()
    if any(cell not in law for cell in counts):
        return ChiSquare(float("inf"), len(law) - 1, 0.0)
    cells = sorted(((n * p, counts[cell]) for cell, p in law.items()), reverse=True)
    large = list(itertools.takewhile(lambda cell: cell[0] >= 5, cells))
    rest = cells[len(large) :]
    if rest:
        large.append((sum(expected for expected, _ in rest), sum(seen for _, seen in rest)))
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in large)
    freedom = max(len(large) - 1, 1)
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return ChiSquare(statistic, freedom, float(torch.special.gammaincc(half[0], half[1])))


class SupportDraft(Draft):
    """Knows the enumerated laws. Honest: draws from the uniform law over the support, and says so. Lying: proposes the least
    likely token and still claims to have drawn it uniformly, a misreported q that shifts the output's law."""

    def __init__(self, laws: dict[tuple[int, ...], Law], prompt_length: int, lying: bool = False):
        self.laws, self.prompt_length, self.lying = laws, prompt_length, lying
        self.name = "lying" if lying else "uniform over the support"

    def propose(self, context: Context, k: list[int]) -> Proposal:
        coins = context.noise("draft", max(max(k), 1)).tolist()
        rows, laws = [], []
        for row, limit, own in zip(context.rows, k, coins):
            prefix, path, supports = tuple(row[self.prompt_length :]), [], []
            while len(path) < limit and prefix in self.laws:
                support = [token for (token,) in self.laws[prefix]]
                token = support[-1] if self.lying else support[int(own[len(path)] * len(support))]
                path, supports, prefix = path + [token], supports + [support], prefix + (token,)
            rows.append(path)
            laws.append(supports)
        proposal = Proposal.from_lists(rows, context.device, self.name)
        proposal.probs = torch.zeros((*proposal.tokens.shape, context.vocab_size), device=context.device)
        for b, supports in enumerate(laws):
            for i, support in enumerate(supports):
                proposal.probs[b, i, support] = 1 / len(support)
        return proposal
