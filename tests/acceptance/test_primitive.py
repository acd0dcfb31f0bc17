"""The sampling primitive on plain distributions, and the document that shows what it is good for."""

import re
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from hf_specdec.acceptance import acceptance_probability, residual, speculative_sample
from tests.test_enumeration import EXACT, random_laws

DOCUMENT = Path(__file__).parents[2] / "docs" / "speculative_execution.md"


def test_accepted_and_replaced_add_up_to_p():
    p, q = random_laws(20, 7, seed=1, zeros=True), random_laws(20, 7, seed=2, zeros=True)
    taken = q * acceptance_probability(p, q.clamp(min=1e-300))
    left = residual(p, q, torch.zeros(20, dtype=torch.long))
    result = taken + (1 - taken.sum(-1, keepdim=True)) * left / left.sum(-1, keepdim=True)
    assert float((result - p).abs().max()) < EXACT
    assert torch.allclose(taken.sum(-1), torch.minimum(p, q).sum(-1), atol=EXACT)


@pytest.mark.parametrize("guess", [False, True], ids=["drawn", "a guess"])
def test_what_comes_out_follows_p(guess):
    generator, n = torch.Generator().manual_seed(0), 40_000
    p, q = random_laws(6, seed=3), random_laws(6, seed=4)
    x = torch.full((n,), 2) if guess else torch.multinomial(q, n, replacement=True, generator=generator)
    out, accepted = speculative_sample(p.expand(n, 6), None if guess else q.expand(n, 6), x, generator=generator)
    assert chisquare(torch.bincount(out, minlength=6), n * p).pvalue > 1e-9
    assert bool((out[accepted] == x[accepted]).all())
    assert float(accepted.double().mean()) == pytest.approx(float(p[2] if guess else torch.minimum(p, q).sum()), abs=0.01)


def test_a_wrong_q_is_rejected_by_the_same_test():
    generator, n = torch.Generator().manual_seed(0), 40_000
    p, q = random_laws(6, seed=3), random_laws(6, seed=4)
    out, _ = speculative_sample(p.expand(n, 6), q.expand(n, 6), torch.full((n,), 2), generator=generator)
    assert chisquare(torch.bincount(out, minlength=6), n * p).pvalue < 1e-9


def test_any_leading_shape_goes():
    p, q = random_laws(2, 3, 5, seed=1), random_laws(2, 3, 5, seed=2)
    out, accepted = speculative_sample(p, q, torch.ones(2, 3, dtype=torch.long))
    assert out.shape == accepted.shape == (2, 3)
    assert speculative_sample(p[0, 0], q[0, 0], torch.tensor(1))[0].shape == ()


@pytest.mark.parametrize(("p", "q", "x", "message"), [
    (torch.ones(2, 4) / 4, torch.ones(4) / 4, torch.zeros(2, dtype=torch.long), "^q: expected floats"),
    (torch.ones(4), None, torch.tensor(0), "^p is not a law"),
    (torch.ones(4) / 4, torch.tensor([1.5, -0.5, 0, 0]), torch.tensor(0), "^q is not a law"),
    (torch.ones(4) / 4, None, torch.tensor(4), "^x holds indices from 4"),
    (torch.tensor([float("nan"), 0.5]), None, torch.tensor(0), "^p is not a law"),
    (torch.ones(2) / 2, torch.tensor([float("nan"), 0.5]), torch.tensor(0), "^q is not a law"),
    (torch.ones(2) / 2, torch.tensor([1.0, 0.0]), torch.tensor(1), "^x holds an index whose q is 0"),
])
def test_what_is_no_law_is_refused(p, q, x, message):
    with pytest.raises(ValueError, match=message):
        speculative_sample(p, q, x)


@pytest.mark.parametrize("lenience", [0.0, -1.0, 1.5, float("nan")])
def test_a_lenience_that_is_none_is_refused(lenience):
    with pytest.raises(ValueError, match="^lenience="):
        speculative_sample(torch.ones(2) / 2, None, torch.tensor(0), lenience)


def test_nothing_drawn_gives_nothing():
    out, accepted = speculative_sample(torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(0, dtype=torch.long))
    assert out.shape == accepted.shape == (0,)


def test_the_documents_example_runs_and_says_what_it_says():
    text = DOCUMENT.read_text()
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    names: dict = {}
    exec(compile(program, str(DOCUMENT), "exec"), names)  # noqa: S102
    expected, plain, speculative = names["expected"], names["plain"], names["speculative"]
    assert speculative < plain and speculative == pytest.approx(expected, rel=0.03)
    assert chisquare(names["counts"], names["n"] * names["p"]).pvalue > 1e-9
