"""What a draft is trained on: the distance of its law q from the target's p, position by position.

Both laws come as the target's likeliest tokens (those that the draft's head has) and one more bucket for all the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

TINY = 1e-6
NEVER = -30.0  # log q of a token that the head does not have


def buckets(logits: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """p and log q, float [n, k + 1], from the draft's logits [n, V'], the target's likeliest tokens `ids` [n, k] and their log
    probabilities, and place int64 [V], the column of V' of every token, -1 for none. The last bucket is what remains; a token
    that the head does not have counts as p's loss: its mass is in the last bucket."""
    column = place[ids]
    known = column >= 0
    p = logprobs.float().exp() * known
    log_q = logits.float().log_softmax(-1).gather(-1, column.clamp(min=0)).masked_fill(~known, NEVER)
    p_rest = (1 - p.sum(-1, keepdim=True)).clamp(min=0)
    q_rest = (1 - log_q.exp().sum(-1, keepdim=True)).clamp(min=TINY)
    return torch.cat([p, p_rest], -1), torch.cat([log_q, q_rest.log()], -1)


def acceptance(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """sum min(p, q) over the named buckets, [n]: a lower bound of the acceptance rate (Leviathan et al. 2023, Corollary 3.6)."""
    return torch.minimum(p, log_q.exp())[:, :-1].sum(-1)


def forward_kl(p, log_q):
    """KL(p || q), without p's own entropy."""
    return -(p * log_q)[:, :-1].sum(-1)


def reverse_kl(p, log_q):
    """KL(q || p), with p no smaller than 1e-6."""
    return (log_q.exp() * (log_q - p.clamp(min=TINY).log())).sum(-1)


def total_variation(p, log_q):
    """sum |p - q| / 2."""
    return (p - log_q.exp()).abs().sum(-1) / 2


def total_variation_pp(p, log_q):
    """TVD++ (arXiv 2403.00858, section 3.2): the policy gradient of the total variation, x ~ q rewarded where p(x) > q(x), with the
    rewards centred and scaled over the batch."""
    q = log_q.exp().detach()
    reward = (p > q).float()
    mean = (q * reward).sum(-1).mean()
    spread = (q * (reward - mean) ** 2).sum(-1).mean().sqrt()
    return -(q * log_q * (reward - mean) / (spread + TINY)).sum(-1)


def minus_log_acceptance(p, log_q):
    """-log sum min(p, q): the acceptance rate itself."""
    return -acceptance(p, log_q).clamp(min=1e-4).log()


def cross_entropy(p, log_q):
    """-log q of the target's likeliest token."""
    return -log_q.gather(-1, p[:, :-1].argmax(-1, keepdim=True)).squeeze(-1)


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross_entropy": cross_entropy,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "tvd": total_variation,
    "tvd++": total_variation_pp,
    "acceptance": minus_log_acceptance,
}
