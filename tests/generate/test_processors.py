"""Logits processors inside an accepted block: every position sees its own prefix, once, without padding."""

from collections import UserList

import pytest
import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor, EncoderRepetitionPenaltyLogitsProcessor, LogitsProcessor, LogitsProcessorList,
    WatermarkingConfig,
)

from tests.helpers import (
    VOCAB, KnowingTreeDraft, ScriptedDraft, enabled, generated, padded, perturbed, plain, prompts, repetitive, speculate, tiny_llama,
)

ROWS = repetitive(13) + prompts(2, 7, seed=2)
MAX_NEW = 20


class Favour(LogitsProcessor):
    """A user's own processor: what was said two tokens ago is said a little more."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] < 2:
            return scores
        return scores.scatter_add(1, input_ids[:, -2:-1], torch.full((len(scores), 1), 3.0, dtype=scores.dtype))


def even_after_odd(row, ids):
    return [token for token in range(VOCAB) if (token + int(ids[-1])) % 2]


OPTIONS = {
    "none": {},
    "repetition penalty": dict(repetition_penalty=1.6),
    "no-repeat 1-gram": dict(no_repeat_ngram_size=1),
    "no-repeat 2-gram": dict(no_repeat_ngram_size=2),
    "min_new_tokens": dict(min_new_tokens=9, eos_token_id=list(range(1, 30))),
    "bad words": dict(bad_words_ids=[[token] for token in range(1, 20)] + [[30, 31], [40, 41, 42]]),
    "forced end": dict(forced_eos_token_id=[7], eos_token_id=7),
    "suppressed tokens": dict(suppress_tokens=list(range(1, 25))),
    "suppressed at the beginning": dict(begin_suppress_tokens=list(range(1, 60))),
    "sequence bias": dict(sequence_bias=[[[5], 4.0], [[3, 9], -8.0], [[11, 12], 6.0]]),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=even_after_odd),
    "length penalty on the end": dict(exponential_decay_length_penalty=(4, 1.5), eos_token_id=7),
    "watermark": dict(watermarking_config=WatermarkingConfig(bias=4.0, seeding_scheme="lefthash")),
    "renormalised": dict(renormalize_logits=True, repetition_penalty=1.2),
    "a user's own": dict(logits_processor=LogitsProcessorList([Favour()])),
    "several": dict(logits_processor=LogitsProcessorList([Favour()]), repetition_penalty=1.3, no_repeat_ngram_size=3, min_new_tokens=5,
                    eos_token_id=[3, 4, 5], bad_words_ids=[[8]]),
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def drafts(target, texts):
    finished = [row + text for row, text in zip(ROWS, texts)]
    return {"scripted": ScriptedDraft.knowing(finished, wrong=4), "tree": KnowingTreeDraft(finished), "model": perturbed(target), "lookup": None}


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("draft", ["scripted", "tree", "model", "lookup"])
@every_option
def test_greedy_text_under_processors_equals_plain_generates(options, draft):
    target = tiny_llama(1)
    texts = plain(target, ROWS, max_new_tokens=MAX_NEW, **options)
    out = speculate(target, ROWS, drafts(target, texts)[draft], 6, max_new_tokens=MAX_NEW, **options)
    assert generated(out, ROWS) == [text[:n] for text, n in zip(texts, out.speculation.new_tokens)]
    assert [len(text) for text in texts] == out.speculation.new_tokens
    assert out.speculation.accepted > 0 or draft in ("model", "lookup")


@pytest.mark.share(2)
@every_option
def test_every_option_of_the_table_but_the_first_changes_the_text(options):
    target = tiny_llama(1)
    changed = plain(target, ROWS, max_new_tokens=MAX_NEW, **options) != plain(target, ROWS, max_new_tokens=MAX_NEW)
    assert changed == bool(options)


# The reference is plain generate of every row alone: in a batch it takes padding for a part of the prompt, and transformers 5.10
# gives encoder_repetition_penalty to the first of num_return_sequences only.
@pytest.mark.parametrize("options", [dict(encoder_repetition_penalty=3.0), dict(encoder_no_repeat_ngram_size=1)], ids=str)
@pytest.mark.parametrize("returned", [1, 3])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]], ids=["ragged", "alone"])
def test_processors_made_of_the_prompt_follow_each_row_to_all_its_returned_sequences(options, returned, rows):
    target = tiny_llama(1)
    settings = dict(max_new_tokens=MAX_NEW, do_sample=True, top_k=1, num_return_sequences=returned, **options)  # greedy, as it is sampled
    expected = plain(target, rows, max_new_tokens=MAX_NEW, **options)
    assert expected != plain(target, rows, max_new_tokens=MAX_NEW)
    out = speculate(target, rows, perturbed(target), 4, seed=0, **settings)
    assert generated(out, rows) == [text for text in expected for _ in range(returned)]
    if len(rows) == 1 and (returned == 1 or "encoder_no_repeat_ngram_size" in options):
        assert torch.equal(out.sequences, target.generate(**padded(rows), **settings, pad_token_id=0))


@pytest.mark.parametrize("make", [EncoderRepetitionPenaltyLogitsProcessor, EncoderNoRepeatNGramLogitsProcessor])
def test_such_a_processor_of_the_users_own_keeps_what_it_was_made_of(make):
    target, rows = tiny_llama(1), prompts(6, 6, seed=2)
    sources, strength = torch.tensor(prompts(30, 30, seed=9)), 3.0 if make is EncoderRepetitionPenaltyLogitsProcessor else 1
    out = speculate(target, rows, perturbed(target), 4, logits_processor=LogitsProcessorList([make(strength, sources)]))
    expected = [plain(target, [row], logits_processor=LogitsProcessorList([make(strength, source[None])]))[0] for row, source in zip(rows, sources)]
    assert generated(out, rows) == expected != plain(target, rows)


def test_min_length_counts_what_plain_generate_counts():
    target, row = tiny_llama(1), ROWS[:1]
    options = dict(min_length=20, eos_token_id=list(range(1, 30)), max_new_tokens=MAX_NEW)
    out = speculate(target, row, perturbed(target), 4, **options)
    assert generated(out, row) == plain(target, row, **options)


@pytest.mark.parametrize("draft", ["scripted", "tree", "model", "lookup"])
def test_min_length_of_a_ragged_batch_counts_the_padded_prompt_as_plain_generate_does(draft):
    target = tiny_llama(1)
    options = dict(min_length=20, eos_token_id=list(range(1, 30)), max_new_tokens=MAX_NEW)
    stock = target.generate(**padded(ROWS), do_sample=False, pad_token_id=0, **options)
    out = speculate(target, ROWS, drafts(target, plain(target, ROWS, **options))[draft], 4, **options)
    assert torch.equal(out.sequences, stock)
    assert generated(out, ROWS) != plain(target, ROWS, **options)  # a row alone counts its own tokens only


def test_min_new_tokens_and_max_new_tokens_count_each_rows_own():
    target = tiny_llama(1)
    options = dict(min_new_tokens=7, eos_token_id=list(range(1, 30)), max_new_tokens=MAX_NEW)
    assert generated(speculate(target, ROWS, None, 4, **options), ROWS) == plain(target, ROWS, **options)


def test_forced_bos_token_comes_after_a_single_token():
    target, row = tiny_llama(1), [[5]]
    options = dict(forced_bos_token_id=9, max_new_tokens=6)
    assert generated(speculate(target, row, None, 4, **options), row) == plain(target, row, **options)
    assert plain(target, row, **options)[0][0] == 9


class Revived(LogitsProcessor):
    """Lets in again what the processors before it have ruled out."""

    def __call__(self, input_ids, scores):
        return scores.masked_fill(scores == -torch.inf, 3.0)


LET_IN = {  # a token that one processor rules out and a later one lets in again, or that is taken because none is left
    "forced first": dict(forced_bos_token_id=9, bad_words_ids=[[9]], repetition_penalty=1.6),
    "a user's own": dict(bad_words_ids=[[token] for token in range(1, 30)], logits_processor=LogitsProcessorList([Revived(), Favour()])),
    "none is left": dict(bad_words_ids=[[0, token] for token in range(VOCAB)], sequence_bias={(5, 0): 50.0, (0, 0, 7): 9.0}),
    "none is left, numbers are made finite": dict(suppress_tokens=[3], remove_invalid_values=True, no_repeat_ngram_size=1,
                                                  prefix_allowed_tokens_fn=lambda row, ids: [int(ids[-1])]),
}  # fmt: skip


@pytest.mark.parametrize("draft", ["scripted", "tree"])
@pytest.mark.parametrize("options", LET_IN.values(), ids=LET_IN)
def test_a_token_that_is_let_in_again_has_its_text_processed_like_any_other(options, draft):
    target, rows = tiny_llama(1), [[5]]
    texts = plain(target, rows, **options)
    known = [row + text for row, text in zip(rows, texts)]
    out = speculate(target, rows, ScriptedDraft.knowing(known) if draft == "scripted" else KnowingTreeDraft(known), 6, output_scores=True, **options)
    assert generated(out, rows) == texts and out.speculation.accepted > 3
    ids = torch.tensor(rows)
    scores = target.generate(input_ids=ids, max_new_tokens=20, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
                             **options).scores
    for ours, stock in zip(out.scores, scores, strict=True):
        torch.testing.assert_close(ours, stock, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_what_is_suppressed_at_the_beginning_comes_behind_the_forced_token_of_a_row_that_has_one():
    target, rows = tiny_llama(1), prompts(5, 1)
    options = dict(forced_bos_token_id=9, begin_suppress_tokens=list(range(1, 40)), max_new_tokens=6)
    texts = plain(target, rows, **options)
    assert generated(speculate(target, rows, None, 4, **options), rows) == texts
    assert texts[1][0] == 9 and texts[1][1] not in range(1, 40)


@pytest.mark.parametrize("cutoff", [dict(eta_cutoff=1e-3), dict(typical_p=0.9), dict(min_p=0.1, epsilon_cutoff=1e-3)], ids=str)
def test_a_guess_behind_which_no_token_is_left_does_no_harm(cutoff):
    """9 is as unlikely as can be, and the text cannot go on behind it."""
    target, rows = tiny_llama(1), prompts(6, 4)
    options = dict(bad_words_ids=[[9, token] for token in range(VOCAB)], sequence_bias=[[[9], -30.0]], do_sample=True, max_new_tokens=6)
    for draft in (ScriptedDraft(lambda row: [9, 9, 9]), ScriptedDraft(lambda row: [3, 9])):
        assert all(9 not in text for text in generated(speculate(target, rows, draft, 4, seed=1, **options, **cutoff), rows))


@pytest.mark.parametrize("kind", ["confidence", "expected_gain"])
def test_a_draft_that_has_no_token_left_can_stop_by_its_confidence(kind):
    target, rows = tiny_llama(1), prompts(6, seed=2)
    options = dict(suppress_tokens=list(range(VOCAB)), renormalize_logits=True)
    out = speculate(target, rows, perturbed(target), 4, speculative={"draft_stop": kind}, **options)
    assert generated(out, rows) == plain(target, rows, **options)


# --- what a processor of the user's own sees --------------------------------------------------------------------------------


class Calls(UserList):
    """Not put back before a call, as a list is: all calls stay, those on candidates, too."""


class Recorder(LogitsProcessor):
    def __init__(self):
        self.calls = Calls()

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.clone(), scores.clone()))
        return scores

    @property
    def prefixes(self):
        return [tuple(ids[0].tolist()) for ids, _ in self.calls]


def recorded(draft_name="scripted", **options):
    target, recorder = tiny_llama(1), Recorder()
    texts = plain(target, ROWS, max_new_tokens=MAX_NEW, **options)
    out = speculate(target, ROWS, drafts(target, texts)[draft_name], 5, max_new_tokens=MAX_NEW, logits_processor=LogitsProcessorList([recorder]), **options)
    assert generated(out, ROWS) == texts
    return target, recorder, [tuple(row + text[:i]) for row, text in zip(ROWS, texts) for i in range(len(text))]


@pytest.mark.parametrize("draft", ["scripted", "tree", "lookup"])
def test_a_processor_is_called_exactly_once_for_every_committed_prefix(draft):
    _, recorder, committed = recorded(draft)
    assert sorted(prefix for prefix in recorder.prefixes if prefix in set(committed)) == sorted(committed)


@pytest.mark.parametrize("draft", ["scripted", "lookup"])
def test_a_processor_never_sees_the_same_prefix_twice(draft):
    _, recorder, _ = recorded(draft)
    assert len(recorder.prefixes) == len(set(recorder.prefixes))


@pytest.mark.parametrize("draft", ["scripted", "tree", "model", "lookup"])
def test_a_processor_sees_one_row_at_a_time_without_padding(draft):
    _, recorder, _ = recorded(draft)
    assert all(ids.shape[0] == scores.shape[0] == 1 and scores.shape[1] == VOCAB for ids, scores in recorder.calls)
    assert all(any(prefix[: len(row)] == tuple(row) for row in ROWS) for prefix in recorder.prefixes)


@torch.no_grad()
@pytest.mark.parametrize("draft", ["scripted", "tree", "lookup"])
def test_a_processor_gets_the_targets_logits_of_that_very_prefix(draft):
    target, recorder, _ = recorded(draft)
    for ids, scores in recorder.calls[::5]:
        assert torch.allclose(scores, target(input_ids=ids).logits[:, -1], atol=1e-4)


def test_prefix_allowed_tokens_fn_gets_its_row_and_that_rows_own_tokens():
    seen = []

    def allowed(row, ids):
        seen.append((row, ids.tolist()))
        return list(range(VOCAB))

    speculate(tiny_llama(1), ROWS, None, 4, max_new_tokens=8, prefix_allowed_tokens_fn=allowed)
    assert {row for row, _ in seen} == {0, 1, 2}
    assert all(ids[: len(ROWS[row])] == ROWS[row] for row, ids in seen)


def test_prefix_allowed_tokens_fn_gets_the_same_numbers_for_returned_sequences_as_in_a_plain_call():
    """The row's in transformers before 5.24, the prompt's since."""
    target, numbers = enabled(tiny_llama(1)), []
    for ours in ({}, {"speculative": True}):
        seen = set()

        def allowed(number, ids, seen=seen):
            seen.add((number, tuple(ids[:9].tolist())))
            return list(range(VOCAB))

        target.generate(**padded(prompts(9, 9)), num_return_sequences=2, do_sample=True, max_new_tokens=6, pad_token_id=0,
                        prefix_allowed_tokens_fn=allowed, **ours)
        numbers.append(seen)
    assert numbers[0] == numbers[1] and len(numbers[0]) >= 2


def test_the_processors_of_the_caller_are_not_changed_by_a_ragged_batch():
    from transformers import MinLengthLogitsProcessor

    given = MinLengthLogitsProcessor(20, eos_token_id=3)
    speculate(tiny_llama(1), ROWS, None, 4, logits_processor=LogitsProcessorList([given]))
    assert given.min_length == 20


@pytest.mark.parametrize("options", [dict(temperature=0.5), dict(top_k=2), dict(top_p=0.3), dict(min_p=0.4), dict(typical_p=0.3)], ids=str)
def test_a_sampled_token_is_one_that_the_warpers_allow(options):
    from tests.conformance.law import stock_processors

    target, row = tiny_llama(1), ROWS[0]
    out = speculate(target, [row] * 3, perturbed(target), 5, seed=1, do_sample=True, max_new_tokens=12, **options)
    processors = stock_processors(target, row, max_new_tokens=12, **options)
    for text in generated(out, [row] * 3):
        with torch.no_grad():
            logits = target(input_ids=torch.tensor([row + text])).logits[0]
        for i, token in enumerate(text):
            scores = logits[len(row) + i - 1][None]
            for processor in processors:
                scores = processor(torch.tensor([row + text[:i]]), scores)
            assert scores[0, token].isfinite()
