"""K-sequential selection: the joint law in float64, its discount, and siblings that share no law."""

import pytest
import torch

from hf_specdec import registry
from hf_specdec.acceptance.spectr import leftover, smallest_discount
from hf_specdec.tree import Tree
from tests.helpers import FULL
from tests.test_enumeration import EXACT, World, committed, different_one_hots, random_laws, sampling, without_replacement, worst_error

pytestmark = pytest.mark.usefixtures("both_ways")


def rule():
    return registry.load(registry.ACCEPTANCE, "spectr", "acceptance")()


def of_the_parent(tree: Tree, vocab: int, seed: int = 7, zeros: bool = False):
    """Siblings share the law that follows their parent's token."""
    laws = random_laws(vocab + 1, vocab, seed=seed, zeros=zeros)
    return lambda row, node: laws[row[tree.parents[node - 1] - 1] if tree.parents[node - 1] else vocab]


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("zeros", [False, True], ids=["everything possible", "some tokens impossible"])
@pytest.mark.parametrize("parents", [(0, 0, 0), (0, 1, 0), *([(0, 0), (0, 1, 1), (0, 0, 1, 2)] if FULL else [])])
def test_siblings_drawn_from_one_law_leave_the_targets_joint_law(parents, zeros):
    tree, world = Tree(parents), World(4, 2, seed=1, zeros=zeros)
    assert worst_error(committed(rule(), tree, world, of_the_parent(tree, 4, zeros=zeros), 2), world, 2) < EXACT


def test_a_chain_is_judged_as_by_speculative_sampling():
    tree, world = Tree.chain(2), World(4, 2, seed=3)
    ours, other = (committed(way, tree, world, of_the_parent(tree, 4), 2) for way in (rule(), sampling()))
    assert all(abs(ours[text] - other[text]) < EXACT for text in other)


def test_another_discount_than_that_of_the_paper_is_not_exact(monkeypatch):
    tree, world = Tree((0, 0, 0)), World(4, 1, seed=1)
    monkeypatch.setattr("hf_specdec.acceptance.spectr.smallest_discount", lambda p, q, k: torch.ones_like(p[:, 0]))
    assert worst_error(committed(rule(), tree, world, of_the_parent(tree, 4), 1), world, 1) > 0.01


def test_the_discount_lies_in_1_to_k_and_makes_the_residual_touch_zero_from_above():
    for k in (1, 2, 5, 16):
        p, q, count = random_laws(50, 8, seed=1), random_laws(50, 8, seed=2), torch.full((50,), k)
        rho = smallest_discount(p, q, count)
        beta = torch.minimum(q, p / rho[:, None]).sum(-1)
        assert bool((1 <= rho).all() and (rho <= k).all())
        assert bool((1 - (1 - beta) ** k <= rho * beta + EXACT).all())
        assert float((rho * beta - (1 - (1 - beta) ** k)).abs().max()) < 1e-5 or k == 1
        accepted = 1 - (1 - beta) ** k
        assert bool((accepted >= (1 - 1 / 2.718281828) * torch.minimum(k * q, p).sum(-1) - EXACT).all())  # Theorem 2 of the paper
        assert torch.allclose(leftover(p, q, count, rho).sum(-1), 1 - accepted, atol=1e-9)


def test_more_draws_are_accepted_more_often():
    p, q = random_laws(1, 8, seed=1), random_laws(1, 8, seed=2)
    rates = []
    for k in (1, 2, 4, 8):
        beta = torch.minimum(q, p / smallest_discount(p, q, torch.tensor([k]))[:, None]).sum()
        rates.append(float(1 - (1 - beta) ** k))
    assert rates == sorted(rates) and rates[0] == pytest.approx(float(torch.minimum(p, q).sum())) and rates[-1] > rates[0] + 0.05


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("draft", [without_replacement, different_one_hots])
@pytest.mark.parametrize("parents", [(0, 0), (0, 0, 0), (0, 0, 1, 2)] if FULL else [(0, 0, 0)])
def test_siblings_without_a_common_law_leave_it_as_well(parents, draft):
    tree, world = Tree(parents), World(4, 2, seed=1)
    assert worst_error(committed(rule(), tree, world, draft(tree, 4), 2), world, 2) < EXACT


def test_a_place_of_each_kind_in_one_tree_leaves_it_as_well():
    tree, world = Tree((0, 0, 1, 1)), World(4, 2, seed=2)
    alike, without = of_the_parent(tree, 4), without_replacement(tree, 4)
    assert worst_error(committed(rule(), tree, world, lambda row, node: (alike if node <= 2 else without)(row, node), 2), world, 2) < EXACT
