"""Speculative sampling on plain distributions: x was drawn from q, and what comes out has been drawn from p.

Nothing here knows of language models: p and q may be the laws of any function with a random, discrete result
(Leviathan et al. 2023, section 6; docs/speculative_execution.md has an example). x must have been drawn from the very q that
is passed, and every call needs fresh random numbers.
"""

from __future__ import annotations

import torch

from ..devices import has_float64
from ..law import draw


def acceptance_probability(p_x: torch.Tensor, q_x: torch.Tensor | float, lenience: float = 1.0) -> torch.Tensor:
    """min(1, p(x) / (l q(x))), of any shape; to be compared with a uniform r in [0, 1) by r < it, since r can be 0.

    Leviathan et al. 2023, Algorithm 1; l is the lenience of A.5.
    """
    return (p_x / (lenience * q_x)).clamp(max=1)


def residual(p: torch.Tensor, q: torch.Tensor | None, x: torch.Tensor, lenience: float = 1.0) -> torch.Tensor:
    """Weights of the law that replaces a rejected x, max(0, p - l q), float [..., V]; q None stands for the one-hot of x [...].

    They do not sum to 1. Where nothing is left (p equals q up to rounding, and the rejection was rounding too) it is p itself.
    """
    if q is None:
        taken = p.gather(-1, x[..., None])
        left = p.scatter(-1, x[..., None], (taken - lenience).clamp(min=0))
    else:
        left = (p - lenience * q).clamp(min=0)
    some = left.sum(-1, keepdim=True) > 0
    return left if p.device.type == "cpu" and bool(some.all()) else torch.where(some, left, p)


def speculative_sample(p: torch.Tensor, q: torch.Tensor | None, x: torch.Tensor, lenience: float = 1.0,
                       generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A draw from p that is x as often as can be: (result int64 [...], accepted bool [...]).

    p: float [..., V], the law wanted; q: float [..., V], the law x was drawn from, None if x was not drawn at all (a guess);
    x: int64 [...]. With lenience l < 1 the result x comes with probability at most p(x) / l. Leviathan et al. 2023, Algorithm 1
    and Theorem 3.5: P(accepted) = sum_x min(p(x), q(x)), which no other way of coupling the two laws exceeds.

    Raises ValueError for shapes that do not fit, for laws that are negative, nan or do not sum to 1 within 1e-3, for an x that q cannot have
    given, and for a lenience outside (0, 1].
    """
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience={lenience!r} must be above 0 and at most 1; 1 is exact.")
    for name, law in (("p", p), ("q", q)):
        if law is not None and (law.shape != (*x.shape, p.shape[-1]) or not law.is_floating_point()):
            raise ValueError(f"{name}: expected floats [..., V] with x int64 [...] of the same leading shape, got {tuple(law.shape)} and "
                             f"{tuple(x.shape)}.")
        if law is not None and not bool((law >= 0).all() & ((law.sum(-1) - 1).abs() <= 1e-3).all()):
            raise ValueError(f"{name} is not a law: entries must be 0 or more and sum to 1. Normalise it.")
    if x.numel() and not 0 <= int(x.min()) <= int(x.max()) < p.shape[-1]:
        raise ValueError(f"x holds indices from {int(x.min())} to {int(x.max())}; they must lie in 0..{p.shape[-1] - 1}.")
    if q is not None and not bool((q.gather(-1, x[..., None]) > 0).all()):
        raise ValueError("x holds an index whose q is 0, which cannot have been drawn from q. Pass the law that x was drawn from.")
    coins = torch.rand((2, *x.shape), dtype=torch.float64 if has_float64(x.device) else torch.float32, device=x.device, generator=generator)
    p_x = p.gather(-1, x[..., None])[..., 0]
    q_x = torch.ones_like(p_x) if q is None else q.gather(-1, x[..., None])[..., 0]
    accepted = coins[0] < acceptance_probability(p_x, q_x, lenience)
    other = draw(residual(p, q, x, lenience).reshape(-1, p.shape[-1]), coins[1].reshape(-1)).reshape(x.shape)
    return torch.where(accepted, x, other), accepted
