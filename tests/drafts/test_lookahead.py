"""Lookahead: the window is the Jacobi iteration of the target itself, and its trajectory fills the pool."""

import pytest
import torch

from hf_specdec.drafts import LookaheadDraft
from tests.helpers import generated, plain, prompts, repetitive, speculate, tiny_llama


def test_the_window_is_the_jacobi_iteration():
    """Every iterate is what the target says after the row and the iterate before it."""
    target, rows, draft = tiny_llama(3), prompts(9, seed=2), LookaheadDraft(window=4, ngram=3)
    seen, observe = [], draft.observe

    def watched(proposal, logits):
        row, state = list(draft.context.rows[0]), draft.rows[0]
        guessed = draft._guessed(state, row)[: len(state.window)]
        observe(proposal, logits)
        seen.append((row, guessed, dict(state.iterates[-1])))

    draft.observe = watched
    out = speculate(target, rows, draft, 12)
    assert generated(out, rows) == plain(target, rows)
    assert max(len(guessed) for _, guessed, _ in seen) == 4
    for row, guessed, iterate in seen:
        said = target(input_ids=torch.tensor([row + guessed])).logits[0, len(row) - 1 :].argmax(-1).tolist()
        assert iterate == {len(row) + i: token for i, token in enumerate(said)}


def test_the_pool_holds_what_successive_iterates_had_at_successive_positions():
    draft = LookaheadDraft(window=3, ngram=3, candidates=2)
    draft.start(type("Context", (), {"rows": [[1]]})())
    state = draft.rows[0]
    for iterate in ({1: 10, 2: 11}, {2: 21, 3: 22}, {3: 32, 4: 33}):
        draft._collect(state, iterate)
        state.iterates.append(iterate)
    assert state.pool == {10: [(21, 32)], 11: [(22, 33)]}
    for last in (40, 41, 42):
        state.iterates.extend([{1: 10}, {2: 21}])
        draft._collect(state, {3: last})
    assert state.pool[10] == [(21, 42), (21, 41)]  # the latest first, two are kept


def test_a_text_that_goes_round_in_circles_is_drafted():
    target, rows = tiny_llama(3), repetitive(12)
    long = plain(target, rows, max_new_tokens=150)
    out = speculate(target, rows, LookaheadDraft(), 16, max_new_tokens=150)
    assert generated(out, rows) == long
    assert len(set(long[0][-60:])) < 30 and out.speculation.block_efficiency > 1.1


def test_no_more_nodes_than_k_and_half_of_them_for_the_window():
    target, rows, draft = tiny_llama(3), repetitive(12), LookaheadDraft(window=8)
    for k in (1, 2, 5):
        out = speculate(target, rows, draft, k, max_new_tokens=30)
        assert all(entry.proposed <= k for entries in out.speculation.rounds for entry in entries)


@pytest.mark.parametrize("arguments", [dict(window=0), dict(ngram=1), dict(candidates=True)])
def test_bad_arguments_are_named(arguments):
    (name, value), = arguments.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        LookaheadDraft(**arguments)
