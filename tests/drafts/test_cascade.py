"""Drafts for drafts: the middle model's law is q, late positions keep their own, and a liar inside is named."""

import pytest
import torch

from hf_specdec.drafts import CascadeDraft, Context, HorizontalCascadeDraft, ModelDraft, PromptLookupDraft, RecyclingDraft, SuffixAutomatonDraft
from hf_specdec.drafts import NGramRecyclingDraft
from hf_specdec.proposal import Proposal
from tests.conformance import law
from tests.helpers import ScriptedDraft, contrary, generated, perturbed, plain, prompts, repetitive, small_vocabulary_llama, speculate, tiny_llama

ROWS = repetitive(12) + prompts(5, seed=4)


def proposals(draft):
    """Every proposal that `draft` makes from now on, with the rows it was made for."""
    seen, propose = [], draft.propose

    def watched(context, k):
        rows = [list(row) for row in context.rows]
        seen.append((rows, propose(context, k)))
        return seen[-1][1]

    draft.propose = watched
    return seen


@pytest.mark.parametrize("inner", [
    lambda middle: ModelDraft(perturbed(middle, 0.2)), lambda middle: ModelDraft(contrary(middle)), lambda middle: PromptLookupDraft(),
    lambda middle: SuffixAutomatonDraft(branches=3), lambda middle: NGramRecyclingDraft(), lambda middle: RecyclingDraft(branches=3),
], ids=["model", "contrary model", "lookup", "automaton tree", "n-gram recycling", "recycling tree"])
def test_greedy_the_cascade_proposes_what_the_middle_model_alone_would(inner):
    target = tiny_llama(3)
    middle = perturbed(target, 0.1)
    draft = CascadeDraft(middle, inner(middle), tokens=3)
    seen = proposals(draft)
    out = speculate(target, ROWS, draft, 5)
    assert generated(out, ROWS) == plain(target, ROWS)
    for rows, proposal in seen:
        for row, tokens, n in zip(rows, proposal.tokens.tolist(), proposal.sizes):
            assert n == 0 or tokens[:n] == plain(middle, [row], max_new_tokens=n)[0]


def test_sampled_the_law_that_is_given_is_the_middle_models_own():
    target = small_vocabulary_llama(1, law.VOCAB)
    middle = perturbed(target, 0.5)
    draft = CascadeDraft(middle, ModelDraft(perturbed(target, 1.0)), tokens=2)
    seen = proposals(draft)
    speculate(target, [[1, 2, 3], [4]], draft, 4, do_sample=True, seed=2, max_new_tokens=12)
    for rows, proposal in seen:
        for b, (row, n) in enumerate(zip(rows, proposal.sizes)):
            ids = torch.tensor([row + proposal.tokens[b, :n].tolist()])
            expected = middle(input_ids=ids).logits[0, len(row) - 1 : -1].softmax(-1)
            assert torch.allclose(proposal.probs[b, :n], expected[:n], atol=1e-5)


def test_sampled_what_is_proposed_follows_that_law():
    """Of the proposals themselves: the joint of the first two, whatever the inner draft is."""
    target = small_vocabulary_llama(1, law.VOCAB)
    middle = perturbed(target, 0.5)
    draft = CascadeDraft(middle, ModelDraft(perturbed(target, 1.0)), tokens=2)
    seen, row = proposals(draft), [1, 2, 3, 1]
    speculate(target, [row] * 4_000, draft, 3, do_sample=True, seed=2, max_new_tokens=4)
    found = law.Counter(tuple(tokens[:2]) for tokens in seen[0][1].tokens.tolist())
    assert law.p_value(found, law.joint(middle, row, 2)) > law.THRESHOLD
    assert law.p_value(found, law.joint(target, row, 2)) < law.THRESHOLD


def test_the_middle_model_runs_less_often_than_it_proposes_tokens():
    target = tiny_llama(3)
    draft = CascadeDraft(target, ModelDraft(target), tokens=4)  # everything is accepted at both levels
    out = speculate(target, repetitive(12), draft, 5, max_new_tokens=24)
    assert out.speculation.acceptance_rate == 1.0
    assert draft.cached.calls <= out.speculation.proposed / 2


def test_streams_of_different_levels_and_turns_are_independent():
    from hf_specdec.noise import Noise

    noise, names = Noise([3]), ["draft:1", "draft:0/draft:1", "draft:1/draft:0", "draft:1/accept", "draft:0/draft:1/draft:1", "accept", "next"]
    found = [float(noise.uniform(name, 1)) for name in names]
    assert len(set(found)) == len(names)
    many = torch.stack([noise.uniform(f"draft:{i}/draft:0", 400)[0] for i in range(8)])
    assert (torch.corrcoef(many) - torch.eye(8)).abs().max() < 0.25 and 0.45 < float(many.mean()) < 0.55


# --- horizontal -----------------------------------------------------------------------------------------------------------


def test_the_second_draft_goes_on_where_the_first_one_ends():
    target = tiny_llama(3)
    texts = [row + text for row, text in zip(ROWS, plain(target, ROWS, max_new_tokens=40))]
    draft = HorizontalCascadeDraft(ModelDraft(target), ScriptedDraft.knowing(texts), after=2)
    out = speculate(target, ROWS, draft, 5, max_new_tokens=24)
    assert out.speculation.acceptance_rate == 1.0
    assert draft.first.calls < out.speculation.proposed
    assert {size for entries in out.speculation.rounds for size in [entries[0].proposed]} >= {5}


def test_where_the_first_draft_has_nothing_to_say_the_second_begins():
    target, row = tiny_llama(3), prompts(9, seed=11)
    texts = [own + text for own, text in zip(row, plain(target, row, max_new_tokens=40))]
    out = speculate(target, row, HorizontalCascadeDraft(PromptLookupDraft(min_match=8), ScriptedDraft.knowing(texts)), 5)
    assert out.speculation.accepted > 10


def test_trees_are_refused_by_name():
    with pytest.raises(ValueError, match="then: draft 'suffix_automaton' proposes trees"):
        speculate(tiny_llama(3), ROWS, HorizontalCascadeDraft(PromptLookupDraft(), SuffixAutomatonDraft(branches=3)), 7, max_new_tokens=40)


# --- liars ------------------------------------------------------------------------------------------------------------------


class Liar(ScriptedDraft):
    """Probabilities that do not sum to 1."""

    name = "liar"

    def __init__(self):
        super().__init__(lambda row: [])

    def propose(self, context: Context, k):
        n = max(k, default=0)
        return Proposal.chain(torch.zeros(len(k), n, dtype=torch.long), torch.full((len(k), n, context.vocab_size), 0.5), list(k))


@pytest.mark.parametrize("make", [
    lambda target: CascadeDraft(perturbed(target), Liar()), lambda target: HorizontalCascadeDraft(Liar(), PromptLookupDraft()),
    lambda target: HorizontalCascadeDraft(PromptLookupDraft(), Liar()),
    lambda target: CascadeDraft(perturbed(target), CascadeDraft(perturbed(target), Liar())),
], ids=["inner", "first", "then", "two levels down"])
def test_a_draft_inside_that_lies_is_named(make):
    target = tiny_llama(3)
    with pytest.raises(ValueError, match="draft 'liar' returned probs whose rows sum to"):
        speculate(target, repetitive(12), make(target), 6, do_sample=True, seed=1)


@pytest.mark.parametrize("make", [
    lambda: CascadeDraft(tiny_llama(), tiny_llama()), lambda: HorizontalCascadeDraft(PromptLookupDraft(), tiny_llama()),
])
def test_a_model_where_a_draft_belongs_is_named(make):
    with pytest.raises(TypeError, match="expected a draft"):
        make()


def test_bad_numbers_are_named():
    with pytest.raises(ValueError, match="tokens=0"):
        CascadeDraft(tiny_llama(), PromptLookupDraft(), tokens=0)
    with pytest.raises(ValueError, match="after=0"):
        HorizontalCascadeDraft(PromptLookupDraft(), PromptLookupDraft(), after=0)
    same = PromptLookupDraft()
    with pytest.raises(ValueError, match="same object"):
        HorizontalCascadeDraft(same, same)
