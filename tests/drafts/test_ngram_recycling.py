"""Recycling by context: what is remembered under which tokens, from the prompt's logits, too."""

import pytest
import torch

from hf_specdec.drafts import NGramRecyclingDraft
from hf_specdec.drafts.growth import likeliest
from hf_specdec.drafts.ngram_recycling import Contexts
from tests.helpers import generated, plain, prompts, repetitive, speculate, tiny_llama


def test_the_longest_known_context_counts():
    contexts = Contexts(2, 100)
    lines = torch.tensor([[1, 2], [3, 4], [5, 6]]).int().numpy()
    contexts.put([(9,), (8, 9), (7, 8, 9)], lines)
    assert contexts.find((7, 8, 9)) == (3, [5, 6])
    assert contexts.find((6, 8, 9)) == (2, [5, 6])  # of equal contexts the last one counts
    assert contexts.find((6, 7, 9)) == (1, [5, 6]) and contexts.find((6,)) == (0, [])


def test_tokens_at_the_ends_of_contexts_are_told_apart():
    contexts = Contexts(1, 100)
    contexts.put([(0, 5)], torch.tensor([[1]]).int().numpy())
    assert contexts.find((0, 0, 5))[0] == 2 and contexts.find((1, 5))[0] == 1 and contexts.find((5, 0))[0] == 0


def test_the_oldest_context_makes_room():
    contexts = Contexts(1, 4)
    for token in range(6):
        contexts.put([(token,)], torch.tensor([[token]]).int().numpy())
    assert len(contexts) == 4 and contexts.find((1,))[0] == 0 and contexts.find((5,)) == (1, [5])


@pytest.mark.parametrize("vocab", [49152, 101], ids=["in groups", "whole"])
def test_of_equal_logits_the_first_is_the_likeliest_as_argmax_has_it(vocab):
    logits = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[..., [90, 7, 55]] = 9.0
    found = likeliest(logits, 8)
    assert found[..., :3].tolist() == [[[7, 55, 90]] * 3] * 2 and torch.equal(found[..., 0], logits.argmax(-1))
    assert torch.equal(logits.gather(-1, found), logits.topk(8).values)


def test_many_contexts_grow_the_table():
    contexts = Contexts(1, 5000)
    contexts.put([(token,) for token in range(3000)], torch.arange(3000).int()[:, None].numpy())
    assert all(contexts.find((token,)) == (1, [token]) for token in (0, 1023, 1024, 2999))


@pytest.mark.parametrize("rows", [repetitive(12), prompts(9, 3, 14, seed=4)], ids=["alone", "ragged"])
def test_after_the_prompt_pass_every_context_of_the_prompt_has_what_follows_and_what_the_target_said(rows, monkeypatch):
    target, draft = tiny_llama(3), NGramRecyclingDraft(read_prompt=True)
    held = {}

    def finish():
        held.update({tuple(row[max(end - 3, 0) : end]): draft.contexts.find(tuple(row[max(end - 3, 0) : end])) for row in rows for end in range(3, len(row))})

    monkeypatch.setattr(draft, "finish", finish)
    speculate(target, rows, draft, 4, max_new_tokens=1)
    for row in rows:
        best = target(input_ids=torch.tensor([row])).logits[0].topk(8).indices.tolist()
        for end in range(3, len(row)):
            later = [i for other in rows for i in range(3, len(other) + 1) if other[i - 3 : i] == row[end - 3 : end]]
            if len(later) == 1:
                order, found = held[tuple(row[end - 3 : end])]
                said = [token for token in best[end - 1] if token != row[end]]
                assert (order, found) == (3, [row[end], *said[:7]])


def test_long_prompts_are_read_from_their_end(monkeypatch):
    monkeypatch.setattr("hf_specdec.forward.READ", 5 * 61)
    target, draft, seen = tiny_llama(3), NGramRecyclingDraft(read_prompt=True), []
    read = draft.read
    draft.read = lambda firsts, logits: (seen.append((firsts, logits.shape)), read(firsts, logits))
    row = prompts(12, seed=1)
    assert generated(speculate(target, row, draft, 4), row) == plain(target, row)
    assert seen[0] == ([7], torch.Size([1, 5, 61]))


def test_without_reading_the_prompt_the_target_computes_the_last_logits_alone():
    target, widths = tiny_llama(3), []
    hook = target.register_forward_hook(lambda module, inputs, output: widths.append(output.logits.shape[1]))
    for draft in (NGramRecyclingDraft(read_prompt=True), NGramRecyclingDraft()):
        speculate(target, repetitive(12), draft, 4, max_new_tokens=1)
    hook.remove()
    assert widths == [12, 1]


def test_what_is_remembered_serves_the_next_call():
    target, rows = tiny_llama(3), prompts(9, seed=5)
    draft = NGramRecyclingDraft(remember=True)
    first, second = (speculate(target, rows, draft, 8, max_new_tokens=40).speculation.block_efficiency for _ in range(2))
    assert second > first and len(draft.contexts)
    forgetful = NGramRecyclingDraft()
    speculate(target, rows, forgetful, 8)
    assert not len(forgetful.contexts)


@pytest.mark.parametrize(("arguments", "words"), [(dict(branches=9), "branches=9"), (dict(limit=0), "limit=0")])
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        NGramRecyclingDraft(**arguments)
