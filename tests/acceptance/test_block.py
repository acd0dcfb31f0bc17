"""Block verification: the joint law in float64, and never fewer accepted tokens than one by one."""

import pytest
import torch

from hf_specdec import registry
from hf_specdec.law import Law
from hf_specdec.proposal import Proposal
from hf_specdec.tree import Tree
from tests.acceptance.enumeration import block, token_wise_expectation
from tests.test_enumeration import EXACT, TREES, World, committed, independent, one_hot, sampling, uniform, without_replacement, worst_error

pytestmark = pytest.mark.usefixtures("both_ways")


def rule():
    return registry.load(registry.ACCEPTANCE, "block", "acceptance")()


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("zeros", [False, True], ids=["everything possible", "some tokens impossible"])
@pytest.mark.parametrize("make", [independent, uniform, one_hot])
@pytest.mark.parametrize(("vocab", "n"), [(6, 1), (5, 2), (3, 3)])
def test_a_block_leaves_the_targets_joint_law(make, vocab, n, zeros):
    for seed in range(3):
        world = World(vocab, n, seed=seed, zeros=zeros)
        out, _ = block(rule(), world, make(vocab), n, n, point_mass=make is one_hot)
        assert worst_error(out, world, n) < EXACT


def test_one_token_more_than_the_block_keeps_the_joint_law():
    world = World(3, 3, seed=4)
    assert worst_error(block(rule(), world, independent(3), 2, 3)[0], world, 3) < EXACT


def test_a_draft_that_stops_by_what_it_has_drawn_leaves_the_joint_law():
    world = World(4, 3, seed=2, zeros=True)
    out, _ = block(rule(), world, independent(4), 3, 3, stop=lambda row: row[-1] in (1, 3))
    assert worst_error(out, world, 3) < EXACT


def test_a_draft_that_hides_a_token_it_has_drawn_does_not():
    world, draft = World(4, 2, seed=2), independent(4)
    others = torch.arange(4) != 1
    shown = lambda row, node: draft(row, node) * others / (1 - draft(row, node)[1])  # noqa: E731
    assert worst_error(block(rule(), world, shown, 2, 2)[0], world, 2) < EXACT  # q is the law of what is shown
    assert worst_error(block(Claiming(draft), world, shown, 2, 2)[0], world, 2) > 0.01


class Claiming:
    """The rule, told another q than the tokens were drawn from."""

    samples = True

    def __init__(self, claimed):
        self.claimed = claimed

    def verdict(self, proposal, law, coins):
        rows = proposal.tokens.tolist()
        probs = torch.stack([torch.stack([self.claimed(tuple(row[:i]), i + 1) for i in range(len(row))]) for row in rows])
        return rule().verdict(Proposal(proposal.tree, proposal.tokens, probs, proposal.sizes), law, coins)


@pytest.mark.share(1 / 6)
@pytest.mark.parametrize(("vocab", "n"), [(5, 2), (3, 3), (2, 4)])
def test_a_block_accepts_at_least_as_much_as_token_by_token(vocab, n):
    gains = []
    for seed in range(12):
        world, draft = World(vocab, n, seed=seed, zeros=seed % 3 == 0), independent(vocab, seed=seed + 50)
        gains.append(block(rule(), world, draft, n, 1)[1] - token_wise_expectation(world, draft, n))
    assert min(gains) > -EXACT and max(gains) > 0.01


def test_the_papers_example():
    """Sun et al. 2024, section 3: p = (1/3, 2/3), q = (2/3, 1/3) for two tokens: 10/9 accepted token by token, 11/9 as a block."""
    world = World(2, 2)
    world.laws = {path: torch.tensor([1 / 3, 2 / 3], dtype=torch.float64) for path in world.laws}
    draft = lambda row, node: torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)  # noqa: E731
    assert token_wise_expectation(world, draft, 2) == pytest.approx(10 / 9)
    assert block(rule(), world, draft, 2, 1)[1] == pytest.approx(11 / 9)


@pytest.mark.share(2)
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_a_tree_is_judged_sibling_by_sibling_and_stays_exact(parents):
    tree, world = Tree(parents), World(3, 2, seed=1)
    draft = without_replacement(tree, 3)
    out, other = (committed(way, tree, world, draft, 2) for way in (rule(), sampling()))
    assert worst_error(out, world, 2) < EXACT and all(abs(out[text] - other[text]) < EXACT for text in out)


@pytest.mark.parametrize("q", [torch.tensor([0.0, 0.5, 0.5]), torch.tensor([0.2, 0.4, 0.4]), None], ids=["impossible", "equal", "point mass"])
def test_the_edges_make_no_nan(q):
    p, tokens = torch.tensor([0.2, 0.4, 0.4]), torch.tensor([[0, 1]])
    law = Law(p.log().expand(1, 3, 3))
    for coin in (0.0, 0.5, 1 - 2.0**-53):
        coins = torch.full((1, 2), coin, dtype=torch.float64)
        verdict = rule().verdict(Proposal.chain(tokens, None if q is None else q.expand(1, 2, 3)), law, coins)
        assert verdict.next_probs.isfinite().all() and float(verdict.next_probs.sum()) > 0


def test_lenience_is_refused():
    with pytest.raises(ValueError, match="lenience=0.5 means nothing to the acceptance rule BlockVerification"):
        registry.load(registry.ACCEPTANCE, "block", "acceptance")(0.5)
