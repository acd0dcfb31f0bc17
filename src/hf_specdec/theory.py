"""How much speculation brings: the formulas of Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via
Speculative Decoding" (arXiv 2211.17192).

Glossary: p is the target's law of the next token, q the draft's; alpha the acceptance rate, the mean probability that a drafted
token is accepted; k the number of drafted tokens (the paper's gamma); c the time of one draft step over that of one target step.
The formulas take acceptances to be independent and alike, and a target pass over k + 1 tokens to cost as much as over one
(except `speedup`, where that cost is measured). Scalars are Python floats; nothing here knows models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real

import torch


def acceptance_rate(p: torch.Tensor, q: torch.Tensor, lenience: float = 1.0) -> torch.Tensor:
    """Probability that a token drawn from q is accepted: sum_x min(p(x) / l, q(x)).

    Section 3.2, Theorem 3.5 and Corollary 3.6 (l = 1); appendix A.5 (l < 1, where x is accepted with probability
    min(1, p(x) / (l q(x)))). p, q: float [..., V], laws over the last dimension. Returns float [...]; its mean over prefixes is
    alpha. ValueError unless 0 < lenience <= 1.
    """
    if isinstance(lenience, str | None) or not 0 < lenience <= 1:
        raise ValueError(f"lenience={lenience!r} must be in (0, 1]; 1.0 keeps the output exact.")
    return torch.minimum(p / lenience, q).sum(-1)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """D_LK(p, q) = sum_x |p(x) - m(x)| with m = (p + q) / 2, which is 1 - sum_x min(p(x), q(x)): the total variation distance.

    Section 3.2, Definition 3.2 and Lemma 3.3. p, q: float [..., V]. Returns float [...] in [0, 1].
    """
    return (p - q).abs().sum(-1) / 2


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens that one round commits on average, the target's own included: (1 - alpha^(k+1)) / (1 - alpha), k + 1 at alpha = 1.

    Section 3.1, Equation 1.
    """
    _check(alpha, k)
    rest = 1 - alpha
    if alpha <= 0.5:
        return (1 - alpha ** (k + 1)) / rest
    return -math.expm1((k + 1) * math.log1p(-rest)) / rest if rest else k + 1.0  # keeps the digits that the quotient loses near 1


def walltime_improvement(alpha: float, k: int, c: float) -> float:
    """Tokens per second over those of plain decoding: expected tokens / (k c + 1).

    Section 3.3, Theorem 3.8. The paper's own figures come out of it: Table 1, the EXP column of Table 4 (within 0.07, its alphas
    being rounded), and the greedy lenience figures of A.5 (3.3, 3.3, 3.9, 4.9 at k = 8, c = 0.015). The sampling figures of A.5
    (2.5, 3.1, 3.6, 5) do not: from the alphas that Table 5 prints, the best k gives 2.3, 2.9, 3.4, 4.8.
    """
    return expected_tokens(alpha, k) / (k * _ratio("c", c) + 1)


def operations_factor(alpha: float, k: int, c_hat: float = 0.0) -> float:
    """Arithmetic operations per token over those of plain decoding: (k c_hat + k + 1) / expected tokens.

    Section 3.4, Theorem 3.11; c_hat is the ratio of operations per token of draft and target.
    """
    tokens = expected_tokens(alpha, k)
    return (k * _ratio("c_hat", c_hat) + k + 1) / tokens


def optimal_k(alpha: float, c: float, k_max: int = 64) -> int:
    """The k in 0..k_max with the best `walltime_improvement`; 0 where speculation does not pay (alpha <= c, Corollary 3.9).

    Section 3.5.
    """
    _drafted("k_max", k_max)
    return max(range(k_max + 1), key=lambda k: walltime_improvement(alpha, k, c))


def oracle_improvement(alpha: float, c: float) -> float:
    """Bound of `walltime_improvement` if an oracle told before each round how many drafted tokens will be accepted.

    Section 3.5: a round commits 1 / (1 - alpha) tokens on average. It drafts only what is accepted, alpha / (1 - alpha) tokens on
    average, each for c, and still pays one target pass (the paper's footnote 4). The quotient is 1 / (1 - alpha (1 - c)).
    With c >= 1 it drafts nothing: 1. Infinite at alpha = 1, c = 0.
    """
    _check(alpha, 0)
    cost = 1 - alpha * (1 - min(_ratio("c", c), 1))
    return 1 / cost if cost > 0 else math.inf


def speedup(alpha: float, k: int, draft_cost: float, verify_cost: Callable[[int], float] | None = None) -> float:
    """Theorem 3.8 without the assumption that a wider target pass is free: expected tokens / (verify_cost(k + 1) + k draft_cost).

    verify_cost(width): measured time of a target pass over `width` tokens over that of a pass over one; None is the paper's own
    assumption, 1 at every width. draft_cost: c.
    """
    _check(alpha, k)
    verify = 1.0 if verify_cost is None else _ratio(f"verify_cost({k + 1})", verify_cost(k + 1))
    cost = verify + k * _ratio("draft_cost", draft_cost)
    if not cost:
        raise ValueError(f"verify_cost({k + 1})={verify!r} and draft_cost={draft_cost!r} must not both be 0: a round takes some time.")
    return expected_tokens(alpha, k) / cost


def memory_bound_speedup(block_efficiency: float, k: float, c: float) -> float:
    """MBSU, what speculation gains if reading weights is all that costs: block efficiency / (k c + 1).

    Goel et al. 2024 (arXiv 2403.00858), with c the draft's parameters over the target's (0 without a draft model). k: tokens drafted
    per round, a mean that need not be whole. It is Theorem 3.8 of Leviathan et al. 2023 with the tokens per round counted, not expected.
    """
    if not isinstance(k, Real) or not 0 <= k < math.inf:
        raise ValueError(f"k={k!r} must be a number of drafted tokens, 0 or more.")
    return _ratio("block_efficiency", block_efficiency) / (k * _ratio("c", c) + 1)


def _check(alpha: float, k: int) -> None:
    if isinstance(alpha, str | None) or not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha!r} must be an acceptance rate in 0..1.")
    _drafted("k", k)


def _drafted(name: str, k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, Integral) or k < 0:
        raise ValueError(f"{name}={k!r} must be a whole number of drafted tokens, 0 or more.")


def _ratio(name: str, value: float) -> float:
    if not isinstance(value, Real) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite ratio of costs, 0 or more.")
    return value
