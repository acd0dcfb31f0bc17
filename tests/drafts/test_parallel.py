"""The parallel drafter as a draft: what it sees, what it draws from, and what it refuses. Exactness is the conformance battery's."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.drafts.features import hidden_states
from hf_specdec.drafts.parallel import ParallelDraft
from hf_specdec.training.parallel import build

from ..conformance.builders import block_drafter
from ..helpers import Logged, generated, plain, speculate, tiny_llama


class Watched(Logged, ParallelDraft):
    pass


@torch.no_grad()
def expected(target, heads, row) -> torch.Tensor:
    """Logits [K, V] from a forward of its own, with no more states than there are."""
    with hidden_states(target, heads.reads) as seen:
        target(input_ids=torch.tensor([row[:-1]]))
    states = seen()[0, -heads.window:]
    n = len(states)
    first = torch.arange(heads.window).clamp(min=heads.window - n) - (heads.window - n)
    there = torch.arange(heads.window) >= heads.window - n
    return heads.logits(heads(states, torch.tensor(row[-1:]), first[None], there[None]))[0]


@pytest.mark.parametrize("rows", [[[5, 6, 7, 8]], [[5, 6, 7, 8, 9, 10], [11, 12, 13], [3, 4]]], ids=["one", "ragged"])
def test_every_round_reads_the_last_states_and_draws_from_what_it_reports(rows):
    target = tiny_llama(3)
    heads = block_drafter(target)
    draft, checked = Watched(heads, target), 0
    speculate(target, rows, draft, 4, do_sample=True, seed=3, top_k=0, max_new_tokens=16)
    for committed, proposal in draft.log[1:]:
        for b, row in enumerate(committed):
            n = proposal.sizes[b]
            if not n:
                continue
            torch.testing.assert_close(proposal.probs[b, :n], expected(target, heads, row).softmax(-1)[:n], atol=1e-5, rtol=1e-4)
            checked += n
    assert checked > 20 and not target.base_model._forward_hooks


def test_the_places_of_a_block_see_one_another_in_both_directions():
    target = tiny_llama(3)
    heads = block_drafter(target)
    states, roots = torch.randn(1, 3, 64), torch.tensor([5])
    before = heads.predict(states, roots, [3])
    heads.masks.data[3] += 1.0
    changed = (heads.predict(states, roots, [3]) - before).abs().amax(-1)[0]
    assert bool((changed > 1e-4).all())
    heads.masks.data[0] += 1.0
    assert bool(((heads.predict(states, roots, [3]) - before).abs().amax(-1)[0] > changed * 0.1).all())


def test_a_state_that_is_not_there_is_not_seen():
    target = tiny_llama(3)
    heads = block_drafter(target)
    states, roots = torch.randn(1, 3, 64), torch.tensor([5])
    other = states.clone()
    other[:, 0] = 7.0
    torch.testing.assert_close(heads.predict(states, roots, [2]), heads.predict(other, roots, [2]))
    assert not torch.allclose(heads.predict(states, roots, [3]), heads.predict(other, roots, [3]))


def test_a_new_one_says_what_the_target_says_next():
    target = tiny_llama(3)
    heads, states = build(target, 3, 2, (0, 2), 4), torch.randn(2, 4, 64)
    torch.testing.assert_close(heads.predict(states, torch.tensor([3, 4]), [4, 1])[:, 1], target.lm_head(states[:, -1, 32:]))


def test_a_processor_that_allows_none_of_a_pruned_heads_tokens_is_survived():
    target, row = tiny_llama(3), [5, 6, 7]
    draft = ParallelDraft(block_drafter(target, ids=torch.arange(0, 30)), target)
    options = dict(do_sample=True, prefix_allowed_tokens_fn=lambda b, ids: list(range(40, 50)))
    out = speculate(target, [row], draft, 4, seed=1, **options)
    assert all(40 <= token < 50 for token in generated(out, [row])[0])


def test_a_pruned_head_in_greedy_decoding_proposes_its_tokens_only():
    target, ids = tiny_llama(3), torch.arange(1, 61, 3)
    draft = Watched(block_drafter(target, ids=ids), target)
    out = speculate(target, [[5, 6, 7]], draft, 4)
    tokens = torch.cat([proposal.tokens.flatten() for _, proposal in draft.log])
    assert len(tokens) and bool(torch.isin(tokens, ids).all())
    assert generated(out, [[5, 6, 7]]) == plain(target, [[5, 6, 7]])


def test_what_is_no_block_drafter_and_reads_without_the_last_state_are_refused():
    target = tiny_llama(3)
    with pytest.raises(ValueError, match="not BlockDrafter"):
        ParallelDraft(target, target)
    with pytest.raises(ValueError, match="reads="):
        build(target, 4, 1, (0, 1))
