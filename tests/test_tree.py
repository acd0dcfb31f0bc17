"""Trees of drafted tokens."""

import pytest
import torch

from hf_specdec.proposal import Proposal
from hf_specdec.tree import Tree


def test_a_chain_is_a_tree_with_one_branch():
    tree = Tree.chain(3)
    assert tree.parents == (0, 1, 2) and tree.is_chain and len(tree) == 3 and tree.depths == (0, 1, 2, 3)


@pytest.mark.parametrize("parents", [(0, 0), (0, 1, 1), (0, 0, 1, 2)])
def test_a_fork_is_no_chain(parents):
    assert not Tree(parents).is_chain


def test_no_drafted_token_is_a_chain_too():
    assert Tree.chain(0).is_chain and len(Tree.chain(0)) == 0 and Tree.chain(0).ancestors.tolist() == [[True]]


def test_depths_ranks_and_paths_of_a_bushy_tree():
    tree = Tree((0, 0, 1, 1, 2, 4))
    assert tree.depths == (0, 1, 1, 2, 2, 2, 3)
    assert tree.ranks == (0, 1, 0, 1, 0, 0)
    assert tree.path(6) == [1, 4, 6] and tree.path(0) == []


def test_children_come_by_rank_and_levels_know_their_widest_node():
    tree = Tree((0, 0, 1, 2, 1, 5))
    assert tree.children.tolist() == [[1, 2], [3, 5], [4, 0], [0, 0], [0, 0], [6, 0], [0, 0]] and tree.widest == (2, 2, 1)
    assert Tree(()).widest == () and Tree.chain(2).children.tolist() == [[1], [2], [0]]


def test_ancestors_are_the_nodes_on_the_path_the_root_and_the_node_itself():
    tree = Tree((0, 0, 1, 1, 2, 4))
    for node in range(7):
        assert set(tree.ancestors[node].nonzero().flatten().tolist()) == {0, node, *tree.path(node)}


@pytest.mark.parametrize("parents", [(1,), (0, 2), (0, -1), (0, 1, 3)])
def test_a_parent_that_does_not_come_before_its_child_is_refused(parents):
    with pytest.raises(ValueError, match="parent must come before its child"):
        Tree(parents)


@pytest.mark.parametrize("parent", [0.5, 0.0, "0", None, float("nan")])
def test_a_parent_that_is_no_number_of_a_node_is_refused(parent):
    with pytest.raises(ValueError, match=r"^Tree\(parents=...\): node 2 has parent .* the number of a node, an int"):
        Tree((0, parent))


def test_the_first_nodes_of_a_tree_are_a_tree():
    tree = Tree((0, 0, 1, 1, 2, 4))
    assert tree.truncate(3) == Tree((0, 0, 1)) and tree.truncate(9) is tree


def test_a_proposal_from_lists_is_padded_and_knows_what_is_meant():
    proposal = Proposal.from_lists([[5, 6, 7], [], [8]], "cpu", "me")
    assert proposal.tokens.tolist() == [[5, 6, 7], [0, 0, 0], [8, 0, 0]] and proposal.sizes == [3, 0, 1]
    assert proposal.valid.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert proposal.probs is None and proposal.source == "me"


def test_empty_rows_make_an_empty_proposal():
    proposal = Proposal.from_lists([[], []], "cpu")
    assert proposal.tokens.shape == (2, 0) and proposal.tokens.dtype == torch.long and proposal.valid.shape == (2, 0)
