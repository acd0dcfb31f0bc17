"""The losses: what they are on laws that can be checked by hand, and that p = q is where they are least."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.training.losses import LOSSES, acceptance, buckets

PLACE = torch.arange(5)


def laws(p: torch.Tensor, q: torch.Tensor):
    """Buckets of full laws over five tokens, of which the target names its three likeliest."""
    best = p.log().topk(3)
    return buckets(q.log(), best.indices, best.values, PLACE)


P = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]])
Q = torch.tensor([[0.3, 0.4, 0.1, 0.1, 0.1]])


def test_buckets_hold_the_named_tokens_and_the_rest():
    p, log_q = laws(P, Q)
    torch.testing.assert_close(p, torch.tensor([[0.5, 0.2, 0.15, 0.15]]))
    torch.testing.assert_close(log_q.exp(), torch.tensor([[0.3, 0.4, 0.1, 0.2]]))


def test_a_token_that_the_head_does_not_have_counts_among_the_rest():
    place = torch.tensor([-1, 0, 1, 2, 3])
    best = P.log().topk(3)
    p, log_q = buckets(Q[:, 1:].log(), best.indices, best.values, place)
    torch.testing.assert_close(p, torch.tensor([[0.0, 0.2, 0.15, 0.65]]))
    assert float(acceptance(p, log_q)) <= 0.35 + 1e-6


def test_values_by_hand():
    p, log_q = laws(P, Q)
    assert float(acceptance(p, log_q)) == pytest.approx(0.3 + 0.2 + 0.1)
    assert float(LOSSES["tvd"](p, log_q)) == pytest.approx((0.2 + 0.2 + 0.05 + 0.05) / 2)
    assert float(LOSSES["forward_kl"](p, log_q)) == pytest.approx(float(-(0.5 * Q[0, 0].log() + 0.2 * Q[0, 1].log() + 0.15 * Q[0, 2].log())))
    assert float(LOSSES["cross_entropy"](p, log_q)) == pytest.approx(float(-Q[0, 0].log()))
    assert float(LOSSES["acceptance"](p, log_q)) == pytest.approx(-float(torch.tensor(0.6).log()), rel=1e-4)
    full = 0.3 * torch.tensor(0.3 / 0.5).log() + 0.4 * torch.tensor(2.0).log() + 0.1 * torch.tensor(0.1 / 0.15).log() + 0.2 * torch.tensor(0.2 / 0.15).log()
    assert float(LOSSES["reverse_kl"](p, log_q)) == pytest.approx(float(full), rel=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_descending_a_loss_raises_the_acceptance(name):
    torch.manual_seed(0)
    p = torch.randn(64, 5).softmax(-1)
    logits = torch.randn(64, 5, requires_grad=True)
    best = p.log().topk(5)

    def rate():
        return float(torch.minimum(p, logits.detach().softmax(-1)).sum(-1).mean())

    before, optimizer = rate(), torch.optim.Adam([logits], lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        LOSSES[name](*buckets(logits, best.indices, best.values, PLACE)).mean().backward()
        optimizer.step()
    after = rate()
    expected = {"cross_entropy": 0.35, "tvd++": before + 0.05}.get(name, 0.95)  # the likeliest token alone is no law
    assert after >= expected, (before, after)


def test_tvdpp_is_a_policy_gradient_with_centred_rewards():
    p, log_q = laws(P, Q)
    log_q = log_q.clone().requires_grad_()
    LOSSES["tvd++"](p, log_q).sum().backward()
    rewarded = (p > log_q.detach().exp())[0]
    assert bool((log_q.grad[0][rewarded] < 0).all()) and bool((log_q.grad[0][~rewarded] > 0).all())
