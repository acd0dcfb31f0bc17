"""Acceptance probabilities against their formulas: chains, trees and blocks."""

import itertools

import pytest
import torch

from hf_specdec.law import Law
from hf_specdec.proposal import Proposal
from hf_specdec.tree import Tree
from tests.acceptance.enumeration import block, token_wise_expectation
from tests.acceptance.test_block import rule as block_rule
from tests.acceptance.test_spectr import of_the_parent
from tests.acceptance.test_spectr import rule as spectr_rule
from tests.test_enumeration import EXACT, World, acceptance_probability, every_draft, independent, random_laws, sampling, without_replacement

pytestmark = pytest.mark.usefixtures("both_ways")


def expected_accepted(rule, tree: Tree, world: World, draft_law) -> float:
    """Expected number of accepted tokens of one round: every draft, every pattern of coins."""
    proposal, weights = every_draft(tree, draft_law)
    law = world.law(tree, proposal.tokens)
    total, patterns = 0.0, [((), weights)]
    for node in range(1, len(tree) + 1):
        grown = []
        for coins, share in patterns:
            full = torch.tensor([[*coins, *[0.0] * (len(tree) - len(coins))]], dtype=torch.float64).repeat(len(weights), 1)
            chance = acceptance_probability(rule, proposal, law, full, node)
            total += float((share * chance).sum())
            grown += [((*coins, 0.0), share * chance), ((*coins, 1 - 2.0**-53), share * (1 - chance))]
        patterns = grown
    return total


def test_one_token_is_accepted_with_the_overlap_of_the_laws():
    p, q = random_laws(20, 6, seed=1), random_laws(20, 6, seed=2)
    for rule in (sampling(), block_rule(), spectr_rule()):
        total = torch.zeros(20, dtype=torch.float64)
        for x in range(6):
            proposal = Proposal.chain(torch.full((20, 1), x), q[:, None])
            law = Law(p.log()[:, None].expand(-1, 2, -1))
            total += q[:, x] * acceptance_probability(rule, proposal, law, torch.zeros(20, 1, dtype=torch.float64), 1)
        assert torch.allclose(total, torch.minimum(p, q).sum(-1), atol=EXACT)


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_is_accepted_with_the_products_of_overlaps(seed):
    world, draft = World(4, 2, seed=seed), independent(4, seed=seed)
    assert expected_accepted(sampling(), Tree.chain(2), world, draft) == pytest.approx(token_wise_expectation(world, draft, 2), abs=EXACT)


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize(("make", "parents"), [(sampling, (0, 0)), (sampling, (0, 0, 1)), (sampling, (0, 1, 1)), (spectr_rule, (0, 0)), (spectr_rule, (0, 0, 1, 2))])
def test_a_tree_is_accepted_at_least_as_much_as_any_of_its_branches(parents, make):
    """K-sequential selection: where the branches are alike; it takes acceptance from the first sibling to give more to all."""
    tree = Tree(parents)
    for seed in range(2):
        world, draft = World(3, 2, seed=seed), of_the_parent(tree, 3, seed=seed + 20)
        whole = expected_accepted(make(), tree, world, draft)
        for depth in range(1, max(tree.depths) + 1):
            chain = Tree.chain(depth)
            branch = expected_accepted(sampling(), chain, world, of_the_parent(chain, 3, seed=seed + 20))
            assert whole >= branch - EXACT


def test_siblings_without_replacement_are_accepted_at_least_as_much_as_one():
    tree = Tree((0, 0, 0))
    gains = [expected_accepted(sampling(), tree, World(5, 1, seed=seed), without_replacement(tree, 5, seed=seed + 9))
             - expected_accepted(sampling(), Tree((0,)), World(5, 1, seed=seed), without_replacement(tree, 5, seed=seed + 9)) for seed in range(6)]
    assert min(gains) >= -EXACT and max(gains) > 0.05


def test_all_tokens_as_siblings_without_replacement_are_always_accepted():
    tree = Tree((0,) * 4)
    assert expected_accepted(sampling(), tree, World(4, 1, seed=1), without_replacement(tree, 4)) == pytest.approx(1.0, abs=EXACT)


def test_a_block_is_accepted_at_least_as_much_as_the_real_rule_token_by_token():
    for seed, (vocab, n) in itertools.product(range(6), [(3, 2), (2, 3)]):
        world, draft = World(vocab, n, seed=seed), independent(vocab, seed=seed + 5)
        assert block(block_rule(), world, draft, n, 1)[1] >= expected_accepted(sampling(), Tree.chain(n), world, draft) - EXACT
