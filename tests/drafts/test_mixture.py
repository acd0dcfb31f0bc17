"""The mixture: one tree of all drafts, or the draft that earns most; and drafts inside that are not asked in every round."""

import pytest
import torch

from hf_specdec.budget import Budget
from hf_specdec.distributions import Sampler
from hf_specdec.drafts import Context, Draft, MixtureDraft, ModelDraft, NGramRecyclingDraft, PromptLookupDraft, SuffixAutomatonDraft
from hf_specdec.drafts import choosing, merging
from hf_specdec.drafts.feature_tree import FeatureTreeDraft
from hf_specdec.drafts.features import fused, hidden_states
from hf_specdec.drafts.growth import Branches, Grower, likeliest, together
from hf_specdec.proposal import Proposal
from hf_specdec.round_cost import RoundCost
from hf_specdec.schedule import Rates
from hf_specdec.drafts.medusa import MedusaDraft
from hf_specdec.training import build_drafter
from hf_specdec.tree import Tree
from hf_specdec.tree import MAX_NODES
from hf_specdec.tree_shapes import DynamicTree
from tests.conformance import law
from tests.conformance.builders import medusa_heads
from tests.helpers import (
    FULL, VOCAB, ScriptedDraft, TreeDraft, contrary, generated, perturbed, plain, prompts, repetitive, small_vocabulary_llama, speculate, tiny_llama,
)


class Guessing(Draft):
    """Guesses the same tokens everywhere, with these rates."""

    trusted = True

    def __init__(self, rates: dict[int, float]):
        self.rates = rates

    def place(self, b):
        return ()

    def guesses(self, place):
        return [(token, token, rate) for token, rate in self.rates.items()]

    def step(self, place, token):
        return (*place, token)


def test_the_likeliest_paths_come_first():
    tree = Grower().tree([(Guessing({7: 0.5, 8: 0.3}), ())], 5, VOCAB)
    assert tree.nodes == [(0, 7), (0, 8), (1, 7), (1, 8), (2, 7)]  # .5 .3 .25 .15 .15


def test_a_proposal_with_chances_is_merged_by_them():
    whole = merging._Whole()
    tokens, tree = torch.tensor([[7, 8, 9]]), Tree((0, 0, 1))
    whole.show(Proposal(tree, tokens, None, [3], chances=torch.tensor([[0.2, 0.6, 0.9]])), [0], [[0.7, 0.7]])
    grown = Grower().tree([(whole, (0, 0, 0))], 3, VOCAB)
    assert grown.nodes == [(0, 8), (0, 7), (2, 9)]  # .6, .2, .2 * .9
    whole.show(Proposal(tree, tokens, None, [3]), [0], [[0.7, 0.7]])
    assert Grower().tree([(whole, (0, 0, 0))], 1, VOCAB).nodes == [(0, 7)]


def test_of_a_proposal_without_chances_the_first_guesses_are_as_likely_as_measured_before():
    whole = merging._Whole()
    whole.show(Proposal(Tree((0, 0, 1)), torch.tensor([[7, 8, 9]]), None, [3]), [2], [[0.1, 0.9]])
    grown = Grower().tree([(whole, (0, 0, 0)), (Guessing({5: 0.3}), ())], 4, VOCAB)
    assert grown.nodes[:2] == [(0, 5), (0, 7)] and grown.chances[1] == pytest.approx(0.1)  # a first token seldom right ...
    assert grown.chances[grown.nodes.index((2, 9))] == pytest.approx(0.09)  # ... and after it another, mostly right


def test_lookups_that_lead_nowhere_are_no_longer_merged_after_some_tries():
    """Acceptance measured for matches of one length says something about those of another, in the tree, too."""
    rates = Rates(PromptLookupDraft().prior)
    before = rates(1)[0]
    for _ in range(8):
        rates.update(2, 5, 0)
    whole = merging._Whole()
    whole.show(Proposal(Tree((0,)), torch.tensor([[7]]), None, [1]), [1], [rates(1)])
    assert Grower().tree([(whole, (0, 0, 0))], 1, VOCAB).chances[0] < before / 2


class States(FeatureTreeDraft):
    """Notes what it has of every row at the beginning of every round."""

    def evidence(self, context):
        self.log.extend((list(row), self.states[b, : self.known[b]].clone()) for b, row in enumerate(context.rows) if self.known[b])
        return super().evidence(context)


@pytest.mark.parametrize("mode", ["merge", "choose"])
@pytest.mark.parametrize("rows", [repetitive(12), [*repetitive(12), *repetitive(9)]], ids=["alone", "two"])
def test_a_draft_inside_sees_the_states_of_the_whole_pass(mode, rows):
    """What a feature drafter keeps of committed tokens is what the target computes of them, whichever draft proposed them."""
    target = tiny_llama(3)
    draft = States(build_drafter(target, [1], None, (0, 1, 2)), target, DynamicTree(nodes=6, width=2, branches=2))
    draft.log = []
    mixture = MixtureDraft([PromptLookupDraft(), draft, MedusaDraft(medusa_heads(target), target)], mode=mode, tokens=3)
    out = speculate(target, rows, mixture, 12, max_new_tokens=20)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=20) and sum(map(len, out.speculation.rounds)) < 20 * len(rows)
    assert len(draft.log) > 5
    for tokens, states in draft.log:
        with torch.no_grad(), hidden_states(target, (0, 1, 2)) as seen:
            target(input_ids=torch.tensor([tokens]))
        assert len(states) == len(tokens) - 1
        torch.testing.assert_close(states, fused(draft.model, seen())[0, :-1], atol=1e-4, rtol=1e-4)


def test_a_token_that_two_drafts_guess_is_there_once_and_as_likely_as_the_best_says():
    sources = [(Guessing({7: 0.2, 8: 0.3}), ()), (Guessing({7: 0.9}), ())]
    tree = Grower().tree(sources, 2, VOCAB)
    assert tree.nodes == [(0, 7), (1, 7)] and len(tree.kinds[0]) == 2


def test_guesses_that_are_wrong_become_unlikely_and_right_ones_likely():
    draft, grower = Guessing({7: 0.5, 8: 0.3}), Grower()
    for _ in range(10):
        grower.learn(grower.tree([(draft, ())], 2, VOCAB), [8])
    assert grower.tree([(draft, ())], 1, VOCAB).nodes == [(0, 8)]


def test_tokens_that_the_target_lacks_are_not_proposed():
    assert Grower().tree([(Guessing({70: 0.9, 8: 0.3}), ())], 1, VOCAB).nodes == [(0, 8)]


def test_trees_of_different_shapes_keep_their_tokens_their_order_and_their_laws():
    one, two = torch.eye(VOCAB)[9] * 0.5 + 0.5 / VOCAB, torch.full((VOCAB,), 1 / VOCAB)
    rows = [Branches([(0, 5), (0, 9), (1, 6)], [None, one, None]), Branches([(0, 3), (1, 4), (2, 5)], [two, two, None]), Branches([])]
    found = together(rows, VOCAB, "cpu", "some")
    found.check(3, VOCAB, "some")
    for b, row in enumerate(rows):
        own = {found.tree.ranks[node - 1]: node for node in range(1, found.sizes[b] + 1) if found.tree.parents[node - 1] == 0}
        firsts = [i for i, (parent, _) in enumerate(row.nodes) if parent == 0]
        for rank, i in enumerate(firsts):
            node = own[rank]
            expected = row.laws[i] if row.laws[i] is not None else torch.eye(VOCAB)[row.nodes[i][1]]
            assert found.tokens[b, node - 1] == row.nodes[i][1] and torch.equal(found.probs[b, node - 1], expected)
    assert found.sizes[2] == 0


def test_trees_of_many_rows_stay_within_what_a_pass_takes():
    rows = [Branches([(0, 5 + i) for i in range(b + 1)] + [(b + 1, 9 + i) for i in range(8)]) for b in range(40)]
    found = together(rows, VOCAB, "cpu", "some")
    found.check(len(rows), VOCAB, "some")
    assert len(found.tree) == MAX_NODES and all(found.tokens[b, found.tree.parents.index(0)] == 5 for b in range(len(rows)))


def test_the_best_of_a_row_of_logits_are_found_in_groups():
    logits = torch.randn(2, 5, 960, generator=torch.Generator().manual_seed(0))
    for vocab in (960, 959, 865, 61):  # in groups, with a rest or without, and too few for groups
        assert torch.equal(likeliest(logits[..., :vocab], 8), logits[..., :vocab].topk(8).indices)


def test_a_mixture_accepts_at_least_what_a_draft_that_knows_the_text_gives():
    target, rows = tiny_llama(3), repetitive(12) + prompts(7, seed=4)
    texts = [row + text for row, text in zip(rows, plain(target, rows, max_new_tokens=24))]
    knowing, ignorant = ScriptedDraft.knowing(texts), ModelDraft(contrary(target))
    for mode in ("merge", "choose"):
        out = speculate(target, rows, MixtureDraft([ignorant, knowing], mode), 8, max_new_tokens=24)
        assert generated(out, rows) == [text[len(row):] for text, row in zip(texts, rows)]
        assert out.speculation.block_efficiency > 2


@pytest.mark.share(1 / 6)
@pytest.mark.parametrize("mode", ["merge", "choose"])
@pytest.mark.parametrize("drafts", [
    lambda target: [PromptLookupDraft(), ModelDraft(perturbed(target, 0.1)), ModelDraft(perturbed(target, 0.5))],
    lambda target: [TreeDraft(), SuffixAutomatonDraft(), NGramRecyclingDraft(read_prompt=True)],
    lambda target: [TreeDraft(replacement=True), ModelDraft(perturbed(target, 0.1))],
], ids=["lookup and two models", "a drawn tree and guesses", "two that draw"])
def test_drawn_branches_among_guesses_leave_the_law_what_it_is(mode, drafts):
    target = small_vocabulary_llama(2, law.VOCAB)
    rows = [[1, 2, 3, 1, 2], [4, 3]]
    found, traces = law.counts(target, rows, MixtureDraft(drafts(target), mode, tokens=3), 50_000 if FULL else 1_200, 3, 7)
    assert law.worst_p_value(found, [law.joint(target, row, 3) for row in rows], 3) > law.THRESHOLD
    assert sum(trace.accepted for trace in traces) > 250


@pytest.mark.parametrize("k", [1, 2])
def test_a_tree_of_fewer_nodes_than_drafts_is_filled_all_the_same(k):
    target, rows = small_vocabulary_llama(2, law.VOCAB), [[1, 2, 3, 1, 2], [4, 3]]
    draft = MixtureDraft([PromptLookupDraft(), ModelDraft(perturbed(target, 0.1)), ModelDraft(perturbed(target, 0.5))])
    for options in ({}, {"do_sample": True, "seed": 3}):
        trace = speculate(target, rows, draft, k, max_new_tokens=20, **options).speculation
        assert 0 < trace.proposed <= k * sum(len(entries) for entries in trace.rounds) and trace.accepted > 0


def test_guesses_that_depend_on_what_was_drawn_are_rejected(monkeypatch):
    """The control: a guess is left out where the model has drawn the same token."""
    joined = merging._joined

    def looking(grown, tails):
        drawn = {token for tail in tails for parent, token in tail.nodes if parent == 0}
        grown.nodes = [] if grown.nodes and grown.nodes[0][1] in drawn else grown.nodes[:1]
        return joined(grown, tails)

    def p_value():
        draft = MixtureDraft([PromptLookupDraft(), ModelDraft(perturbed(target, 0.3))], tokens=3)
        found, _ = law.counts(target, [[1, 2, 3, 1, 2]], draft, 50_000 if FULL else 3_000, 2, 4)
        return law.worst_p_value(found, [law.joint(target, [1, 2, 3, 1, 2], 2)], 2)

    target = small_vocabulary_llama(2, law.VOCAB)
    assert p_value() > law.THRESHOLD
    monkeypatch.setattr(merging, "_joined", looking)
    assert p_value() < law.THRESHOLD


def test_the_one_that_earns_more_is_chosen_and_a_model_that_was_not_asked_goes_on_where_the_text_is():
    target, rows = tiny_llama(3), repetitive(12, 9)
    texts = [row + text for row, text in zip(rows, plain(target, rows, max_new_tokens=40))]

    class Sometimes(ScriptedDraft):
        """Knows the text, but has nothing to say for every other dozen of tokens."""

        cost_ratio = 0.0

        def evidence(self, context):
            return [0 if len(row) // 12 % 2 else -1 for row in context.rows]

        def prior(self, strength):
            return 0.99, 0.99

    draft = MixtureDraft([Sometimes.knowing(texts), ModelDraft(target)], mode="choose")
    out = speculate(target, rows, draft, 4, seed=1, max_new_tokens=40)
    sources = {entry.source for entries in out.speculation.rounds for entry in entries if entry.proposed}
    assert sources == {"scripted", "model"} and out.speculation.acceptance_rate == 1.0
    assert generated(out, rows) == [text[len(row):] for text, row in zip(texts, rows)]


def test_with_a_seed_a_run_repeats_whatever_the_clock_says():
    target, rows = tiny_llama(3), repetitive(12, 9)
    traces = [speculate(target, rows, MixtureDraft([PromptLookupDraft(), ModelDraft(perturbed(target))], "choose"), "auto", seed=3, do_sample=True,
                        max_new_tokens=40).speculation.rounds for _ in range(2)]
    assert traces[0] == traces[1]


def test_every_draft_inside_hears_of_its_own_nodes():
    target, rows = tiny_llama(3), repetitive(12)
    heard = []

    class Listening(ScriptedDraft):
        def propose(self, context, k):
            self.last = super().propose(context, k)
            return self.last

        def commit(self, verdict):
            heard.append((verdict.on_path.shape[1], len(self.last.tree), int(verdict.on_path.sum()) - 1))

    texts = [row + text for row, text in zip(rows, plain(target, rows))]
    speculate(target, rows, MixtureDraft([Listening.knowing(texts, wrong=5), SuffixAutomatonDraft()]), 8)
    assert heard and all(width == n + 1 for width, n, _ in heard) and max(accepted for *_, accepted in heard) > 2


class Priced:
    """Earnings of a draft that is right in row 1 alone; a token more costs a tenth of a step."""

    margin, free, budget = 1.1, [True], Budget(RoundCost())

    def seconds(self, k, asked):
        return 1 + 0.1 * k

    def tokens(self, b, d, strength, most):
        return [1 + 0.9 * k * b for k in range(most + 1)]


@pytest.mark.parametrize(("room", "pays"), [([40, 10], False), ([10, 40], True), ([20, 20], True)])
def test_in_a_batch_a_gain_of_the_row_that_ends_last_counts_most(room, pays):
    merge, choose = object.__new__(merging.Merge), object.__new__(choosing.Choose)
    for way in (merge, choose):
        way.earnings, way.room, way.strengths = Priced(), room, [[0, 0]]
    nodes, rate = merge._size([[0.0, 0.0, 0.0], [0.0, 0.9, 1.8]], 0)
    assert (nodes > 0) == pays == (rate > 1.1)
    assert (choose._worth([(-1, 0), (0, 2)]) / 1.2 > 1.1 * choose._worth([(-1, 0)] * 2)) == pays
    merge.room = room[:1]
    assert merge._size([[0.0, 0.9, 1.8]], 0) == (2, pytest.approx(2.8 / 1.2))  # alone, a token is a token


@pytest.mark.parametrize("rows", [1, 2])
def test_in_a_batch_where_nothing_pays_trees_are_grown_now_and_then(rows, monkeypatch):
    grown, trees = [], merging.Merge._trees
    monkeypatch.setattr(merging.Merge, "_trees", lambda self, k: grown.append(max(k)) or trees(self, k))
    monkeypatch.setattr(merging.Merge, "_size", lambda self, gains, least, *drafting: (0, 1.0))
    out = speculate(tiny_llama(3), repetitive(*range(12, 12 + rows)), MixtureDraft(), "auto", max_new_tokens=40)
    looked = sum(size > 0 for size in grown)
    assert len(out.speculation.rounds) == 40 and out.speculation.proposed == 0
    assert looked > 20 if rows == 1 else 8 <= looked <= 8 + 32 / 4


@pytest.mark.parametrize(("arguments", "error", "words"), [
    (dict(mode="best"), ValueError, "mode="),
    (dict(drafts=[]), ValueError, "drafts: expected a list"),
    (dict(drafts="recycling"), ValueError, "drafts: expected a list"),
    (dict(drafts=PromptLookupDraft()), TypeError, "drafts: expected a list"),
    (dict(drafts=[3]), TypeError, "drafts: expected drafts, got int. Make a model one"),
    (dict(drafts=[PromptLookupDraft]), TypeError, "got the class PromptLookupDraft. Pass an instance"),
    (dict(drafts=["none such"]), ValueError, "drafts='none such'"),
    (dict(tokens=0), ValueError, "tokens=0"),
])
def test_bad_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        MixtureDraft(**arguments)


def test_the_same_draft_twice_is_refused():
    draft = PromptLookupDraft()
    with pytest.raises(ValueError, match="twice"):
        MixtureDraft([draft, draft])


def test_a_draft_inside_that_lies_is_named():
    class Liar(ScriptedDraft):
        name = "liar"

        def propose(self, context: Context, k):
            n = max(k, default=0)
            return Proposal.chain(torch.zeros(len(k), n, dtype=torch.long), torch.full((len(k), n, context.vocab_size), 0.5), list(k))

    target = tiny_llama(3)
    with pytest.raises(ValueError, match="draft 'liar' returned probs whose rows sum to"):
        speculate(target, repetitive(12), MixtureDraft([Liar(lambda row: []), PromptLookupDraft()]), 4)


def test_a_model_inside_with_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocabulary"):
        speculate(tiny_llama(3), repetitive(12), MixtureDraft([ModelDraft(tiny_llama(3, vocab_size=2 * VOCAB)), PromptLookupDraft()]), 4)


def test_greedy_sampler_is_what_stock_decoding_gets():
    draft = MixtureDraft()
    assert draft.get_candidates(torch.tensor([[1, 2, 3, 1, 2]]))[0].tolist()[0][:6] == [1, 2, 3, 1, 2, 3]
    assert Sampler.greedy().do_sample is False


# --- tokens after a chosen chain -----------------------------------------------------------------------------------------


class GoingOn(Draft):
    """Costs nothing, never begins; after any chain it guesses what `script(place)` says, where a place is a number of tokens."""

    cost_ratio, trusted = 0.0, True

    def __init__(self, script):
        self.script = script

    def start(self, context):
        self.context = context

    def evidence(self, context):
        return [-1] * len(context.rows)

    def propose(self, context, k):
        return Proposal.from_lists([[] for _ in k], context.device, self.name)

    def place(self, b):
        return b, len(self.context.rows[b])

    def guesses(self, place):
        return [(self.script(*place), "next", 0.9)]

    def step(self, place, token):
        return place[0], place[1] + 1


def costly(draft: Draft) -> Draft:
    draft.cost_ratio, draft.trusted = 0.5, True
    return draft


@pytest.mark.parametrize("right", [True, False])
def test_drafts_of_no_cost_go_on_where_a_chosen_chain_ends(right):
    target, rows = tiny_llama(3), prompts(9)
    text = rows[0] + plain(target, rows, max_new_tokens=40)[0]
    model = costly(ScriptedDraft.knowing([text]))
    other = GoingOn(lambda b, at: (text[at] + (not right)) % VOCAB if at < len(text) else 0)
    out = speculate(target, rows, MixtureDraft([model, other], "choose"), "auto", seed=1, max_new_tokens=40)
    assert generated(out, rows) == [text[len(rows[0]):]]
    rounds = [entry for entries in out.speculation.rounds for entry in entries]
    alone = speculate(target, rows, MixtureDraft([costly(ScriptedDraft.knowing([text]))], "choose"), "auto", seed=1, max_new_tokens=40)
    if right:
        assert len(rounds) < len(alone.speculation.rounds) and out.speculation.acceptance_rate == 1.0
    else:  # guesses that are never right are made less and less
        rejected = [len(entry.rejected) for entry in rounds]
        assert max(rejected[:4]) > 8 > 2 * max(rejected[-6:])


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("honest", [True, False])
def test_the_law_holds_where_guesses_go_on_after_drawn_tokens(honest, generous, monkeypatch):
    """One row would take a call per sample: the rows of a batch have room for guesses here as if another row had drafted more. The negative
    control says of its guesses that they were drawn uniformly, and must be caught."""
    target, rows = small_vocabulary_llama(2, law.VOCAB), [[1, 2, 3, 1, 2], [4, 3]]
    with_tail, tails = choosing.Choose._with_tail, []

    def wider(self, b, d, found, width):
        made = with_tail(self, b, d, found, width + 3)
        guesses = len(made.nodes) - len(found.nodes)
        tails.append(guesses)
        if guesses and not honest:
            made.laws[-guesses:] = [torch.full((law.VOCAB,), 1 / law.VOCAB)] * guesses
        return made

    monkeypatch.setattr(choosing.Choose, "_with_tail", wider)

    class OneToken(ModelDraft):
        def propose(self, context, k):
            return super().propose(context, [min(own, 1) for own in k])

        def relative_cost(self, target):
            return 0.05

    draft = MixtureDraft([OneToken(perturbed(target, 0.3)), GoingOn(lambda b, at: at % law.VOCAB)], "choose")
    found, _ = law.counts(target, rows, draft, 50_000 if FULL else 3_000, 3, "auto")
    p_value = law.worst_p_value(found, [law.joint(target, row, 3) for row in rows], 3)
    assert sum(size > 0 for size in tails) > 2_000
    assert (p_value > law.THRESHOLD) == honest, p_value
