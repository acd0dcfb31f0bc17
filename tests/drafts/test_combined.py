"""Drafts made of others: what each draws is its own, what is judged never depends on what was drawn, and none minds where it is."""

import copy

import pytest
import torch
from transformers import GenerationMixin

from hf_specdec.drafts import (
    CascadeDraft, HorizontalCascadeDraft, LookaheadDraft, MixtureDraft, ModelDraft, ModelTreeDraft, NGramDraft, NGramRecyclingDraft, OnlineDraft,
    PromptLookupDraft, RecyclingDraft, RetrievalDraft, SuffixAutomatonDraft, TranslatedDraft, UniformDraft,
)
from hf_specdec.drafts import merging, mixture
from hf_specdec.drafts.base import Context, Draft
from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.drafts.feature_tree import FeatureTreeDraft
from hf_specdec.drafts.medusa import MedusaDraft
from hf_specdec.proposal import Proposal
from hf_specdec.tree import Tree
from tests.conformance import law
from tests.conformance.builders import feature_drafter, medusa_heads
from tests.helpers import (
    FULL, VOCAB, build, generated, perturbed, plain, prompts, repetitive, small_vocabulary_llama, speculate, tiny_llama, word_tokenizer,
)

ROW = [1, 2, 3, 1, 2]
N = 50_000 if FULL else 1_200


def far(target, seed: int, by: float = 0.5) -> ModelDraft:
    """A draft that is often wrong, so that a wrong law shows."""
    return ModelDraft(perturbed(target, by, seed))


COMPOSED = {
    "two models, merged": (lambda t: MixtureDraft([far(t, 1), far(t, 5)]), 2),
    "two uniform ones, merged": (lambda t: MixtureDraft([UniformDraft(), UniformDraft()]), 4),
    "a horizontal cascade in a horizontal one": (lambda t: HorizontalCascadeDraft(HorizontalCascadeDraft(far(t, 1, 0.3), far(t, 5, 0.3), 1), far(t, 6, 0.3), 2), 3),
    "a vertical cascade in a horizontal one": (
        lambda t: HorizontalCascadeDraft(CascadeDraft(perturbed(t, 0.2, 1), far(t, 5, 0.25), 2), far(t, 6, 0.2), 2), 4),
    "two vertical cascades, merged": (
        lambda t: MixtureDraft([CascadeDraft(perturbed(t, 0.5, 1), far(t, 2, 0.6), 2), CascadeDraft(perturbed(t, 0.5, 5), far(t, 6, 0.6), 2)]), 4),
}


def p_value(target, row, draft, k, n: int = N, tokens: int = 3, **options) -> float:
    found, traces = law.counts(target, [row], draft, n, tokens, k, **options)
    assert sum(trace.accepted for trace in traces) > n / 20
    return law.worst_p_value(found, [law.joint(target, row, tokens)], tokens)


@pytest.mark.parametrize("name", COMPOSED)
def test_drafts_of_one_call_draw_independently(name):
    target = small_vocabulary_llama(2, law.VOCAB)
    make, k = COMPOSED[name]
    assert p_value(target, ROW, make(target), k) > law.THRESHOLD


def test_shared_random_numbers_are_rejected(monkeypatch):
    """The control: without streams of their own, drafts of one call draw with the same numbers."""
    monkeypatch.setattr(Context, "of", lambda self, part: self)
    target = small_vocabulary_llama(2, law.VOCAB)
    make, k = COMPOSED["a horizontal cascade in a horizontal one"]
    assert p_value(target, ROW, make(target), k, 5_000) < law.THRESHOLD


def drawing_and_guessing(target, row) -> tuple[NGramDraft, RetrievalDraft]:
    """A table that draws one token or nine, by which token it begins with, and a store that guesses others."""
    first = law.marginal(law.joint(target, row, 1), 1)
    on, late, one, two, dead, three = sorted(range(law.VOCAB), key=lambda token: -first[(token,)])
    table = NGramDraft.from_tokens([[1, 2, dead]] * 4 + [[1, 2, on, *([on, one] * 4)]] * 4, order=3, vocab_size=law.VOCAB, sample=True)
    return table, RetrievalDraft.from_tokens([[1, 2, token] for token in (one, two, three)] * 3 + [[1, 2, late]], vocab_size=law.VOCAB)


@pytest.mark.parametrize("mode, k", [("choose", 4), ("choose", "auto"), ("merge", 5)])
def test_how_much_was_drawn_does_not_decide_what_is_judged(mode, k, generous):
    target, row = small_vocabulary_llama(2, law.VOCAB, spread=0.25), [5, 0, 3, 1, 2]
    assert p_value(target, row, MixtureDraft(drawing_and_guessing(target, row), mode), k, tokens=2) > law.THRESHOLD


def test_a_draft_that_stops_by_its_confidence_does_not_decide_how_many_guesses_are_judged():
    target, row = small_vocabulary_llama(2, law.VOCAB, spread=0.25), [5, 0, 3, 1, 2]
    first = law.marginal(law.joint(target, row, 1), 1)
    likely = sorted(range(law.VOCAB), key=lambda token: -first[(token,)])
    store = RetrievalDraft.from_tokens([[1, 2, token] for token in likely[1:4]] * 3, vocab_size=law.VOCAB)
    options = {"speculative": {"draft_stop": "confidence", "draft_confidence": 0.4}}
    assert p_value(target, row, MixtureDraft([far(target, 1, 0.3), store]), 5, **options) > law.THRESHOLD


def test_counting_what_was_drawn_is_rejected(monkeypatch):
    """The control: as many guesses as what was drawn leaves room for."""
    asked = merging.Merge._ask
    monkeypatch.setattr(merging.Merge, "_ask", lambda self, wanted: [(d, drawn, drawn.sizes) for d, drawn, _ in asked(self, wanted)])
    target, row = small_vocabulary_llama(2, law.VOCAB, spread=0.25), [5, 0, 3, 1, 2]
    assert p_value(target, row, MixtureDraft(drawing_and_guessing(target, row)), 5, 3_000 if FULL else 1_500, tokens=2) < law.THRESHOLD


class Star(Draft):
    """A draft of somebody's own: guesses for the first token alone."""

    name, cost_ratio = "star", 0.0

    def __init__(self, tokens: list[int], at: int):
        self.tokens, self.at = tokens, at

    def start(self, context):
        self.context = context

    def place(self, b):
        return len(self.context.rows[b]) == self.at or None

    def guesses(self, place):
        return [(token, None, 0.5 - 0.01 * i) for i, token in enumerate(self.tokens)]

    def step(self, place, token):
        return None

    def rewind(self, context, lengths):
        pass

    def propose(self, context, k):
        return Proposal.from_lists([self.tokens[:1][:n] for n in k], context.device, self.name)


@pytest.mark.parametrize("seed", range(6))
def test_a_mixture_in_a_mixture_counts_as_what_was_asked_of_it(seed):
    """Its tree is as large as what its parts have drawn; the guesses beside it are the same ones all the same."""
    target, row = small_vocabulary_llama(2, 8, spread=0.25), [5, 0, 3, 1, 2]
    table = NGramDraft.from_tokens([[1, 2, 0]] * 4 + [[1, 2, 6, *([6, 3] * 4)]] * 4, order=3, vocab_size=8, sample=True)
    inner = MixtureDraft([table, RetrievalDraft.from_tokens([[1, 2, 2]] * 3, vocab_size=8)])
    seen, together = [], mixture.together
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "together", lambda rows, *rest: seen.append(rows) or together(rows, *rest))
        speculate(target, [row], MixtureDraft([Star([2, 1, 5, 7, 3, 4, 6], 5), inner]), 8, seed=seed, do_sample=True, max_new_tokens=20)
    guesses = [token for (parent, token), law_of in zip(seen[1][0].nodes, seen[1][0].laws) if parent == 0 and law_of is None]
    assert guesses == [2, 1, 5, 7]  # of eight nodes four are the inner mixture's, whatever it has drawn


@pytest.mark.parametrize("k", [6, "auto"])
def test_a_mixture_of_one_branch_proposes_chains_while_sampling(k, generous, monkeypatch):
    target, row = small_vocabulary_llama(2, law.VOCAB), [1, 2, 3, 1, 2]
    shapes, propose = [], MixtureDraft.propose
    monkeypatch.setattr(MixtureDraft, "propose", lambda self, context, k: shapes.append(propose(self, context, k)) or shapes[-1])
    draft = MixtureDraft([PromptLookupDraft(), far(target, 1)], branches=1)
    found, _ = law.counts(target, [row], draft, N, 3, k)
    assert law.worst_p_value(found, [law.joint(target, row, 3)], 3) > law.THRESHOLD
    assert all(shape.tree.is_chain for shape in shapes) and any(len(shape.tree) > 1 for shape in shapes)


@pytest.mark.parametrize("how", ["merge", "choose"])
def test_two_drafts_over_one_feature_drafter_propose_what_two_copies_do(how):
    target = tiny_llama(3)
    drafter = feature_drafter(target)

    def traced(*drafters):
        first, second = (FeatureDraft(own, target) for own in drafters)
        return speculate(target, repetitive(12), MixtureDraft([first, HorizontalCascadeDraft(second, PromptLookupDraft())], how), 4)

    shared, apart = traced(drafter, drafter), traced(drafter, copy.deepcopy(drafter))
    assert shared.sequences.tolist() == apart.sequences.tolist()
    assert how == "choose" or shared.speculation.rounds == apart.speculation.rounds  # which is chosen goes by the clock
    assert not any(module._forward_hooks or module._forward_pre_hooks for model in (target, drafter) for module in model.modules())


# --- a draft need not know where it is -------------------------------------------------------------------------------------

RAGGED = [*repetitive(12), *prompts(7, seed=4), *repetitive(9, seed=3), *prompts(1, seed=8)]


def same_text(target, rows, draft, k, **options) -> bool:
    return generated(speculate(target, rows, draft, k, max_new_tokens=20, **options), rows) == plain(target, rows, max_new_tokens=20, **options)


@pytest.mark.parametrize("mode", ["merge", "choose"])
@pytest.mark.parametrize("k", [4, "auto"])
def test_lookahead_finds_its_window_in_whatever_tree_is_judged(mode, k):
    target = tiny_llama(3)
    for drafts in ([LookaheadDraft()], [PromptLookupDraft(), LookaheadDraft()]):
        assert same_text(target, RAGGED, MixtureDraft(drafts, mode), k)


def test_lookahead_learns_as_much_beside_other_rows_as_alone():
    target, rows = tiny_llama(3), [*repetitive(12), *prompts(7, seed=4)]
    alone, both = (speculate(target, some, LookaheadDraft(), 12, max_new_tokens=40).speculation for some in (rows[:1], rows))
    accepted = [sum(entry.accepted for entries in trace.rounds for entry in entries if entry.row == 0) for trace in (alone, both)]
    assert accepted[1] >= accepted[0] - 2 > 0


@pytest.mark.parametrize("inside", [
    lambda middle: MedusaDraft(medusa_heads(middle), middle),
    lambda middle: FeatureDraft(feature_drafter(middle), middle),
    lambda middle: FeatureTreeDraft(feature_drafter(middle), middle, (4, 2, 1), "independent"),
], ids=["medusa", "feature", "feature tree"])
def test_drafts_that_read_states_work_for_a_middle_model_while_rows_end(inside):
    target = tiny_llama(3)
    middle = perturbed(target, 0.08)
    eos = plain(target, RAGGED[:1], max_new_tokens=20)[0][6]
    for options in ({}, {"eos_token_id": int(eos)}):
        assert same_text(target, RAGGED, CascadeDraft(middle, inside(middle), 3), 5, **options)


@pytest.mark.parametrize("longest", [30, 20])
def test_a_row_longer_than_the_drafts_context_stops_the_draft_and_nothing_else(longest):
    target, rows = tiny_llama(3), [prompts(longest, seed=1)[0], prompts(6, seed=2)[0]]
    short = build("gpt2", 1, vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=24)
    one, other = word_tokenizer(list(range(VOCAB))), word_tokenizer([0] + list(range(VOCAB - 1, 0, -1)))
    for draft in (ModelTreeDraft(short), CascadeDraft(short, PromptLookupDraft()), CascadeDraft(perturbed(target, 0.1), CascadeDraft(short, PromptLookupDraft()), 4),
                  TranslatedDraft(short, one, other), ModelTreeDraft(short, Tree((0, 0, 1, 1, 3)))):
        for k in (1, 5):
            assert same_text(target, rows, draft, k)


def test_a_learning_draft_is_merged_like_the_one_inside_it():
    target, rows = tiny_llama(3), prompts(7, seed=4)
    draft = OnlineDraft(ModelDraft(perturbed(target, 0.02)), target, every=3)
    trace = speculate(target, rows, MixtureDraft([PromptLookupDraft(), draft]), 6, max_new_tokens=24).speculation
    assert draft.steps >= 1 and trace.draft_calls > 0 and trace.accepted > 0


def test_a_draft_learns_while_the_call_is_under_inference_mode():
    target, rows = tiny_llama(3), repetitive(12)
    draft = OnlineDraft(ModelDraft(perturbed(target, 0.3)), target, every=2)
    expected = plain(target, rows, max_new_tokens=40)
    with torch.inference_mode():
        out = speculate(target, rows, draft, 4, max_new_tokens=40)
        made_inside = perturbed(target, 0.3)
    assert generated(out, rows) == expected and draft.steps > 1
    with pytest.raises(ValueError, match="inference_mode.*outside"):
        OnlineDraft(ModelDraft(made_inside), target)


@pytest.mark.parametrize("make", [
    lambda target: MixtureDraft([MedusaDraft(medusa_heads(target), target), PromptLookupDraft()]),
    lambda target: MixtureDraft([FeatureDraft(feature_drafter(target), target), PromptLookupDraft()], "choose"),
    lambda target: HorizontalCascadeDraft(PromptLookupDraft(), FeatureDraft(feature_drafter(target), target)),
    lambda target: HorizontalCascadeDraft(ModelTreeDraft(perturbed(target)), PromptLookupDraft()),
], ids=["medusa, merged", "feature, chosen", "feature in a cascade", "tree in a cascade"])
def test_stock_decoding_gets_chains_and_leaves_no_hooks(make, monkeypatch):
    target, row = tiny_llama(3), repetitive(12)[0]
    draft, ids = make(target), torch.tensor([row])
    monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", lambda self, *args, **kwargs: draft)
    for _ in range(2):
        out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0, prompt_lookup_num_tokens=3)
        assert out[0, len(row):].tolist() == plain(target, [row], max_new_tokens=24)[0]
        draft.finish()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.modules())


def test_rows_may_leave_before_a_middle_model_has_run():
    target, rows = tiny_llama(3), prompts(12, 12, seed=4)
    middle = tiny_llama(4, max_position_embeddings=8)  # the prompts are longer than its context
    eos = int(plain(target, rows)[0][3])
    for inside in (RecyclingDraft(), NGramRecyclingDraft(), SuffixAutomatonDraft(), LookaheadDraft(), MixtureDraft([RecyclingDraft(), PromptLookupDraft()]),
                   MedusaDraft(medusa_heads(middle), middle), FeatureDraft(feature_drafter(middle), middle)):
        assert same_text(target, rows, CascadeDraft(middle, inside), 5, eos_token_id=eos)


def test_k_sequential_selection_judges_the_siblings_that_a_row_has_not_those_of_its_neighbours():
    target, row = small_vocabulary_llama(2, law.VOCAB), [1, 2, 3, 1, 2]
    model = perturbed(target, 0.4)
    for seed in range(0, 40, 4):
        draft = MixtureDraft([ModelTreeDraft(model, (3, 2), siblings="independent"), PromptLookupDraft()], "choose")
        speculate(target, [row] * 4, draft, 6, seed=[seed, seed + 1, seed + 2, seed + 3], do_sample=True, max_new_tokens=8, acceptance="spectr")
    draft = MixtureDraft([ModelTreeDraft(model, (3, 2), siblings="independent"), PromptLookupDraft()], "choose")
    assert p_value(target, row, draft, 6, acceptance="spectr") > law.THRESHOLD
