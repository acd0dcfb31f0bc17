"""Shapes of trees: by hand, and by dynamic programming against exhaustive search."""

import itertools
import random

import pytest

from hf_specdec.tree import Tree
from hf_specdec.tree_shapes import DynamicTree, best_tree, branching, by_depth, expected_accepted


def every_tree(nodes: int):
    for parents in itertools.product(*[range(i) for i in range(1, nodes + 1)]):
        yield Tree(parents)


def test_branches_per_depth_make_that_tree():
    tree = branching((3, 2, 1))
    assert len(tree) == 3 + 6 + 6 and tree.depths.count(3) == 6 and tree.parents[:5] == (0, 0, 0, 1, 1)
    assert branching((1, 1, 1)).is_chain and branching([4]).parents == (0, 0, 0, 0)


@pytest.mark.parametrize("branches", [(), (0,), (2, -1), (2.0, 1), (True,), ("2",)])
def test_what_are_no_branches_is_refused(branches):
    with pytest.raises(ValueError, match="^tree=.* must be numbers of branches per depth"):
        branching(branches)


@pytest.mark.parametrize("branches", [(257,), (4, 4, 4, 4), (2,) * 60])
def test_too_many_nodes_are_refused(branches):
    with pytest.raises(ValueError, match="more than 256 nodes"):
        branching(branches)


def test_nodes_go_in_order_of_depth_and_siblings_keep_theirs():
    tree = by_depth(Tree((0, 1, 0, 2, 3)))
    assert tree.parents == (0, 0, 1, 2, 3) and list(tree.depths) == sorted(tree.depths)
    assert by_depth(tree) == tree


def test_a_chain_is_accepted_as_the_papers_formula_says():
    alpha, k = 0.7, 5
    assert expected_accepted(Tree.chain(k), [alpha]) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha) - 1)
    assert expected_accepted(Tree((0, 0, 0)), [0.5, 0.2]) == pytest.approx(0.7)


def test_a_tree_is_accepted_as_much_as_any_of_its_branches_or_more():
    rates = [0.5, 0.2, 0.1]
    for tree in every_tree(5):
        for leaf in range(1, 6):
            assert expected_accepted(tree, rates) >= branch(tree, leaf, rates) - 1e-12


def branch(tree: Tree, leaf: int, rates) -> float:
    total, chance = 0.0, 1.0
    for node in tree.path(leaf):
        chance *= rates[tree.ranks[node - 1]] if tree.ranks[node - 1] < len(rates) else 0.0
        total += chance
    return total


@pytest.mark.parametrize("seed", range(8))
def test_the_best_tree_is_that_of_exhaustive_search(seed):
    draw = random.Random(seed)
    for _ in range(4):
        rates = [draw.random() for _ in range(draw.choice([1, 2, 3, 4]))]
        whole = sum(rates) * draw.uniform(1, 2)
        rates = [rate / whole for rate in rates]  # in no order
        nodes, depth = draw.randint(1, 6), draw.randint(1, 6)
        best = max(expected_accepted(tree, rates) for n in range(1, nodes + 1) for tree in every_tree(n) if max(tree.depths) <= depth)
        found = best_tree(rates, nodes, depth)
        assert len(found) <= nodes and max(found.depths) <= depth and by_depth(found) == found
        assert expected_accepted(found, rates) == pytest.approx(best, abs=1e-12)


def test_a_larger_budget_and_a_deeper_tree_earn_no_less():
    rates = [0.5, 0.2, 0.1, 0.05]
    values = [expected_accepted(best_tree(rates, nodes), rates) for nodes in (1, 4, 16, 64)]
    assert values == sorted(values)
    assert expected_accepted(best_tree(rates, 16, 2), rates) < expected_accepted(best_tree(rates, 16), rates)
    assert best_tree([0.9], 6).is_chain and best_tree([0.25, 0.25, 0.25, 0.25], 4).depths == (0, 1, 1, 1, 1)


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(rates=[], nodes=3), "^rates="), (dict(rates=[1.2], nodes=3), "^rates="), (dict(rates=[0.7, 0.7], nodes=3), "^rates="),
    (dict(rates=[float("nan")], nodes=3), "^rates="), (dict(rates=[0.5], nodes=0), "^nodes=0"), (dict(rates=[0.5], nodes=257), "^nodes=257"),
    (dict(rates=[0.5], nodes=3, max_depth=0), "^max_depth=0"),
])
def test_impossible_budgets_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        best_tree(**arguments)


@pytest.mark.parametrize("options", [dict(nodes=0), dict(nodes=257), dict(width=0), dict(branches=True), dict(nodes=2.5)])
def test_a_dynamic_tree_out_of_range_is_refused(options):
    with pytest.raises(ValueError, match=r"^DynamicTree\("):
        DynamicTree(**options)
