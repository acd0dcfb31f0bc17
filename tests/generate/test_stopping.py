"""Where a row ends: at the first token that ends it, also in the middle of an accepted block, and nothing after it is seen anywhere."""

import threading
import time

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import MaxLengthCriteria, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

from hf_specdec.compat import CACHE
from tests.helpers import (
    VOCAB, KnowingTreeDraft, ScriptedDraft, enabled, generated, padded, perturbed, plain, prompts, repetitive, speculate, tiny_llama,
)

ROWS = repetitive(9) + prompts(4, 6, seed=2)
MAX_NEW = 20


def knowing(target, rows, **settings):
    """A draft that is always right, and what it knows."""
    texts = plain(target, rows, max_new_tokens=MAX_NEW)
    return ScriptedDraft.knowing([row + text for row, text in zip(rows, texts)], **settings), texts


def drafts(target, rows):
    scripted, texts = knowing(target, rows)
    finished = [row + text for row, text in zip(rows, texts)]
    return {"scripted": scripted, "tree": KnowingTreeDraft(finished), "model": perturbed(target), "lookup": None}


every_draft = pytest.mark.parametrize("draft", ["scripted", "tree", "model", "lookup"])


# --- eos --------------------------------------------------------------------------------------------------------------------


@pytest.mark.share(1 / 4)
@every_draft
@pytest.mark.parametrize("count", [1, 2, 12])
def test_a_list_of_eos_tokens_ends_rows_where_plain_generate_ends_them(draft, count):
    target = tiny_llama(6)
    texts = plain(target, ROWS, max_new_tokens=MAX_NEW)
    eos = sorted({token for text in texts for token in text})[::3][:count]
    expected = plain(target, ROWS, max_new_tokens=MAX_NEW, eos_token_id=eos)
    out = speculate(target, ROWS, drafts(target, ROWS)[draft], 6, max_new_tokens=MAX_NEW, eos_token_id=eos)
    assert generated(out, ROWS) == expected


@pytest.mark.parametrize("place", range(8))
def test_eos_at_any_place_of_an_accepted_block_cuts_the_block_there(place):
    target, row = tiny_llama(6), ROWS[:1]
    draft, (text,) = knowing(target, row)
    first = text.index(text[place])
    out = speculate(target, row, draft, 7, max_new_tokens=MAX_NEW, eos_token_id=text[place])
    assert generated(out, row) == [text[: first + 1]]
    assert out.speculation.new_tokens == [first + 1] and len(out.speculation.rounds) == 1 + first // 8


def test_eos_that_is_drafted_but_not_accepted_does_not_end_the_row():
    target, row = tiny_llama(6), ROWS[:1]
    (text,) = plain(target, row, max_new_tokens=MAX_NEW)
    eos = next(token for token in range(1, VOCAB) if token not in text)
    out = speculate(target, row, ScriptedDraft(lambda tokens: [eos] * 5), 5, max_new_tokens=MAX_NEW, eos_token_id=eos)
    assert generated(out, row) == [text]


def test_a_row_may_end_with_its_first_token():
    target = tiny_llama(6)
    texts = plain(target, ROWS, max_new_tokens=MAX_NEW)
    out = speculate(target, ROWS, perturbed(target), 4, max_new_tokens=MAX_NEW, eos_token_id=[text[0] for text in texts])
    assert generated(out, ROWS) == [text[:1] for text in texts]


def test_eos_of_the_models_generation_config_counts():
    target, row = tiny_llama(6), ROWS[:1]
    draft, (text,) = knowing(target, row)
    target.generation_config.eos_token_id = [text[5]]
    target.generation_config.pad_token_id = 0
    out = speculate(target, row, draft, 7, max_new_tokens=MAX_NEW)
    assert generated(out, row) == [text[: text.index(text[5]) + 1]]


# --- lengths and time -------------------------------------------------------------------------------------------------------


@pytest.mark.share(1 / 4)
@every_draft
@pytest.mark.parametrize("max_new", [1, 2, 3, 5, 8])
def test_max_new_tokens_is_met_exactly(draft, max_new):
    target = tiny_llama(6)
    out = speculate(target, ROWS, drafts(target, ROWS)[draft], 7, max_new_tokens=max_new)
    assert generated(out, ROWS) == plain(target, ROWS, max_new_tokens=max_new)
    assert out.speculation.new_tokens == [max_new] * 3


@pytest.mark.parametrize("max_new", [3.0, 3.5])
def test_a_limit_may_be_a_float(max_new):
    target = tiny_llama(6)
    assert generated(speculate(target, ROWS[:1], None, 7, max_new_tokens=max_new), ROWS[:1]) == plain(target, ROWS[:1], max_new_tokens=max_new)


def test_max_length_counts_the_prompt():
    target, row = tiny_llama(6), ROWS[:1]
    draft, (text,) = knowing(target, row)
    out = enabled(target).generate(**padded(row), assistant_model=draft, speculative=True, max_length=14, do_sample=False, pad_token_id=0)
    assert out[0].tolist() == row[0] + text[:5]


def test_max_length_of_a_ragged_batch_counts_the_padded_prompt_as_plain_generate_does():
    target = tiny_llama(6)
    options = dict(max_length=17, do_sample=False, pad_token_id=0)
    stock = target.generate(**padded(ROWS), **options)
    assert torch.equal(enabled(target).generate(**padded(ROWS), speculative=True, **options), stock)


def test_a_text_may_fill_the_models_context_to_the_last_position():
    from tests.architectures import FAMILIES

    target = next(family for family in FAMILIES if family.name == "GPT-2").model()
    rows = prompts(110, 100)
    options = dict(max_new_tokens=18)
    for draft in (None, perturbed(target)):
        assert generated(speculate(target, rows, draft, 7, **options), rows) == plain(target, rows, **options)


def test_max_time_ends_the_call_and_keeps_what_there_is():
    target = tiny_llama(6)
    draft, texts = knowing(target, ROWS, wrong=2)
    propose = draft.propose

    def slow(context, k):
        time.sleep(0.1)
        return propose(context, k)

    draft.propose = slow
    begin = time.perf_counter()
    out = speculate(target, ROWS, draft, 1, max_new_tokens=MAX_NEW, max_time=0.35)
    assert time.perf_counter() - begin < 5
    found = generated(out, ROWS)
    assert all(0 < len(row) < MAX_NEW for row in found)
    assert found == [text[: len(row)] for text, row in zip(texts, found)]


# --- stopping criteria --------------------------------------------------------------------------------------------------------


class AfterCalls(StoppingCriteria):
    """Fires at its n-th call: only right if it is called once per token, and not after it has fired."""

    def __init__(self, n: int):
        self.n, self.prefixes = n, []

    def __call__(self, input_ids, scores, **kwargs):
        self.prefixes.append(tuple(input_ids[0].tolist()))
        return torch.full((len(input_ids),), len(self.prefixes) >= self.n)


class SumAbove(StoppingCriteria):
    """Fires where the tokens of the text sum to more than a bound."""

    def __init__(self, bound: int):
        self.bound = bound

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(-1) > self.bound


@every_draft
@pytest.mark.parametrize("n", [1, 3, 4, 7, 8, 12])
def test_a_stateful_criterion_fires_at_the_token_at_which_it_fires_under_plain_generate(draft, n):
    target, row = tiny_llama(6), ROWS[:1]
    expected = plain(target, row, max_new_tokens=MAX_NEW, stopping_criteria=StoppingCriteriaList([AfterCalls(n)]))
    criterion = AfterCalls(n)
    out = speculate(target, row, drafts(target, row)[draft], 7, max_new_tokens=MAX_NEW, stopping_criteria=StoppingCriteriaList([criterion]))
    assert generated(out, row) == expected and len(expected[0]) == n
    assert criterion.prefixes == [tuple(row[0] + expected[0][: i + 1]) for i in range(n)]


@every_draft
def test_a_criterion_sees_every_committed_prefix_of_every_row_once_and_in_order_without_padding(draft):
    target, criterion = tiny_llama(6), AfterCalls(10**6)
    out = speculate(target, ROWS, drafts(target, ROWS)[draft], 5, max_new_tokens=MAX_NEW, stopping_criteria=StoppingCriteriaList([criterion]))
    for row, text in zip(ROWS, generated(out, ROWS)):
        assert [p for p in criterion.prefixes if p[: len(row)] == tuple(row)] == [tuple(row + text[: i + 1]) for i in range(len(text))]
    assert len(criterion.prefixes) == 3 * MAX_NEW


@every_draft
def test_a_criterion_that_looks_at_the_text_ends_each_row_of_a_batch_on_its_own(draft):
    target = tiny_llama(6)
    bound = sum(ROWS[0]) + 100
    options = dict(max_new_tokens=MAX_NEW)
    expected = [plain(target, [row], stopping_criteria=StoppingCriteriaList([SumAbove(bound)]), **options)[0] for row in ROWS]
    out = speculate(target, ROWS, drafts(target, ROWS)[draft], 6, stopping_criteria=StoppingCriteriaList([SumAbove(bound)]), **options)
    assert generated(out, ROWS) == expected and len({len(text) for text in expected}) > 1


def test_every_criterion_is_asked_at_every_token_even_where_an_earlier_one_has_fired():
    target, row = tiny_llama(6), ROWS[:1]
    first, second = AfterCalls(4), AfterCalls(100)
    speculate(target, row, knowing(target, row)[0], 7, stopping_criteria=StoppingCriteriaList([first, second]))
    assert len(first.prefixes) == len(second.prefixes) == 4


def test_a_criterion_that_wants_scores_gets_one_per_token_so_far():
    target, row, seen = tiny_llama(6), ROWS[:1], []

    class Scores(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append([tuple(step.shape) for step in scores])
            return torch.zeros(len(input_ids), dtype=torch.bool)

    speculate(target, row, knowing(target, row)[0], 3, max_new_tokens=5, output_scores=True, stopping_criteria=StoppingCriteriaList([Scores()]))
    assert seen == [[(1, VOCAB)] * (i + 1) for i in range(5)]


def test_the_cache_returned_by_a_call_that_a_criterion_has_ended_holds_no_more_than_the_text():
    target, row = tiny_llama(6), ROWS[:1]
    out = speculate(target, row, knowing(target, row)[0], 7, stopping_criteria=StoppingCriteriaList([AfterCalls(4)]))
    assert out[CACHE].get_seq_length() == out.sequences.shape[1] - 1


# --- stop strings -----------------------------------------------------------------------------------------------------------


def letters() -> PreTrainedTokenizerFast:
    """61 tokens of one or two letters; text is their concatenation."""
    words = [chr(97 + i) for i in range(26)] + [chr(97 + i % 26) + chr(97 + (7 * i) % 26) for i in range(VOCAB - 26)]
    vocab = {}
    for word in words:
        vocab[word if word not in vocab else word + chr(65 + len(vocab) % 26)] = len(vocab)
    core = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


def text_of(tokens: list[int]) -> str:
    return letters().decode(tokens)


@pytest.mark.share(2)
@every_draft
@pytest.mark.parametrize("start", [0, 3, 6])
@pytest.mark.parametrize("length", [1, 3])
def test_a_stop_string_ends_the_text_where_it_is_complete(draft, start, length):
    target, row = tiny_llama(6), ROWS[:1]
    (text,) = plain(target, row, max_new_tokens=MAX_NEW)
    stop = text_of(text[start : start + length])
    expected = plain(target, row, max_new_tokens=MAX_NEW, stop_strings=[stop], tokenizer=letters())
    out = speculate(target, row, drafts(target, row)[draft], 7, max_new_tokens=MAX_NEW, stop_strings=[stop], tokenizer=letters())
    assert generated(out, row) == expected
    assert stop in text_of(expected[0]) and stop not in text_of(expected[0][:-1])


def test_stop_strings_of_a_generation_config_count_and_the_config_keeps_them():
    from transformers import GenerationConfig

    target, row = tiny_llama(6), ROWS[:1]
    draft, (text,) = knowing(target, row)
    config = GenerationConfig(max_new_tokens=MAX_NEW, do_sample=False, pad_token_id=0, stop_strings=[text_of(text[2:4])])
    expected = target.generate(**padded(row), generation_config=config, tokenizer=letters())
    before = config.to_dict()
    out = enabled(target).generate(**padded(row), generation_config=config, tokenizer=letters(), assistant_model=draft, speculative=True)
    assert torch.equal(out, expected) and config.to_dict() == before


def test_stop_strings_of_the_models_own_generation_config_count():
    target, row = tiny_llama(6), ROWS[:1]
    draft, (text,) = knowing(target, row)
    target.generation_config.stop_strings = [text_of(text[2:4])]
    expected = target.generate(**padded(row), tokenizer=letters(), max_new_tokens=MAX_NEW, pad_token_id=0)
    out = enabled(target).generate(**padded(row), tokenizer=letters(), assistant_model=draft, speculative=True, max_new_tokens=MAX_NEW, pad_token_id=0)
    assert torch.equal(out, expected)
    assert target.generation_config.stop_strings == [text_of(text[2:4])]


def test_stop_strings_end_each_row_of_a_batch_on_its_own():
    target = tiny_llama(6)
    draft, texts = knowing(target, ROWS)
    stop = [text_of(text[3:5]) for text in texts[:2]]
    expected = plain(target, ROWS, max_new_tokens=MAX_NEW, stop_strings=stop, tokenizer=letters())
    out = speculate(target, ROWS, draft, 7, max_new_tokens=MAX_NEW, stop_strings=stop, tokenizer=letters())
    assert generated(out, ROWS) == expected


def test_a_call_in_another_thread_finds_the_models_own_stop_strings():
    target, row = enabled(tiny_llama(6)), ROWS[:1]
    (text,) = plain(target, row, max_new_tokens=MAX_NEW)
    target.generation_config.stop_strings, found = [text_of(text[2:4])], []
    expected = target.generate(**padded(row), tokenizer=letters(), max_new_tokens=MAX_NEW, pad_token_id=0)

    def work():
        for _ in range(6):
            found.append(target.generate(**padded(row), tokenizer=letters(), speculative=True, max_new_tokens=MAX_NEW, pad_token_id=0))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 18 and all(torch.equal(out, expected) for out in found)
    assert target.generation_config.stop_strings == [text_of(text[2:4])]


@pytest.mark.parametrize("length, options", [(13, {"max_new_tokens": 20}), (40, {"max_new_tokens": 20}), (15, {})])
def test_a_max_length_criterion_of_the_callers_own_replaces_the_one_of_the_config(length, options):
    target, row = tiny_llama(6), ROWS[:1]
    criteria = StoppingCriteriaList([MaxLengthCriteria(length)])
    expected = enabled(target).generate(**padded(row), do_sample=False, pad_token_id=0, stopping_criteria=criteria, **options)
    out = enabled(target).generate(**padded(row), do_sample=False, pad_token_id=0, stopping_criteria=criteria, speculative=True, **options)
    assert torch.equal(out, expected)
