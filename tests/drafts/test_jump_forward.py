"""Jump-forward: what the processors leave hardly a choice about is drafted, and nothing else."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec.drafts import JumpForwardDraft, MixtureDraft
from tests.conformance import law
from tests.helpers import FULL, generated, padded, plain, prompts, small_vocabulary_llama, speculate, tiny_llama, word_tokenizer

PATTERN = [{5, 6}, {7}, {8}, {9}, {7}, set(range(30)), {3}, {4, 5, 6}, {2}]


class Pattern(LogitsProcessor):
    """The i-th new token is one of PATTERN[i], over and over again; keeps in a list what it was asked about."""

    def __init__(self, start: int, pattern=tuple(PATTERN)):
        self.start, self.pattern, self.seen = start, [sorted(own) for own in pattern], []

    def __call__(self, input_ids, scores):
        n = input_ids.shape[1] - self.start
        assert len(self.seen) == n, "called on a text that it has not been led to"
        assert not n or int(input_ids[0, -1]) in self.pattern[(n - 1) % len(self.pattern)], "called on a text that it has ruled out"
        self.seen.append(int(input_ids[0, -1]))
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self.pattern[n % len(self.pattern)]] = 0.0
        return scores + allowed


def written(draft, k, target=None, **options):
    target, rows = target or tiny_llama(1), prompts(6)
    options = {"max_new_tokens": 27, **options}
    expected = plain(target, rows, logits_processor=LogitsProcessorList([Pattern(6)]), **options)
    out = speculate(target, rows, draft, k, logits_processor=LogitsProcessorList([Pattern(6)]), **options)
    assert generated(out, rows) == expected
    return out.speculation


@pytest.mark.parametrize("branches", [1, 3])
def test_forced_tokens_are_drafted(branches):
    found = written(JumpForwardDraft(branches=branches), 8)
    assert found.block_efficiency > 1.8
    assert any(round[0].accepted >= 3 for round in found.rounds)


def test_in_a_mixture_others_go_on_behind_them():
    alone, mixed = (written(draft, 8, max_new_tokens=90) for draft in (JumpForwardDraft(branches=4), MixtureDraft()))
    without = written(MixtureDraft(["suffix_automaton", "ngram_recycling"]), 8, max_new_tokens=90)
    assert mixed.block_efficiency > max(alone.block_efficiency, without.block_efficiency)


def test_the_first_round_of_a_mixture_knows_the_forced_tokens():
    first = written(MixtureDraft(), 8).rounds[0][0]
    assert first.accepted >= 3


@pytest.mark.parametrize("options", [{}, dict(repetition_penalty=1.3, no_repeat_ngram_size=3)], ids=["no processors", "processors that forbid little"])
def test_where_nothing_restricts_the_text_nothing_is_proposed_and_no_processor_called(options, monkeypatch):
    target, rows = tiny_llama(1), prompts(6)
    expected, draft = plain(target, rows, **options), JumpForwardDraft()
    monkeypatch.setattr("hf_specdec.distributions.Sampler.leaves", lambda *args: pytest.fail("a processor was asked"))
    out = speculate(target, rows, draft, 5, **options)
    assert generated(out, rows) == expected
    assert not any(entry.proposed for entries in out.speculation.rounds for entry in entries)


def test_prefix_allowed_tokens_fn_is_asked_too():
    target, rows = tiny_llama(1), prompts(6)
    options = dict(prefix_allowed_tokens_fn=lambda row, ids: [int(ids[-1]) % 7 + 1])
    out = speculate(target, rows, JumpForwardDraft(), 5, **options)
    assert generated(out, rows) == plain(target, rows, **options) and out.speculation.acceptance_rate == 1.0


def test_a_batch_has_a_pattern_for_every_row():
    target, rows = tiny_llama(1), [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    options = dict(prefix_allowed_tokens_fn=lambda row, ids: list(range(20)) if int(ids[-1]) == row + 5 else [row + 5])
    out = speculate(target, rows, JumpForwardDraft(), 5, **options)
    expected = target.generate(**padded(rows), max_new_tokens=20, do_sample=False, pad_token_id=0, **options)
    assert torch.equal(out.sequences, expected) and out.speculation.block_efficiency > 1.3


def test_nothing_is_drafted_behind_an_end_of_text():
    target, rows = tiny_llama(1), prompts(6)
    options = dict(prefix_allowed_tokens_fn=lambda row, ids: [8] if len(ids) < 10 else [3], eos_token_id=3)
    out = speculate(target, rows, JumpForwardDraft(), 12, **options)
    assert generated(out, rows) == plain(target, rows, **options)
    assert out.speculation.rounds[0][0].proposed == 5


def test_the_longest_token_goes_first_or_else_the_highest_id():
    guesses = {}
    words = {20: "a", 21: "apple", 22: "app"}
    tokenizer = word_tokenizer(range(40))
    tokenizer.convert_ids_to_tokens = lambda ids: [words.get(i, "x") for i in ids]
    for name, draft in (("tokenizer", JumpForwardDraft(tokenizer)), ("none", JumpForwardDraft())):
        guess = draft.guesses
        draft.guesses = lambda place, guess=guess, name=name: guesses.setdefault((name, place), guess(place))
        speculate(tiny_llama(1), prompts(6), draft, 3, max_new_tokens=2, prefix_allowed_tokens_fn=lambda row, ids: [20, 21, 22])
    assert [token for token, *_ in guesses["tokenizer", (0, ())]] == [21, 22, 20]
    assert [token for token, *_ in guesses["none", (0, ())]] == [22, 21, 20]


def test_rates_of_guesses_are_learned():
    """Where the longest is never right, it stops being tried first."""
    target, rows = tiny_llama(1), prompts(6)
    draft = JumpForwardDraft()
    speculate(target, rows, draft, 4, max_new_tokens=60, prefix_allowed_tokens_fn=lambda row, ids: [4, 5], sequence_bias=[[[4], 50.0]])
    first, second = (draft.grower.rate((id(draft), (2, rank)), 0.5) for rank in (0, 1))
    assert first < 0.4 < second


N = 50_000 if FULL else 1_200


@pytest.mark.parametrize("draft", [JumpForwardDraft, lambda: JumpForwardDraft(branches=3), MixtureDraft], ids=["chain", "tree", "mixture"])
def test_sampling_follows_the_restricted_law(draft):
    target, row, allowed = small_vocabulary_llama(2, law.VOCAB), [1, 4, 2, 5], lambda row, ids: [2, 3] if int(ids[-1]) % 2 else [1, 4, 5]
    with torch.no_grad():
        joint = {(): 1.0}
        for _ in range(3):
            longer = {}
            for text, p in joint.items():
                scores = target.double()(input_ids=torch.tensor([[*row, *text]])).logits[0, -1]
                keep = allowed(0, torch.tensor([*row, *text]))
                chances = torch.full_like(scores, -torch.inf).index_put((torch.tensor(keep),), scores[keep]).softmax(-1).tolist()
                longer |= {(*text, token): p * chances[token] for token in keep}
            joint = longer
    found, _ = law.counts(target.float(), [row], draft(), N, 3, 3, chunk=N, prefix_allowed_tokens_fn=allowed)
    assert law.worst_p_value(found, [joint], 3) > law.THRESHOLD


@pytest.mark.parametrize("given, message", [(dict(branches=0), "branches=0"), (dict(branches=9), "branches=9"), (dict(tokenizer="gpt2"), "tokenizer: expected the target's")])
def test_bad_arguments_are_named(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        JumpForwardDraft(**given)
