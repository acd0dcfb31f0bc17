"""A draft with another tokenizer: the text is what the draft would have written, or the law that of the shared tokens."""

import copy

import pytest
import torch

from hf_specdec.drafts import CascadeDraft, ModelDraft, PromptLookupDraft, TranslatedDraft
from hf_specdec.drafts.translated import spelled
from tests.conformance import law
from tests.encoder_decoders import FAMILIES
from tests.helpers import FULL, VOCAB, generated, perturbed, plain, prompts, repetitive, small_vocabulary_llama, speculate, tiny_llama, word_tokenizer

ROWS = repetitive(12) + prompts(5, seed=4)


def renumbered(model, order: list[int]):
    """The same model under another numbering: its id i is the word order[i]."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))
        other.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight[order])
        head = copy.deepcopy(model.get_output_embeddings())
        head.weight.copy_(model.get_output_embeddings().weight[order])
        other.set_output_embeddings(head)
    return other


def order(vocab: int) -> list[int]:
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["alone", "ragged"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_the_target_itself_under_other_numbers_is_always_right(rows, do_sample):
    target, words = tiny_llama(3), order(VOCAB)
    draft = TranslatedDraft(renumbered(target, words), word_tokenizer(range(VOCAB)), word_tokenizer(words))
    out = speculate(target, rows, draft, 5, do_sample=do_sample, seed=3)
    assert out.speculation.acceptance_rate > 0.999
    if not do_sample:
        assert generated(out, rows) == plain(target, rows)


def test_with_half_of_the_words_shared_the_law_is_the_targets():
    target, words = small_vocabulary_llama(2, law.VOCAB), [3, 1, 5]
    draft = TranslatedDraft(small_vocabulary_llama(5, 3), word_tokenizer(range(law.VOCAB)), word_tokenizer(words))
    seen, propose = [], draft.propose
    draft.propose = lambda context, k: seen.append(propose(context, k)) or seen[-1]
    rows = [[1, 2, 3, 1, 2], [4]]
    found, _ = law.counts(target, rows, draft, 50_000 if FULL else 2_000, 3, 4)
    assert law.worst_p_value(found, [law.joint(target, row, 3) for row in rows], 3) > law.THRESHOLD
    for proposal in seen:
        assert set(proposal.tokens[proposal.valid].tolist()) <= set(words)
        assert not proposal.probs[..., [0, 2, 4]].any()


def test_processors_act_on_the_targets_tokens():
    target, words = tiny_llama(3), order(VOCAB)
    draft = TranslatedDraft(renumbered(target, words), word_tokenizer(range(VOCAB)), word_tokenizer(words))
    out = speculate(target, ROWS, draft, 5, do_sample=True, seed=3, top_k=3, repetition_penalty=1.3)
    assert out.speculation.acceptance_rate > 0.999
    nothing_left = speculate(target, ROWS[:1], TranslatedDraft(tiny_llama(4, vocab_size=2), word_tokenizer(range(VOCAB)), word_tokenizer([3, 5])), 3,
                             do_sample=True, seed=3, prefix_allowed_tokens_fn=lambda row, ids: [7, 8])
    assert set(generated(nothing_left, ROWS[:1])[0]) <= {7, 8}


def test_text_of_subwords_is_cut_where_the_target_cuts_it():
    """Real tokenizers of bytes with other merges: the draft writes characters, the target has longer pieces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def bytes_with(merges):
        pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {piece: i for i, piece in enumerate([*pieces, *("".join(pair) for pair in merges)])}
        core = Tokenizer(models.BPE(vocab, merges))
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)

    ours, theirs = bytes_with([("a", "b"), ("ab", "c"), ("Ġ", "ab")]), bytes_with([("b", "c")])
    draft = TranslatedDraft(tiny_llama(3, vocab_size=len(theirs)), ours, theirs)
    row, before = ours("x abc ab")["input_ids"], theirs("x abc ab")["input_ids"]
    written = theirs("x abc")["input_ids"]
    assert draft._translated(row, before, written, len(ours)) == ours("x abc")["input_ids"]
    half = theirs("é")["input_ids"][:1]
    assert draft._translated(row, before, [*written, *half], len(ours)) == ours("x abc")["input_ids"]
    assert draft._translated(row, before, written, 5) == []


def test_the_drafts_cache_is_that_of_the_text():
    target, words = tiny_llama(3), order(VOCAB)
    model = renumbered(perturbed(target, 0.05), words)
    draft = TranslatedDraft(model, word_tokenizer(range(VOCAB)), word_tokenizer(words))
    checked, score = [], None

    def watched(rows, proposal=None):
        logits = score(rows, proposal)
        for b, row in enumerate(rows):
            expected = model(input_ids=torch.tensor([row])).logits[0, -1]
            checked.append(torch.allclose(logits[b, 0], expected, atol=1e-4))
        return logits

    start = draft.start

    def started(context):
        nonlocal score
        start(context)
        score, draft.cached.score = draft.cached.score, watched

    draft.start = started
    speculate(target, ROWS, draft, 4)
    assert len(checked) > 10 and all(checked)


def test_a_space_is_a_space_however_a_vocabulary_writes_it():
    assert spelled({"Ġword": 1, "word": 2, "Ã©t": 3, "<s>": 4, "Ã": 5}) == {" word": 1, "word": 2, "ét": 3, "<s>": 4, "Ã": 5}
    assert spelled({"▁word": 7, "word": 8, "ét": 9, "<s>": 0}) == {" word": 7, "word": 8, "ét": 9, "<s>": 0}


def test_vocabularies_that_share_nothing_are_refused():
    with pytest.raises(ValueError, match="draft_tokenizer: shares no token"):
        TranslatedDraft(tiny_llama(), word_tokenizer(range(VOCAB)), word_tokenizer(range(100, 100 + VOCAB)))


def test_a_tokenizer_with_some_more_tokens_than_its_model_makes_worse_guesses_and_no_errors():
    target, small = tiny_llama(), tiny_llama(vocab_size=VOCAB - 5)
    for ours, theirs in ((VOCAB - 5, VOCAB), (VOCAB, VOCAB), (VOCAB + 4, VOCAB)):
        draft = TranslatedDraft(small, tokenizer := word_tokenizer(range(ours)), other := word_tokenizer(range(theirs)))
        tokenizer.name_or_path, other.name_or_path = target.config._name_or_path, small.config._name_or_path = "target", "draft"  # else the first is taken for an exchange
        assert generated(speculate(target, ROWS, draft, 3, max_new_tokens=12), ROWS) == plain(target, ROWS, max_new_tokens=12)


@pytest.mark.parametrize("way", ["by size", "by name", "its own draft"])
def test_tokenizers_that_are_exchanged_are_refused(way):
    target, small = tiny_llama(), tiny_llama(vocab_size=VOCAB if way == "by name" else VOCAB - 2)
    words = range(VOCAB - 1, -1, -1) if way == "by name" else range(VOCAB - 12)
    right = {"tokenizer": word_tokenizer(range(VOCAB)), "assistant_tokenizer": word_tokenizer(words)}
    if way == "by name":
        target.config._name_or_path, small.config._name_or_path = right["tokenizer"].name_or_path, right["assistant_tokenizer"].name_or_path = "target", "draft"
    expected, (ours, theirs) = plain(target, ROWS), right.values()
    if way == "its own draft":
        assert generated(speculate(target, ROWS, TranslatedDraft(small, ours, theirs), 3), ROWS) == expected
        with pytest.raises(ValueError, match="tokenizer and assistant_tokenizer are exchanged.*draft_tokenizer"):
            speculate(target, ROWS, TranslatedDraft(small, theirs, ours), 3)
        return
    assert generated(speculate(target, ROWS, small, 3, **right), ROWS) == expected
    with pytest.raises(ValueError, match="tokenizer and assistant_tokenizer are exchanged"):
        speculate(target, ROWS, small, 3, tokenizer=theirs, assistant_tokenizer=ours)


def test_a_tokenizer_with_many_more_tokens_than_its_model_is_refused():
    target, small = tiny_llama(), tiny_llama(vocab_size=VOCAB // 2)
    for ours, theirs in ((VOCAB, VOCAB), (2 * VOCAB, VOCAB // 2 - 9)):
        with pytest.raises(ValueError, match=f"one of them is not its model's: tokenizer has {ours} tokens and the target {VOCAB}, assistant_tokenizer.*{theirs}"):
            speculate(target, ROWS, TranslatedDraft(small, word_tokenizer(range(ours)), word_tokenizer(range(theirs))), 3)


@pytest.mark.parametrize("draft", [lambda model: TranslatedDraft(model, word_tokenizer(range(VOCAB)), word_tokenizer(range(VOCAB))),
                                   lambda model: CascadeDraft(model, PromptLookupDraft()), ModelDraft], ids=["translated", "cascade", "model"])
def test_an_encoder_that_runs_once_is_no_part_of_the_draft_s_cost(draft):
    target, small = FAMILIES[0].model(), tiny_llama(3)
    decoder = {id(p): p.numel() for part in (target.get_decoder(), target.get_output_embeddings()) for p in part.parameters()}
    assert draft(small).relative_cost(target) == sum(p.numel() for p in small.parameters()) / sum(decoder.values())


def test_generate_translates_by_itself_as_transformers_does():
    target, words = tiny_llama(3), order(VOCAB)
    draft = renumbered(target, words)
    tokenizers = {"tokenizer": word_tokenizer(range(VOCAB)), "assistant_tokenizer": word_tokenizer(words)}
    out = speculate(target, ROWS, draft, 5, **tokenizers)
    assert generated(out, ROWS) == plain(target, ROWS)
    assert out.speculation.acceptance_rate > 0.999 and {entry.source for entries in out.speculation.rounds for entry in entries if entry.proposed} == {"translated"}
    smaller = speculate(target, ROWS[:1], tiny_llama(4, vocab_size=9), 3, **tokenizers | {"assistant_tokenizer": word_tokenizer(range(8, -1, -1))})
    assert generated(smaller, ROWS[:1]) == plain(target, ROWS[:1])


def test_a_tokenizer_with_the_first_words_of_the_targets_alone_is_another_one():
    """Its draft model has a smaller vocabulary, which would be refused as it is."""
    target, both = tiny_llama(3), {"tokenizer": word_tokenizer(range(VOCAB)), "assistant_tokenizer": word_tokenizer(range(31))}
    out = speculate(target, ROWS[:1], tiny_llama(4, vocab_size=31), 3, **both)
    assert generated(out, ROWS[:1]) == plain(target, ROWS[:1]) and out.speculation.config["draft"] == "translated"
