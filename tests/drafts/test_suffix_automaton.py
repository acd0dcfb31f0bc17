"""The suffix automaton draft on its own: what it matches, counts, proposes and costs. The conformance tests run it in the loop."""

from __future__ import annotations

import random
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from hf_specdec.drafts import Context, SuffixAutomatonDraft
from hf_specdec.drafts.suffix_automaton import SuffixAutomaton
from hf_specdec.tree import Tree
from tests.helpers import FULL, generated, plain, prompts, repetitive, speculate, tiny_llama

VOCAB = 61
STEPS = 4_000 if FULL else 1_500


def random_text(alphabet: int, length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(alphabet) for _ in range(length)]


def periodic_text(period: int, length: int, every: int, seed: int = 0) -> list[int]:
    """Says one thing over and over, with a slip now and then."""
    chance = random.Random(seed)
    return [chance.randrange(3) if i % every == every - 1 else i % period for i in range(length)]


def automaton(text: list[int]) -> SuffixAutomaton:
    made = SuffixAutomaton()
    for token in text:
        made.append(token)
    return made


def places(text: list[int], part: list[int]) -> list[int]:
    """Where `part` ends in `text`."""
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


class Suffixes:
    """The slow way: lengths of the common suffixes of the text and of every prefix of it, updated token by token."""

    def __init__(self):
        self.text, self.common = [], [0]

    def append(self, token: int) -> tuple[int, int]:
        """(length, end) of the longest suffix that also ends at `end`, the last of such places; (0, 0) if there is none."""
        self.common = [0] + [n + 1 if self.text[end] == token else 0 for end, n in enumerate(self.common[:-1])] + [0]
        self.text.append(token)
        length, end = max((n, end) for end, n in enumerate(self.common))
        return (length, end) if length else (0, 0)


def context(*rows: list[int], vocab: int = VOCAB) -> Context:
    return Context(list(rows), 1000, vocab, torch.device("cpu"), SimpleNamespace(do_sample=False), None)


def proposed(draft: SuffixAutomatonDraft, ctx: Context, k: list[int]):
    draft.start(ctx)
    draft.evidence(ctx)
    proposal = draft.propose(ctx, k)
    proposal.check(len(k), ctx.vocab_size, draft.name)
    return proposal


# --- the automaton ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alphabet", [1, 2, 3, 4, 8, 30])
def test_the_match_is_the_longest_suffix_that_occurred_before_and_its_last_place_after_every_token(alphabet):
    made, slow = SuffixAutomaton(), Suffixes()
    for token in random_text(alphabet, STEPS, alphabet):
        made.append(token)
        assert (made.match[0], made.match[2]) == slow.append(token)


@pytest.mark.parametrize(("period", "every"), [(5, 97), (2, 41), (1, 300)])
def test_in_a_text_that_says_one_thing_over_and_over_the_match_is_as_long_though_its_place_may_be_an_earlier_one(period, every):
    made, slow = SuffixAutomaton(), Suffixes()
    for token in periodic_text(period, STEPS, every):
        made.append(token)
        (length, _, end), text = made.match, made.text
        assert length == slow.append(token)[0]
        assert not length or (end < len(text) and text[end - length : end] == text[-length:])


@pytest.mark.parametrize("alphabet", [2, 3, 6])
def test_every_substring_has_a_state_with_the_number_of_its_occurrences_and_the_last(alphabet):
    text = random_text(alphabet, 150, 5)
    made = automaton(text)
    assert len(made.links) <= 2 * len(text)
    for begin in range(len(text)):
        state = 0
        for end in range(begin + 1, min(begin + 12, len(text)) + 1):
            state = made.nexts[state][text[end - 1]]
            ends = places(text, text[begin:end])
            assert (made.counts[state], made.ends[state]) == (len(ends), ends[-1])


def test_a_text_that_repeats_one_token_is_counted_in_its_longest_suffixes_only():
    made = automaton([1] * 500)
    assert made.match[0] == 499 and made.match[2] == 499
    short = made.nexts[0][1]
    assert 1 <= made.counts[short] < 500, "the bound on the work per token has gone"


@pytest.mark.parametrize("alphabet", [2, 3, 5])
def test_another_text_is_followed_by_its_longest_suffix_in_this_one(alphabet):
    text, other = random_text(alphabet, 200, 1), random_text(alphabet, 150, 2) + [99] + random_text(alphabet, 50, 3)
    made, place = automaton(text), (0, 0)
    for end, token in enumerate(other, start=1):
        place = made.follow(*place, token)
        longest = next(n for n in range(min(end, 30), -1, -1) if n == 0 or places(text, other[end - n : end]))
        assert place[0] == longest
        assert not longest or made.ends[place[1]] == places(text, other[end - longest : end])[-1]


def lines_run(call, *arguments) -> int:
    """Lines of Python executed by a call: work, whatever the machine is busy with."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*arguments)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("make", [lambda n: random_text(2, n), lambda n: random_text(50, n), lambda n: [1] * n, lambda n: periodic_text(7, n, 100),
                                  lambda n: list(range(n))], ids=["2 tokens", "50 tokens", "one token", "a period with slips", "nothing twice"])
def test_the_work_per_token_does_not_grow_with_the_text(make):
    made, text, work = SuffixAutomaton(), make(8_000), []
    for start in range(0, len(text), 2_000):
        work.append(sum(lines_run(made.append, token) for token in text[start : start + 2_000]) / 2_000)
    assert work[-1] < 1.25 * work[1] + 5, work  # the first quarter is shorter than the bound on the suffixes noted
    assert max(work) < 12 * SuffixAutomaton.WALK


def test_proposing_costs_the_same_after_a_long_text_as_after_a_short_one():
    def work(length: int) -> int:
        ctx = context(random_text(4, length))
        draft = SuffixAutomatonDraft()
        draft.start(ctx)
        draft.evidence(ctx)
        return lines_run(draft.propose, ctx, [5])

    assert abs(work(6_000) - work(60)) < 30


# --- proposing ----------------------------------------------------------------------------------------------------------


def test_the_last_occurrence_of_the_longest_match_goes_on():
    ctx = context([1, 2, 3, 9, 1, 2, 3, 8, 5, 3, 7, 1, 2, 3], [4, 4], [1, 2, 3])
    draft = SuffixAutomatonDraft()
    draft.start(ctx)
    assert draft.evidence(ctx) == [3, 1, -1]
    proposal = draft.propose(ctx, [4, 4, 4])
    assert proposal.sizes == [4, 2, 0] and proposal.probs is None and proposal.tree.is_chain
    assert proposal.tokens[0].tolist() == [8, 5, 3, 7] and proposal.tokens[1, :2].tolist() == [4, 4]


def test_a_chain_repeats_itself_where_it_runs_into_the_present_and_grows_with_the_match():
    assert proposed(SuffixAutomatonDraft(), context([1, 2, 3, 1, 2, 3]), [8]).tokens.tolist() == [[1, 2, 3, 1, 2, 3, 1, 2]]
    for n in (1, 2, 3):
        row = [7, 7, *range(10, 10 + n), *range(30, 50), *range(10, 10 + n)]
        assert proposed(SuffixAutomatonDraft(), context(row), [20]).sizes == [n * n + 1]


def test_short_matches_can_be_left_aside():
    ctx = context([1, 2, 3, 1, 2], [1, 2, 3, 2])
    draft = SuffixAutomatonDraft(min_match=2)
    draft.start(ctx)
    assert draft.evidence(ctx) == [2, -1] and draft.propose(ctx, [3, 3]).sizes == [3, 0]


def test_a_row_grows_and_leaves_as_in_a_run_of_its_own():
    texts = [random_text(3, 60, seed) for seed in range(3)]
    rows = [text[:5] for text in texts]
    ctx, draft, going = context(*rows), SuffixAutomatonDraft(), [0, 1, 2]
    draft.start(ctx)
    for step in range(40):
        if step == 15:
            draft.keep([2, 0])
            going = [2, 0]
            ctx.rows[:] = [rows[2], rows[0]]
        evidence, proposal = draft.evidence(ctx), draft.propose(ctx, [4] * len(going))
        for place, b in enumerate(going):
            fresh, alone = SuffixAutomatonDraft(), context(list(rows[b]))
            fresh.start(alone)
            assert fresh.evidence(alone) == [evidence[place]]
            expected = fresh.propose(alone, [4])
            assert proposal.sizes[place] == expected.sizes[0]
            assert proposal.tokens[place, : proposal.sizes[place]].tolist() == expected.tokens[0].tolist()
            rows[b].extend(texts[b][len(rows[b]) : len(rows[b]) + 1 + step % 3])


# --- texts of others ----------------------------------------------------------------------------------------------------


def test_a_longer_match_in_a_text_goes_before_the_rows_own_and_a_match_never_crosses_texts():
    draft = SuffixAutomatonDraft([[1, 2, 3, 4, 5], [5, 9], [2, 3, 4, 6], [1, 2, 3, 4, 6]])
    assert proposed(draft, context([3, 4, 8, 2, 3, 4]), [1]).tokens.tolist() == [[6]], "6 follows 2 3 4 twice, 5 once"
    assert proposed(draft, context([3, 4, 8, 3, 4]), [1]).tokens.tolist() == [[8]], "equally long, so its own text"
    ctx = context([5, 5, 9])
    draft.start(ctx)
    assert draft.evidence(ctx) == [2] and draft.propose(ctx, [2]).sizes == [0], "nothing follows 5 9, nor 9, where they occur"


def test_texts_can_be_added_between_calls():
    draft = SuffixAutomatonDraft()
    assert proposed(draft, context([7, 8]), [3]).sizes == [0]
    draft.add([7, 8, 9, 10, 11])
    assert proposed(draft, context([7, 8]), [3]).tokens.tolist() == [[9, 10, 11]]


def test_tokens_the_target_does_not_have_are_not_proposed():
    draft = SuffixAutomatonDraft([[1, 2, 50], [1, 2, 60], [1, 2, 3, 70]])
    assert proposed(draft, context([1, 2], vocab=20), [5]).tokens.tolist() == [[3]]


@pytest.mark.parametrize("text", ["some text", ["some", "words"], [1, -1], [1.0], [True]], ids=str)
def test_texts_that_are_not_token_ids_are_refused(text):
    with pytest.raises(ValueError, match="^texts: "):
        SuffixAutomatonDraft([text])


@pytest.mark.parametrize("options", [dict(branches=0), dict(branches=17), dict(branches=1.5), dict(min_match=0), dict(min_match=True)], ids=str)
def test_wrong_options_are_refused_by_name(options):
    with pytest.raises(ValueError, match=f"^{next(iter(options))}="):
        SuffixAutomatonDraft(**options)


# --- trees --------------------------------------------------------------------------------------------------------------


def test_continuations_that_differ_become_a_tree_weighted_by_count():
    row = [0, 1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 6, 7, 0, 1, 2]
    proposal = proposed(SuffixAutomatonDraft(branches=2), context(row), [5])
    assert proposal.tree == Tree((0, 0, 1, 1, 2)), "3 twice and 6 once; then 5 and 4 after 3, 7 after 6"
    assert proposal.tokens.tolist() == [[3, 6, 5, 4, 7]]


def test_continuations_that_agree_become_the_chain():
    for row in ([1, 2, 3, 4, 0, 1, 2], [1, 2, 3, 1, 2, 3, 1, 2]):
        tree, chain = (proposed(SuffixAutomatonDraft(branches=n), context(row), [5]) for n in (3, 1))
        assert tree.tree.is_chain and torch.equal(tree.tokens, chain.tokens)


def test_a_tree_holds_the_most_probable_continuations_by_the_slow_count():
    for seed in range(20):
        row = random_text(3, 80, seed)
        nodes = automaton(row).likely(automaton(row).match[1], 6, 3, VOCAB)
        match = row[-automaton(row).match[0] :]
        paths = [()]
        for parent, token in nodes:
            paths.append((*paths[parent], token))
        for path in paths[1:]:
            assert places(row[:-1], match + list(path[:-1])) or not places(row, match + list(path)), "it backed off with the longer one known"
        first = Counter(row[end] for end in places(row[:-1], match))
        assert nodes[0][1] in {token for token, count in first.items() if count == max(first.values())}
        assert len(set(paths)) == len(paths)


def test_rows_of_a_batch_share_one_shape_and_keep_within_their_k():
    fork, line = [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1, 2], [7, 8, 9, 10, 11, 7, 8]
    proposal = proposed(SuffixAutomatonDraft(branches=2), context(fork, line, [1, 9], fork), [4, 4, 4, 1])
    assert proposal.tree == Tree((0, 1, 0, 3)), "of the shape of the forks, 0 0 1 2, and the chain's, 0 1 2 3, those that most rows have"
    assert proposal.sizes == [4, 2, 0, 1]
    assert proposal.tokens[0].tolist() == [5, 6, 3, 4] and proposal.tokens[1, :2].tolist() == [9, 10] and proposal.tokens[3, 0] == 5


@pytest.mark.parametrize("k", [1, 4, 7])
def test_trees_with_texts_give_plain_generates_text(k):
    target, rows = tiny_llama(3), repetitive(12) + prompts(1, 5, seed=4) + repetitive(20, seed=2)
    texts = plain(target, rows, max_new_tokens=30)
    draft = SuffixAutomatonDraft([row + text for row, text in zip(rows[1:3], texts[1:3])], branches=3)
    for batch in ([0], [1], [0, 1, 2, 3]):
        out = speculate(target, [rows[b] for b in batch], draft, k, max_new_tokens=30)
        assert generated(out, [rows[b] for b in batch]) == [texts[b] for b in batch]
        assert out.speculation.accepted > 0
