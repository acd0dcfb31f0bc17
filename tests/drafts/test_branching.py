"""Which drafts may propose trees, and that what takes none says so before any work."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.drafts import (
    CascadeDraft, LookaheadDraft, MixtureDraft, ModelTreeDraft, NGramRecyclingDraft, OnlineDraft, PromptLookupDraft, RecyclingDraft, RetrievalDraft,
    SuffixAutomatonDraft,
)
from hf_specdec.tree_shapes import DynamicTree
from tests import encoder_decoders
from tests.architectures import FAMILIES
from tests.conformance.builders import VARIANTS, corpus, make
from tests.helpers import VOCAB, build, enabled, generated, padded, perturbed, plain, repetitive, speculate, tiny_llama

OURS = [name for name in VARIANTS if not name.startswith("tree")]  # those are the tests' own
ROW = repetitive(16)


def retrieval(**options):
    return RetrievalDraft.from_tokens(corpus(VOCAB), VOCAB, min_match=1, **options)


def chains(draft):
    """`draft`, and a list in which it notes whether what it proposes are chains."""
    seen, propose = [], draft.propose

    def watched(context, k):
        proposal = propose(context, k)
        seen.append(proposal.tree.is_chain)
        return proposal

    draft.propose = watched
    return draft, seen


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_proposes_trees_where_it_says_that_it_may_and_only_there(name, do_sample):
    target = tiny_llama(3)
    draft, seen = chains(make(name, target, VARIANTS))
    for rows in (ROW, repetitive(16, 9)):
        speculate(target, rows, draft, 8, seed=1, do_sample=do_sample, max_new_tokens=24)
    assert draft.may_branch is not all(seen)


@pytest.mark.parametrize(("draft", "may"), [
    (lambda model: RecyclingDraft(), False), (lambda model: MixtureDraft(mode="choose"), True), (lambda model: MixtureDraft(branches=1), False),
    (lambda model: MixtureDraft(["suffix_automaton", "prompt_lookup"], mode="choose"), False), (lambda model: MixtureDraft(["prompt_lookup"]), True),
    (lambda model: MixtureDraft([ModelTreeDraft(model), "suffix_automaton"], branches=1), True),
    (lambda model: MixtureDraft([NGramRecyclingDraft(branches=1), "suffix_automaton"], branches=1), False),
    (lambda model: MixtureDraft([CascadeDraft(model, RecyclingDraft(branches=4))], mode="choose"), False),
    (lambda model: MixtureDraft([MixtureDraft([RecyclingDraft(branches=4)], mode="choose")], mode="choose"), True),
    (lambda model: ModelTreeDraft(model, (1, 1, 1)), False), (lambda model: ModelTreeDraft(model, DynamicTree(8, 2, 1)), False),
    (lambda model: ModelTreeDraft(model, DynamicTree(8, 1, 2)), True), (lambda model: OnlineDraft(ModelTreeDraft(model), tiny_llama(3)), True),
], ids=range(13))
def test_a_draft_with_drafts_inside_branches_as_they_do_and_as_its_mode_lets_them(draft, may):
    assert draft(perturbed(tiny_llama(3))).may_branch is may


def bloom():
    return next(family for family in FAMILIES if family.name == "BLOOM").model("eager")


TREES = {
    "recycling": lambda: RecyclingDraft(branches=4), "ngram_recycling": NGramRecyclingDraft, "mixture": MixtureDraft, "lookahead": LookaheadDraft,
    "suffix_automaton": lambda: SuffixAutomatonDraft(branches=3), "retrieval": retrieval, "model_tree": lambda: ModelTreeDraft(tiny_llama(3)),
    "mixture of one that branches": lambda: MixtureDraft([RecyclingDraft(branches=2), "prompt_lookup"], mode="choose"),
    "online": lambda: OnlineDraft(ModelTreeDraft(tiny_llama(3)), bloom()),
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_draft_on_a_target_that_makes_its_own_masks_is_refused_before_any_work(name):
    target, draft, said = enabled(bloom()), TREES[name](), []
    hook = target.register_forward_pre_hook(lambda module, inputs: said.append("a forward"))
    words = rf"^target: BloomForCausalLM makes its attention mask .*Propose chains.* The draft '{draft.name}' proposes trees"
    with pytest.raises(ValueError, match=words):
        target.generate(**padded(ROW), assistant_model=draft, speculative=True, max_new_tokens=8, streamer=lambda row, tokens, drafted: said.append(tokens))
    hook.remove()
    assert not said


@pytest.mark.parametrize("draft", [
    lambda: MixtureDraft(["suffix_automaton", "prompt_lookup"], mode="choose"), lambda: MixtureDraft(["suffix_automaton", RecyclingDraft()], branches=1),
    lambda: NGramRecyclingDraft(branches=1), lambda: retrieval(branches=1), lambda: ModelTreeDraft(tiny_llama(3), (1, 1)),
], ids=["mixture that chooses", "mixture of chains", "ngram_recycling", "retrieval", "chain of a tree draft"])
def test_a_draft_that_cannot_branch_works_on_a_target_that_makes_its_own_masks(draft):
    target = bloom()
    for k in (4, "auto"):
        assert generated(speculate(target, ROW, draft(), k), ROW) == plain(target, ROW)


def test_a_tree_inside_a_cascade_is_refused_for_the_middle_model_that_takes_none():
    target = tiny_llama(3, vocab_size=bloom().config.vocab_size)
    cascade = CascadeDraft(bloom(), RecyclingDraft(branches=4))
    with pytest.raises(ValueError, match="^model: BloomForCausalLM .* The draft 'recycling' proposes trees"):
        speculate(target, ROW, cascade)
    assert generated(speculate(target, ROW, CascadeDraft(bloom(), PromptLookupDraft())), ROW) == plain(target, ROW)
    assert generated(speculate(target, ROW, CascadeDraft(perturbed(target), RecyclingDraft(branches=4))), ROW) == plain(target, ROW)


def llama_4(floor: int):
    family = next(family for family in FAMILIES if family.name == "Llama 4 (text, chunked)")
    return build("llama4_text", **{**family.settings, "attn_temperature_tuning": True, "floor_scale": floor, "attn_scale": 1.0})


def test_trees_near_the_positions_that_a_llama_4_counts_itself_are_refused_before_any_work():
    target, forwards = llama_4(270), []
    hook = target.register_forward_pre_hook(lambda module, inputs: forwards.append(1))
    with pytest.raises(ValueError, match="target: Llama4ForCausalLM .*attn_temperature_tuning.*chains"):
        speculate(target, ROW, RecyclingDraft(branches=4))
    assert not forwards
    hook.remove()
    assert generated(speculate(target, ROW, RecyclingDraft()), ROW) == plain(target, ROW)
    far = llama_4(400)
    assert generated(speculate(far, ROW, RecyclingDraft(branches=4)), ROW) == plain(far, ROW)


def test_an_encoder_decoder_takes_chains_alone():
    target = enabled(encoder_decoders.FAMILIES[0].model())
    with pytest.raises(ValueError, match="^target: .* The draft 'recycling' proposes trees"):
        target.generate(input_ids=torch.tensor(ROW), speculative=True, assistant_model=RecyclingDraft(branches=4), max_new_tokens=8)
