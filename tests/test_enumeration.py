"""The acceptance rules, enumerated in float64 on small vocabularies: no sampling, every outcome with its probability.

A rule is used as a black box: `verdict(proposal, law, coins)`. The probability with which it accepts a node is found by bisecting
that node's coin; the law of what is committed is then a finite sum.
"""

import itertools

import pytest
import torch

from hf_specdec import registry
from hf_specdec.law import Law
from hf_specdec.proposal import Proposal
from hf_specdec.tree import Tree
from tests.helpers import FULL

EXACT = 1e-12
ALMOST_ONE = 1 - 2.0**-53
VOCABULARIES = (5, 7, 10)
LENIENCES = (0.9, 0.5, 0.3, 0.1)
pytestmark = pytest.mark.usefixtures("both_ways")
law_of = Law  # `both_ways` puts the laws that are judged on the host in its place


def sampling(lenience: float = 1.0):
    return registry.load(registry.ACCEPTANCE, "speculative_sampling", "acceptance")(lenience)


def greedy(lenience: float = 1.0):
    return registry.load(registry.ACCEPTANCE, "greedy", "acceptance")(lenience)


def random_laws(*shape: int, seed: int = 0, zeros: bool = False) -> torch.Tensor:
    """float64 laws over the last dimension; with `zeros`, some tokens are impossible."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(*shape, generator=generator, dtype=torch.float64) ** 3 + 1e-3
    if zeros:
        weights = weights * (torch.rand(*shape, generator=generator) > 0.35)
        weights[..., 0] += 0.05
    return weights / weights.sum(-1, keepdim=True)


class World:
    """A target whose law depends on the tokens so far: p(. | path) for every path of at most `depth` tokens."""

    def __init__(self, vocab: int, depth: int, seed: int = 0, zeros: bool = False):
        self.vocab = vocab
        self.laws = {
            path: random_laws(vocab, seed=seed * 1000 + sum((token + 1) * (vocab + 1) ** i for i, token in enumerate(path)), zeros=zeros)
            for length in range(depth + 1) for path in itertools.product(range(vocab), repeat=length)
        }

    def law(self, tree: Tree, tokens: torch.Tensor) -> Law:
        """The target's laws at the nodes 0..N of every row of tokens."""
        rows = [[self.laws[tuple(row[step - 1] for step in tree.path(node))] for node in range(len(tree) + 1)] for row in tokens.tolist()]
        return law_of(torch.stack([torch.stack(row) for row in rows]).log())

    def text(self, tokens: tuple[int, ...]) -> float:
        """Probability of a text under the target alone."""
        return float(torch.tensor([self.laws[tokens[:i]][token] for i, token in enumerate(tokens)]).double().prod())


def acceptance_probability(rule, proposal: Proposal, law: Law, coins: torch.Tensor, node: int) -> torch.Tensor:
    """float64 [B]: below which coin `node` is accepted, the other coins as they are; 0 where it is not judged."""
    low, high = torch.zeros(len(coins), dtype=torch.float64), torch.ones(len(coins), dtype=torch.float64)
    for _ in range(56):
        coins = coins.clone()
        coins[:, node - 1] = (low + high) / 2
        accepted = rule.verdict(proposal, law, coins).on_path[:, node]
        low, high = torch.where(accepted, (low + high) / 2, low), torch.where(accepted, high, (low + high) / 2)
    return low


def committed(rule, tree: Tree, world: World, draft_law, tokens: int, point_mass: bool = False) -> dict[tuple[int, ...], float]:
    """Law of the first `tokens` tokens that come out when every node of `tree` is drawn from draft_law(row tokens so far, node), and
    what the round does not decide is drawn by the target."""
    (proposal, weights), out = every_draft(tree, draft_law, point_mass), {}
    add_patterns(out, rule, proposal, world.law(tree, proposal.tokens), weights, world, tokens)
    return out


def every_draft(tree: Tree, draft_law, point_mass: bool = False) -> tuple[Proposal, torch.Tensor]:
    """All that can be drafted when every node of `tree` is drawn from draft_law(row tokens so far, node), a row each, and how likely each row is."""
    drawn = [((), 1.0)]
    for node in range(1, len(tree) + 1):
        drawn = [((*row, x), weight * q) for row, weight in drawn for x, q in enumerate(draft_law(row, node).tolist()) if q > 0]
    probs = torch.stack([torch.stack([draft_law(row[: node - 1], node) for node in range(1, len(tree) + 1)]) for row, _ in drawn])
    proposal = Proposal(tree, torch.tensor([row for row, _ in drawn]), None if point_mass else probs, [len(tree)] * len(drawn))
    return proposal, torch.tensor([weight for _, weight in drawn], dtype=torch.float64)


def add_patterns(out: dict, rule, proposal: Proposal, law: Law, weights: torch.Tensor, world: World, tokens: int, coins=()) -> None:
    """Every way to accept and reject the nodes one after another: coins 0.0 accept what can be accepted, ALMOST_ONE rejects."""
    n = len(proposal.tree)
    full = torch.tensor([[*coins, *[0.0] * (n - len(coins))]], dtype=torch.float64).repeat(len(weights), 1)
    if len(coins) == n:
        add_outcomes(out, rule.verdict(proposal, law, full), proposal.tokens, weights, world, tokens)
        return
    chance = acceptance_probability(rule, proposal, law, full, len(coins) + 1)
    for coin, share in ((0.0, chance), (ALMOST_ONE, 1 - chance)):
        if float((weights * share).sum()) > 0:
            add_patterns(out, rule, proposal, law, weights * share, world, tokens, (*coins, coin))


def add_outcomes(out: dict, verdict, rows: torch.Tensor, weights: torch.Tensor, world: World, tokens: int) -> None:
    following = verdict.next_probs / verdict.next_probs.sum(-1, keepdim=True)
    for row, on_path, law, weight in zip(rows.tolist(), verdict.on_path.tolist(), following.tolist(), weights.tolist()):
        if weight < 1e-15:
            continue
        path = tuple(token for token, accepted in zip(row, on_path[1:]) if accepted)
        for token, p in enumerate(law):
            text = (*path, token)[:tokens]
            for rest in itertools.product(range(world.vocab), repeat=tokens - len(text)):
                chance = world.text((*text, *rest)) / world.text(text) if world.text(text) else 0.0
                out[(*text, *rest)] = out.get((*text, *rest), 0.0) + weight * p * chance


def worst_error(out: dict, world: World, tokens: int) -> float:
    texts = itertools.product(range(world.vocab), repeat=tokens)
    return max(abs(out.get(text, 0.0) - world.text(text)) for text in texts)


def excess(out: dict, world: World, lenience: float) -> float:
    """How far a first token is above p(x) / l, at worst."""
    first: dict[int, float] = {}
    for text, weight in out.items():
        first[text[0]] = first.get(text[0], 0.0) + weight
    return max(first.get(x, 0.0) - world.text((x,)) / lenience for x in range(world.vocab))


# --- drafts: (tokens drawn before, node) -> law ---------------------------------------------------------------------------


def independent(vocab: int, seed: int = 7, zeros: bool = False):
    laws = random_laws(16, vocab, seed=seed, zeros=zeros)
    return lambda row, node: laws[(node + sum(row)) % 16]


def uniform(vocab: int):
    return lambda row, node: torch.full((vocab,), 1 / vocab, dtype=torch.float64)


def one_hot(vocab: int, seed: int = 3):
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.randint(vocab, (16,), generator=generator).tolist()
    return lambda row, node: torch.nn.functional.one_hot(torch.tensor(fixed[node]), vocab).double()


def without_replacement(tree: Tree, vocab: int, seed: int = 7):
    laws = random_laws(vocab + 1, vocab, seed=seed)

    def law(row, node):
        parent = tree.parents[node - 1]
        q = laws[row[parent - 1] if parent else vocab].clone()
        for sibling in range(1, node):
            if tree.parents[sibling - 1] == parent:
                q[row[sibling - 1]] = 0.0
        return q / q.sum()

    return law


def different_one_hots(tree: Tree, vocab: int):
    return lambda row, node: torch.nn.functional.one_hot(torch.tensor((2 * tree.ranks[node - 1] + tree.depths[node]) % vocab), vocab).double()


# --- chains ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [False, True], ids=["everything possible", "some tokens impossible"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("make", [independent, uniform, one_hot])
def test_one_drafted_token_leaves_the_targets_law(make, vocab, zeros):
    world = World(vocab, 1, seed=vocab, zeros=zeros)
    out = committed(sampling(), Tree.chain(1), world, make(vocab), 1, point_mass=make is one_hot)
    assert worst_error(out, world, 1) < EXACT


@pytest.mark.parametrize("make", [independent, uniform, one_hot])
def test_a_chain_leaves_the_targets_joint_law(make):
    world = World(5, 2, seed=2, zeros=True)
    out = committed(sampling(), Tree.chain(2), world, make(5), 2, point_mass=make is one_hot)
    assert worst_error(out, world, 2) < EXACT


def test_a_chain_of_three_leaves_the_joint_law_of_three_tokens():
    world = World(4, 3, seed=2)
    assert worst_error(committed(sampling(), Tree.chain(3), world, independent(4), 3), world, 3) < EXACT


def test_a_draft_that_cannot_say_what_the_target_wants_leaves_the_targets_law():
    world = World(6, 1, seed=4)
    assert worst_error(committed(sampling(), Tree.chain(1), world, independent(6, zeros=True), 1), world, 1) < EXACT


def test_a_one_hot_law_given_as_probs_is_the_same_as_a_point_mass():
    world, draft = World(5, 2, seed=6), one_hot(5)
    as_probs, as_point = (committed(sampling(), Tree.chain(2), world, draft, 2, point_mass=point) for point in (False, True))
    assert max(abs(as_probs[text] - as_point.get(text, 0.0)) for text in as_probs) < EXACT


# --- trees ----------------------------------------------------------------------------------------------------------------

TREES = {"two siblings": (0, 0), "three siblings": (0, 0, 0), "a fork": (0, 1, 1), "two branches": (0, 0, 1, 2), "late sibling": (0, 1, 0)}
trees = pytest.mark.parametrize("parents", TREES.values(), ids=TREES)


@trees
def test_a_tree_of_draws_with_replacement_leaves_the_targets_joint_law(parents):
    vocab = 4 if FULL or len(parents) < 4 else 3
    tree, world = Tree(parents), World(vocab, 2, seed=1, zeros=True)
    assert worst_error(committed(sampling(), tree, world, independent(vocab), 2), world, 2) < EXACT


@trees
def test_a_tree_of_draws_without_replacement_leaves_the_targets_joint_law(parents):
    tree, world = Tree(parents), World(4, 2, seed=1)
    assert worst_error(committed(sampling(), tree, world, without_replacement(tree, 4), 2), world, 2) < EXACT


@trees
def test_a_tree_of_point_masses_leaves_the_targets_joint_law(parents):
    tree, world = Tree(parents), World(5, 2, seed=5, zeros=True)
    assert worst_error(committed(sampling(), tree, world, different_one_hots(tree, 5), 2, point_mass=True), world, 2) < EXACT


def test_siblings_scored_as_draws_although_they_are_fixed_do_not_leave_the_targets_law():
    tree, world = Tree((0, 0)), World(5, 1, seed=5)
    fixed, claimed = different_one_hots(tree, 5), independent(5)
    proposal = Proposal(tree, torch.tensor([[int(fixed((), node).argmax()) for node in (1, 2)]]), torch.stack([claimed((), 1), claimed((), 2)])[None], [2])
    out: dict = {}
    add_patterns(out, sampling(), proposal, world.law(tree, proposal.tokens), torch.ones(1, dtype=torch.float64), world, 1)
    assert worst_error(out, world, 1) > 0.01


# --- lenience ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lenience", LENIENCES)
@pytest.mark.parametrize("make", [independent, uniform, one_hot])
def test_lenience_commits_no_token_above_p_over_l(make, lenience):
    for seed in range(4):
        world = World(6, 1, seed=seed, zeros=seed % 2 == 1)
        out = committed(sampling(lenience), Tree.chain(1), world, make(6, seed=seed) if make is not uniform else make(6), 1, point_mass=make is one_hot)
        assert excess(out, world, lenience) < EXACT
        assert sum(out.values()) == pytest.approx(1, abs=EXACT)


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("lenience", LENIENCES)
@trees
def test_lenience_keeps_its_bound_on_trees(parents, lenience):
    tree, world = Tree(parents), World(3, 2, seed=3)
    for draft, point_mass in ((independent(3), False), (without_replacement(tree, 3), False), (different_one_hots(tree, 3), True)):
        assert excess(committed(sampling(lenience), tree, world, draft, 2, point_mass), world, lenience) < EXACT


def test_lenience_raises_the_acceptance_probability_to_min_1_p_over_lq():
    p, q, l = random_laws(6, seed=1), random_laws(6, seed=2), 0.5
    proposal = Proposal.chain(torch.arange(6)[:, None], q.expand(6, 1, 6))
    law = law_of(p.log().expand(6, 2, 6))
    chance = acceptance_probability(sampling(l), proposal, law, torch.zeros(6, 1, dtype=torch.float64), 1)
    assert torch.allclose(chance, (p / (l * q)).clamp(max=1), atol=EXACT, rtol=0)


@pytest.mark.parametrize("lenience", [1.0, *LENIENCES])
def test_greedy_lenience_accepts_x_where_p_is_at_least_l_times_the_largest(lenience):
    p = random_laws(40, 8, seed=4)
    tokens = torch.arange(8).repeat(40)[:, None]
    laws = law_of(p.repeat_interleave(8, 0)[:, None].expand(-1, 2, -1).log())
    accepted = greedy(lenience).verdict(Proposal.chain(tokens), laws, None).on_path[:, 1].view(40, 8)
    clear = (p / p.max(-1, keepdim=True).values - lenience).abs() > 1e-9
    assert torch.equal(accepted[clear], (p >= lenience * p.max(-1, keepdim=True).values)[clear])
    assert accepted.gather(1, p.argmax(-1, keepdim=True)).all()


def test_only_lenience_1_is_lossless():
    assert [rule(l).lossless for rule in (sampling, greedy) for l in (1.0, 0.99, 0.3)] == [True, False, False] * 2


# --- edges ------------------------------------------------------------------------------------------------------------------


def chain_verdict(p: torch.Tensor, q: torch.Tensor | None, x: int, coin: float):
    """The rule on one drafted token x; p and q of any dtype."""
    probs = None if q is None else q[None, None]
    law = law_of(p.log()[None, None].expand(1, 2, -1))
    return sampling().verdict(Proposal.chain(torch.tensor([[x]]), probs), law, torch.tensor([[coin]], dtype=torch.float64))


def test_a_coin_of_0_does_not_accept_what_the_target_never_says():
    p, q = torch.tensor([0.0, 0.4, 0.6]), torch.tensor([0.5, 0.25, 0.25])
    assert not chain_verdict(p, q, 0, 0.0).on_path[0, 1]
    assert not chain_verdict(p, None, 0, 0.0).on_path[0, 1]


def test_what_neither_says_is_rejected_and_makes_no_nan():
    verdict = chain_verdict(torch.tensor([0.0, 0.4, 0.6]), torch.tensor([0.0, 0.5, 0.5]), 0, 0.0)
    assert not verdict.on_path[0, 1] and verdict.next_probs.isfinite().all() and verdict.next_probs[0, 0] == 0


def test_what_is_certain_is_accepted_at_the_largest_coin():
    assert chain_verdict(torch.tensor([0.0, 1.0]), None, 1, ALMOST_ONE).on_path[0, 1]


def test_a_residual_that_sums_to_zero_falls_back_to_p():
    q = torch.tensor([0.3, 0.2, 0.5])
    p = q.clone()
    p[0] = torch.nextafter(p[0], torch.tensor(0.0))
    verdict = chain_verdict(p, q, 0, ALMOST_ONE)
    assert not verdict.on_path[0, 1]
    assert torch.allclose(verdict.next_probs[0] / verdict.next_probs.sum(), p, atol=1e-6)


@pytest.mark.parametrize("q", [torch.tensor([0.3, 0.2, 0.5]), None], ids=["drawn", "point mass"])
def test_a_residual_that_sums_to_zero_falls_back_to_p_in_a_tree_too(q):
    p = torch.tensor([0.3, 0.2, 0.5]) if q is not None else torch.tensor([1.0, 0.0, 0.0])
    below = p.clone()
    below[0] = torch.nextafter(below[0], torch.tensor(0.0))
    proposal = Proposal(Tree((0, 0)), torch.tensor([[0, 0]]), None if q is None else q[None, None].expand(1, 2, -1), [2])
    verdict = sampling().verdict(proposal, law_of(below.log()[None, None].expand(1, 3, -1)), torch.full((1, 2), ALMOST_ONE, dtype=torch.float64))
    assert verdict.next_probs.isfinite().all() and float(verdict.next_probs.sum()) > 0


def test_the_residual_never_holds_a_rejected_point_mass():
    verdict = chain_verdict(torch.tensor([0.7, 0.2, 0.1]), None, 0, 0.9)
    assert torch.allclose(verdict.next_probs[0] / verdict.next_probs.sum(), torch.tensor([0.0, 2 / 3, 1 / 3]))


def test_padding_of_a_short_row_is_not_judged_and_the_next_token_comes_from_p():
    world, tree = World(4, 2, seed=1), Tree.chain(2)
    tokens = torch.tensor([[1, 2]])
    proposal = Proposal(tree, tokens, None, [1])
    verdict = sampling().verdict(proposal, world.law(tree, tokens), torch.zeros(1, 2, dtype=torch.float64))
    assert verdict.on_path.tolist() == [[True, True, False]]
    assert torch.allclose(verdict.next_probs[0] / verdict.next_probs.sum(), world.laws[(1,)], atol=EXACT)


@pytest.mark.parametrize("rule", [sampling(), greedy()], ids=["sampling", "greedy"])
def test_an_empty_proposal_leaves_the_targets_own_law(rule):
    world = World(5, 0, seed=1)
    law = law_of(world.laws[()].log()[None, None])
    verdict = rule.verdict(Proposal.from_lists([[]], "cpu"), law, torch.zeros(1, 0, dtype=torch.float64) if rule.samples else None)
    assert verdict.on_path.tolist() == [[True]]
    own = verdict.next_probs[0]
    assert own == world.laws[()].argmax() if not rule.samples else torch.allclose(own, world.laws[()])
