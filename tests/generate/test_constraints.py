"""Constraints are asked about texts that the target can write: none that they have ruled out, none that has ended."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PrefixConstrainedLogitsProcessor

from hf_specdec.drafts import (
    CascadeDraft, HorizontalCascadeDraft, MixtureDraft, ModelDraft, ModelTreeDraft, NGramRecyclingDraft, PromptLookupDraft, RecyclingDraft, UniformDraft,
)
from tests.helpers import VOCAB, KnowingTreeDraft, ScriptedDraft, generated, perturbed, plain, prompts, repetitive, speculate, tiny_llama

ROWS = repetitive(13) + prompts(2, 7, seed=2)
ANSWER = [5, 9, 2, 7]
EOS = 3


def trie(row, ids):
    """Only one answer, then the end: what comes after any other token is not defined, as in most constraints."""
    written = ids.tolist()[len(ROWS[row]):]
    return [(*ANSWER, EOS)[len(written)]] if written == ANSWER[: len(written)] else []


class Grammar(LogitsProcessor):
    """A state per prefix that has been allowed; any other is a KeyError."""

    def __init__(self, length: int):
        self.length, self.states = length, {(): 0}

    def __call__(self, input_ids, scores):
        written = tuple(input_ids[0, self.length:].tolist())
        state = self.states[written]
        allowed = [token for token in range(VOCAB) if token % 3 == state]
        self.states.update({(*written, token): (state + token) % 3 for token in allowed})
        return torch.full_like(scores, -torch.inf).index_copy(1, torch.tensor(allowed), scores[:, allowed])


DRAFTS = {
    "lookup": lambda target: None,
    "knowing": lambda target: ScriptedDraft(lambda row: [*ANSWER, EOS, 8, 1]),
    "tree": lambda target: KnowingTreeDraft([[*row, *ANSWER, EOS, 8, 1] for row in ROWS]),
    "model": lambda target: ModelDraft(perturbed(target)),
    "model tree": lambda target: ModelTreeDraft(perturbed(target)),
    "cascade": lambda target: CascadeDraft(perturbed(target), PromptLookupDraft(), 3),
    "recycling": lambda target: NGramRecyclingDraft(),
    "models in a cascade": lambda target: CascadeDraft(perturbed(target, 0.5), ModelDraft(perturbed(target, 0.9)), 2),
    "models one after the other": lambda target: HorizontalCascadeDraft(ModelDraft(perturbed(target, 0.5)), ModelDraft(perturbed(target, 0.9)), 1),
    "a model after any token": lambda target: HorizontalCascadeDraft(UniformDraft(), ModelDraft(perturbed(target)), 1),
    "a cascade after a guess": lambda target: HorizontalCascadeDraft(RecyclingDraft(), CascadeDraft(perturbed(target), ModelDraft(perturbed(target, 0.9))), 2),
    "mixture": lambda target: MixtureDraft([PromptLookupDraft(), ModelDraft(perturbed(target))]),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "seed": 1}], ids=["greedy", "sampled"])
def test_a_constraint_never_sees_a_text_that_it_has_ruled_out_or_that_has_ended(draft, sampled):
    target = tiny_llama(1)
    out = speculate(target, ROWS, DRAFTS[draft](target), 6, max_new_tokens=12, prefix_allowed_tokens_fn=trie, eos_token_id=EOS, **sampled)
    assert generated(out, ROWS) == [[*ANSWER, EOS]] * len(ROWS)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_grammar_with_a_state_per_prefix_gives_plain_generates_text(draft):
    target, rows = tiny_llama(1), repetitive(13)
    expected = plain(target, rows, max_new_tokens=16, logits_processor=LogitsProcessorList([Grammar(13)]))
    out = speculate(target, rows, DRAFTS[draft](target), 6, max_new_tokens=16, logits_processor=LogitsProcessorList([Grammar(13)]))
    assert generated(out, rows) == expected


def next_of(token: int) -> list[int]:
    return [(token * 3 + 1) % VOCAB, (token * 5 + 2) % VOCAB, EOS]


def automaton(prompt: int):
    """Allowed tokens go by the last one, an end is always possible, and nothing is defined behind what cannot be."""

    def allowed(row, ids):
        texts = ids.tolist()
        for last, token in zip(texts[prompt - 1 :], texts[prompt:]):
            if last == EOS or token not in next_of(last):
                raise KeyError(texts[prompt:])
        if len(texts) > prompt and texts[-1] == EOS:
            raise KeyError(texts[prompt:])
        return next_of(texts[-1])

    return allowed


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("draft", DRAFTS)
def test_an_automaton_is_asked_about_its_own_texts_alone(draft):
    target, rows = tiny_llama(3), repetitive(13)
    options = {"eos_token_id": EOS, "prefix_allowed_tokens_fn": automaton(13), "max_new_tokens": 24}
    assert generated(speculate(target, rows, DRAFTS[draft](target), 6, **options), rows) == plain(target, rows, **options)
    for seed in range(4):
        speculate(target, rows, DRAFTS[draft](target), 6, do_sample=True, temperature=2.0, seed=seed, **options)


class OwnConstraint(PrefixConstrainedLogitsProcessor):
    """A subclass with a __call__ of its own, which counts in a batch, too."""

    def __call__(self, input_ids, scores):
        scores = super().__call__(input_ids, scores)
        return scores.index_fill(1, torch.arange(0, VOCAB, 2), -torch.inf)


def test_a_constraint_of_the_callers_own_class_keeps_it_in_a_batch():
    target = tiny_llama(1)
    processors = LogitsProcessorList([OwnConstraint(lambda row, ids: list(range(30)), 1)])
    out = speculate(target, ROWS, None, 4, max_new_tokens=12, logits_processor=processors)
    assert generated(out, ROWS) == plain(target, ROWS, max_new_tokens=12, logits_processor=processors)
    assert all(token % 2 and token < 30 for text in generated(out, ROWS) for token in text)
