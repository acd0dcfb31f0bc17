"""Trees drafted by a model: what they are made of, that the model's own cache follows them, and what is refused."""

import copy

import pytest
import torch

from hf_specdec.cached_model import CachedModel
from hf_specdec.distributions import Sampler
from hf_specdec.drafts import Context, ModelDraft, ModelTreeDraft
from hf_specdec.tree import Tree
from hf_specdec.tree_shapes import DynamicTree, best_tree
from tests.conformance import law
from tests.helpers import FULL, build, generated, perturbed, plain, prompts, repetitive, small_vocabulary_llama, speculate, tiny_llama

ROWS = repetitive(12) + prompts(5, 9, seed=4)


class Watching(ModelTreeDraft):
    """Keeps its proposals, and what was in its cache."""

    def start(self, context):
        super().start(context)
        self.proposals = []

    def propose(self, context, k):
        proposal = super().propose(context, k)
        self.proposals.append(([list(row) for row in context.rows], proposal))
        return proposal


@torch.no_grad()
def fresh_scores(model, row: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("tree", [(3, 2, 2), Tree((0, 0, 1, 1, 2, 0, 3)), DynamicTree(9, 3, 3)], ids=["branches", "tree", "dynamic"])
def test_every_node_holds_the_models_own_best_tokens_after_its_path(tree):
    target = tiny_llama(3)
    draft = perturbed(target, 0.2)
    watching = Watching(draft, tree)
    out = speculate(target, ROWS, watching, 3, max_new_tokens=12)
    assert generated(out, ROWS) == plain(target, ROWS, max_new_tokens=12)
    for rows, proposal in watching.proposals:
        for b, row in enumerate(rows):
            for node in range(1, proposal.sizes[b] + 1):
                parent, rank = proposal.tree.parents[node - 1], proposal.tree.ranks[node - 1]
                path = [int(proposal.tokens[b, step - 1]) for step in proposal.tree.path(parent)]
                best = fresh_scores(draft, row + path).topk(rank + 1).indices
                assert int(proposal.tokens[b, node - 1]) == int(best[rank])


@pytest.mark.parametrize("siblings", ["distinct", "independent"])
def test_the_laws_that_are_reported_are_those_drawn_from(siblings):
    target = tiny_llama(3)
    draft = perturbed(target, 0.2)
    watching = Watching(draft, (3, 2), siblings)
    speculate(target, ROWS, watching, 3, max_new_tokens=6, do_sample=True, top_k=0, seed=1)
    for rows, proposal in [(rows, proposal) for rows, proposal in watching.proposals if len(proposal.tree)]:
        assert torch.allclose(proposal.probs[proposal.valid].sum(-1), torch.tensor(1.0), atol=1e-5)
        for b, row in enumerate(rows):
            for node in range(1, proposal.sizes[b] + 1):
                parent = proposal.tree.parents[node - 1]
                path = [int(proposal.tokens[b, step - 1]) for step in proposal.tree.path(parent)]
                q = fresh_scores(draft, row + path).softmax(-1)
                if siblings == "distinct":
                    for other in range(1, node):
                        if proposal.tree.parents[other - 1] == parent:
                            q[int(proposal.tokens[b, other - 1])] = 0.0
                assert torch.allclose(proposal.probs[b, node - 1], q / q.sum(), atol=1e-5)


def test_the_surest_nodes_of_all_levels_are_proposed():
    target, row = tiny_llama(3), ROWS[0]
    draft = perturbed(target, 0.2)
    watching = Watching(draft, DynamicTree(nodes=6, width=61, branches=61))
    speculate(target, [row], watching, 2, max_new_tokens=3)
    first = fresh_scores(draft, row).softmax(-1)
    second = torch.stack([first[x] * fresh_scores(draft, row + [x]).softmax(-1) for x in range(61)])
    found = watching.proposals[0][1]
    confidence = []
    for node in range(1, 7):
        path = [int(found.tokens[0, step - 1]) for step in found.tree.path(node)]
        confidence.append(float(first[path[0]] if len(path) == 1 else second[path[0], path[1]]))
    best = torch.cat([first, second.flatten()]).topk(6).values
    assert torch.allclose(torch.tensor(sorted(confidence, reverse=True)), best, atol=1e-5)


def test_the_chances_of_a_dynamic_tree_are_the_models_where_the_parent_is():
    """What a mixture sizes its tree by: q of every node given its parent, row by row, also where the shape is the mean over the rows."""
    target, rows = tiny_llama(3), ROWS[:2]
    draft = perturbed(target, 0.2)
    watching = Watching(draft, DynamicTree(nodes=7, width=3, branches=3))
    speculate(target, rows, watching, 3, max_new_tokens=8)
    checked = 0
    for committed, found in [(rows, found) for rows, found in watching.proposals if len(found.tree)]:
        assert found.chances.shape == found.tokens.shape
        for b, row in enumerate(committed):
            for node, parent in enumerate(found.tree.parents[: found.sizes[b]], start=1):
                path = [int(found.tokens[b, step - 1]) for step in found.tree.path(parent)]
                law = fresh_scores(draft, row + path).softmax(-1)
                assert float(found.chances[b, node - 1]) == pytest.approx(float(law[found.tokens[b, node - 1]]), abs=1e-4)
                checked += parent > 0
    assert checked > 5


@pytest.mark.parametrize(("rows", "tree", "tokens", "chances"), [
    # q(5) = .6, q(6) = .3 first; after 5: q(7) = .5, q(8) = .4; after 6: q(7) = .9: the four surest paths are 5, 57, 6 (.3, as sure) and 67
    ([[1]], (0, 0, 1, 2), [[5, 6, 7, 7]], [[0.6, 0.3, 0.5, 0.9]]),
    # and of a second row, which says 7 and 8 of .5 and .4 first, then 9 (.8) after 7 and 9 (.2) after 8: ranks by the mean over the rows
    ([[1], [2]], (0, 0, 1, 2), [[5, 6, 7, 7], [7, 8, 9, 9]], [[0.6, 0.3, 0.5, 0.9], [0.5, 0.4, 0.8, 0.2]]),
])
def test_chances_by_hand(rows, tree, tokens, chances):
    says = {(1,): {5: 0.6, 6: 0.3, 3: 0.1}, (1, 5): {7: 0.5, 8: 0.4, 3: 0.1}, (1, 6): {7: 0.9, 8: 0.06, 3: 0.04},
            (2,): {7: 0.5, 8: 0.4, 3: 0.1}, (2, 7): {9: 0.8, 1: 0.1, 3: 0.1}, (2, 8): {9: 0.2, 1: 0.1, 3: 0.09, **{token: 0.061 for token in range(20, 30)}}}

    class Saying(ModelTreeDraft):
        """Its model says what is written above."""

        def _logits_after(self, paths):
            law = torch.full((len(paths), len(paths[0]), 61), 1e-9)
            for b, own in enumerate(paths):
                for i, path in enumerate(own):
                    for token, chance in says[path].items():
                        law[b, i, token] = chance
            return law.log()

        def _scores(self, context, tokens, k, step):
            return self._logits_after([[tuple(row)] for row in context.rows])

        def _grow(self, new, tree, first, context):
            self.drawn = new if first == 1 else torch.cat([self.drawn, new], dim=1)
            places = range(first, first + new.shape[1])
            return self._logits_after([[(*row, *(int(self.drawn[b, step - 1]) for step in tree.path(node))) for node in places]
                                       for b, row in enumerate(context.rows)])

    draft = Saying(tiny_llama(3), DynamicTree(nodes=4, width=2, branches=2))
    context = Context(rows, 64, 61, torch.device("cpu"), Sampler.greedy(), None)
    draft.start(context)
    found = draft.propose(context, [2] * len(rows))
    assert found.tree.parents == tree and found.tokens.tolist() == tokens
    torch.testing.assert_close(found.chances, torch.tensor(chances), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"do_sample": True, "acceptance": "coupled"}], ids=str)
@pytest.mark.parametrize("siblings", [None, "likeliest"])
def test_a_tree_may_have_more_branches_than_the_vocabulary_has_tokens(options, siblings):
    target, rows = small_vocabulary_llama(vocab=2), [[1, 0, 1], [0]]
    out = speculate(target, rows, ModelTreeDraft(perturbed(target), (3, 2, 1), siblings=siblings), 6, max_new_tokens=9, **options)
    assert out.speculation.accepted and list(map(len, generated(out, rows))) == [9, 9]
    assert options or generated(out, rows) == plain(target, rows, max_new_tokens=9)


def test_the_model_passes_once_per_level_and_reuses_the_accepted_path():
    target = tiny_llama(3)
    draft = ModelTreeDraft(copy.deepcopy(target), (2, 2, 1))
    out = speculate(target, ROWS[:1], draft, 3, max_new_tokens=21)
    assert out.speculation.block_efficiency > 3.4  # 4 tokens a round; the last round has no room for them
    assert out.speculation.draft_calls <= 3 * out.speculation.target_calls


def test_a_pass_over_some_nodes_sees_the_earlier_nodes_and_no_others():
    model, tree = tiny_llama(3), Tree((0, 0, 1, 1, 2, 4))
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 1, 2, 3, 4, 5]])
    rows = prompts(7, 4, seed=1)
    cached = CachedModel(model, 64)
    with torch.no_grad():
        cached.score(rows)
        cached.commit([1, 1])
        logits = torch.cat([cached.grow(tokens[:, :2], tree, 1), cached.grow(tokens[:, 2:], tree, 3)], dim=1)
        assert cached.lengths == [7, 4]
        for b, row in enumerate(rows):
            for node in range(1, 7):
                path = [int(tokens[b, step - 1]) for step in tree.path(node)]
                assert torch.allclose(logits[b, node - 1], fresh_scores(model, row + path), atol=1e-4)
        on_path = torch.zeros(2, 7, dtype=torch.bool)
        on_path[:, 0] = on_path[0, [1, 4, 6]] = on_path[1, [2, 5]] = True
        cached.adopt([3, 1], tree, on_path)
        assert cached.lengths == [10, 5]
        texts = [rows[0] + [3, 6, 8, 11], rows[1] + [1, 12]]
        again = cached.score(texts)
        for b, text in enumerate(texts):
            assert torch.allclose(again[b, 0], fresh_scores(model, text), atol=1e-4)


def test_a_tree_is_accepted_more_than_a_chain():
    target, rows = tiny_llama(3), ROWS
    draft = perturbed(target, 0.3)
    chain, tree = (speculate(target, rows, made, 3, max_new_tokens=40).speculation.block_efficiency
                   for made in (ModelDraft(draft), ModelTreeDraft(draft, (4, 3, 2))))
    assert tree > chain + 0.1


CASES = {
    "distinct": ((2, 2), "distinct"), "independent": ((3, 1), "independent"), "likeliest": ((2, 2), "likeliest"),
    "dynamic": (DynamicTree(5, 2, 2), None), "more branches than tokens": ((law.VOCAB,), "distinct"),
}


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{}, dict(temperature=0.7, top_k=3)], ids=["plain", "top-k"])
def test_the_first_tokens_follow_the_targets_law(case, options):
    target, rows = small_vocabulary_llama(2, law.VOCAB), [[1, 2, 3, 1, 2], [4, 3]]
    draft = ModelTreeDraft(perturbed(target, 0.3), *CASES[case])
    found, _ = law.counts(target, rows, draft, 50_000 if FULL else 1_500, 3, 2, **options)
    assert law.worst_p_value(found, [law.joint(target, row, 3, **options) for row in rows], 3) > law.THRESHOLD


def test_a_tree_chosen_by_its_draws_would_be_biased(monkeypatch):
    """The negative control: the likeliest tokens said to be draws."""
    target, row = small_vocabulary_llama(2, law.VOCAB), [1, 2, 3, 1, 2]
    draft = ModelTreeDraft(perturbed(target, 0.3), (2, 2), "distinct")
    monkeypatch.setattr("hf_specdec.drafts.model_tree.draw", lambda q, coins: q.argmax(-1))
    found, _ = law.counts(target, [row], draft, 4_000, 3, 2)
    assert law.worst_p_value(found, [law.joint(target, row, 3)], 3) < law.THRESHOLD


def test_a_computed_shape_goes_in_as_it_is():
    target = tiny_llama(3)
    out = speculate(target, ROWS, ModelTreeDraft(perturbed(target), best_tree([0.6, 0.2, 0.1], 12, 5)), 5)
    assert generated(out, ROWS) == plain(target, ROWS) and out.speculation.config["num_assistant_tokens"] == 5


@pytest.mark.parametrize(("arguments", "message"), [
    (((4, 4, 4, 4),), "more than 256 nodes"), ((Tree(()),), "^tree: 0 nodes"), ((Tree.chain(257),), "^tree: 257 nodes"), (("wide",), "^tree='wide'"),
    ((5,), "^tree=5"), (((2, 0),), "^tree="), (((2,), "best"), "^siblings='best' must be one of"), ((DynamicTree(), "distinct"), "^siblings='distinct': a DynamicTree"),
])
def test_impossible_shapes_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        ModelTreeDraft(tiny_llama(), *arguments)


def test_a_model_that_makes_its_own_masks_is_refused():
    bloom = build("bloom", vocab_size=61, hidden_size=32, n_layer=1, n_head=2, attn="eager")
    with pytest.raises(ValueError, match="assistant_model: BloomForCausalLM makes its attention mask"):
        ModelTreeDraft(bloom)


def test_a_rewound_draft_goes_on_from_what_stands():
    target = tiny_llama(3)
    draft = Watching(perturbed(target, 0.2), (2, 2))

    class Rewinding(type(draft)):
        def evidence(self, context):
            self.rewind(context, [max(len(row) - 2, 1) for row in context.rows])
            return super().evidence(context)

    draft.__class__ = Rewinding
    usual = speculate(target, ROWS, ModelTreeDraft(draft.model, (2, 2)), 2, max_new_tokens=12)
    out = speculate(target, ROWS, draft, 2, max_new_tokens=12)
    assert [entries for entries in out.speculation.rounds] == [entries for entries in usual.speculation.rounds]
