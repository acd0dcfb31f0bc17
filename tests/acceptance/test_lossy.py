"""The two lossy rules: what they accept, that they say so, and the bound they have."""

import pytest
import torch

from hf_specdec import SpeculativeConfig, registry
from hf_specdec.law import Law
from hf_specdec.proposal import Proposal
from hf_specdec.tree import Tree
from tests.conformance.builders import make
from tests.helpers import generated, perturbed, repetitive, speculate, tiny_llama
from tests.test_enumeration import EXACT, World, committed, independent, one_hot, random_laws, worst_error

pytestmark = pytest.mark.usefixtures("both_ways")


def rule(name: str, *arguments):
    return registry.load(registry.ACCEPTANCE, name, "acceptance")(*arguments)


def judged(made, p: torch.Tensor) -> torch.Tensor:
    """Bool [n, V]: whether x is accepted after p [n, V]."""
    n, vocab = p.shape
    laws = Law(p.log().repeat_interleave(vocab, 0)[:, None].expand(-1, 2, -1))
    return made.verdict(Proposal.chain(torch.arange(vocab).repeat(n)[:, None]), laws, None).on_path[:, 1].view(n, vocab)


@pytest.mark.parametrize("t", [0.05, 0.3, 1.0])
def test_the_threshold_accepts_what_has_that_probability(t):
    p = random_laws(40, 8, seed=1)
    assert torch.equal(judged(rule("threshold", t), p), p >= t)
    assert judged(rule("threshold", 0.5), torch.tensor([[0.5, 0.5, 0.0]])).tolist() == [[True, True, False]]


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.3, 1.0), (0.01, 0.1)])
def test_typical_acceptance_is_medusas_formula(epsilon, delta):
    p = random_laws(40, 8, seed=1, zeros=True)
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1, keepdim=True)
    assert torch.equal(judged(rule("typical", epsilon, delta), p), p > (delta * (-entropy).exp()).clamp(max=epsilon))


@pytest.mark.parametrize("t", [0.2, 0.5, 0.8])
def test_one_token_of_the_threshold_is_within_1_minus_t_of_p(t):
    for seed in range(5):
        for draft, point_mass in ((independent(6, seed=seed), False), (one_hot(6, seed=seed), True)):
            world = World(6, 1, seed=seed, zeros=True)
            out = committed(rule("threshold", t), Tree.chain(1), world, draft, 1, point_mass)
            assert sum(abs(out.get((x,), 0.0) - world.text((x,))) for x in range(6)) / 2 <= 1 - t + EXACT


def test_both_are_far_from_the_targets_law():
    world = World(5, 1, seed=5)
    for made in (rule("threshold", 0.1), rule("typical")):
        assert worst_error(committed(made, Tree.chain(1), world, independent(5), 1), world, 1) > 0.02


def test_a_tree_takes_the_first_sibling_that_passes():
    p = torch.tensor([0.1, 0.4, 0.5])
    proposal = Proposal(Tree((0, 0, 0, 2)), torch.tensor([[0, 1, 2, 2]]), None, [4])
    verdict = rule("threshold", 0.3).verdict(proposal, Law(p.log().expand(1, 5, 3)), None)
    assert verdict.on_path.tolist() == [[True, False, True, False, True]] and torch.allclose(verdict.next_probs, p[None])


@pytest.mark.parametrize("name", ["threshold", "typical"])
def test_the_trace_says_lossy_and_every_accepted_token_passes(name):
    target, rows = tiny_llama(3), repetitive(12, 9)
    options = dict(speculative={"seed": 1, "record_probs": True, "threshold": 0.2, "typical_epsilon": 0.2, "typical_delta": 1.0})
    out = speculate(target, rows, make("model", target), 4, do_sample=True, acceptance=name, max_new_tokens=30, **options)
    trace = out.speculation
    assert not trace.lossless and trace.config["acceptance"] == name and trace.accepted > 0
    for entries in trace.rounds:
        for entry in entries:
            limit = 0.2 if name == "threshold" else 0.0
            assert all(p >= limit for p in entry.p[: entry.accepted])
    assert generated(out, rows) != generated(speculate(target, rows, make("model", target), 4, do_sample=True, max_new_tokens=30, seed=1), rows)


@pytest.mark.filterwarnings("ignore:assistant_model")
def test_a_looser_rule_accepts_more():
    target, rows = tiny_llama(3), repetitive(12, 9)
    rates = [speculate(target, rows, perturbed(target, 0.3), 4, do_sample=True, acceptance="threshold", max_new_tokens=60,
                       speculative={"seed": 1, "threshold": t}).speculation.acceptance_rate for t in (0.99, 0.1, 0.0001)]
    assert rates == sorted(rates) and rates[2] > rates[0] + 0.1


@pytest.mark.parametrize("option", ["typical_epsilon", "typical_delta", "threshold"])
@pytest.mark.parametrize("value", [0, -0.1, 1.5, float("nan"), "0.3", True])
def test_values_out_of_range_are_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"^{option}="):
        SpeculativeConfig(**{option: value})


@pytest.mark.parametrize("name", ["threshold", "typical", "block", "spectr"])
def test_a_lenience_below_1_is_refused(name):
    with pytest.raises(ValueError, match="lenience=0.5 means nothing to the acceptance rule"):
        speculate(tiny_llama(), repetitive(6), None, 3, do_sample=True, acceptance=name, lenience=0.5)
