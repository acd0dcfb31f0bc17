"""The n-gram draft on its own: what it counts, proposes, keeps on disk and refuses. The conformance tests run it in the loop."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_specdec.drafts import Context, NGramDraft
from hf_specdec.noise import Noise

VOCAB = 7


def corpus(documents: int = 3, length: int = 60, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for _ in range(documents)]


def context(*rows: list[int], vocab: int = VOCAB, do_sample: bool = False, seed: int = 0) -> Context:
    noise = Noise([seed + b for b in range(len(rows))])
    return Context(list(rows), 1000, vocab, torch.device("cpu"), SimpleNamespace(do_sample=do_sample), noise.uniform)


def word_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(("[unk]", *words))}, unk_token="[unk]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[unk]")


def counted(documents: list[list[int]], order: int) -> dict[int, dict[tuple, Counter]]:
    """The same counts the slow way: {n: {context: Counter of next tokens}}."""
    levels = {n: defaultdict(Counter) for n in range(1, order + 1)}
    for row in documents:
        for n, level in levels.items():
            for end in range(n - 1, len(row)):
                level[tuple(row[end - n + 1 : end])][row[end]] += 1
    return levels


# --- counting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2, 5])
def test_every_count_is_that_of_a_plain_count_document_by_document(order):
    documents = corpus()
    table = NGramDraft.from_tokens(documents, order=order, vocab_size=VOCAB).table
    for n, level in counted(documents, order).items():
        assert len(table.levels[n - 1].keys) == len(level)
        for tail, expected in level.items():
            found, tokens, counts = table.match(list(tail), min_order=n)
            assert found == n and dict(zip(tokens.tolist(), counts.tolist())) == dict(expected)
            assert counts.tolist() == sorted(counts.tolist(), reverse=True)


def test_rare_ngrams_can_be_left_out_but_never_unigrams():
    documents = corpus()
    table = NGramDraft.from_tokens(documents, order=3, min_count=2, vocab_size=VOCAB).table
    kept = sum(count >= 2 for level in (2, 3) for after in counted(documents, 3)[level].values() for count in after.values())
    assert sum(len(level.tokens) for level in table.levels[1:]) == kept
    assert int(table.levels[0].counts.sum()) == sum(map(len, documents))


def test_token_files_count_as_the_lists_they_hold(tmp_path):
    documents = corpus(2)
    np.save(tmp_path / "first.npy", np.array(documents[0], np.uint16))
    (tmp_path / "rest.txt").write_text("\n".join(" ".join(map(str, row)) for row in documents[1:]) + "\n\n")
    files = NGramDraft.from_tokens([tmp_path / "first.npy", str(tmp_path / "rest.txt")], vocab_size=VOCAB).table
    lists = NGramDraft.from_tokens(documents, vocab_size=VOCAB).table
    assert all(np.array_equal(a, b) for one, other in zip(files.levels, lists.levels) for a, b in zip(one, other))


def test_texts_are_tokenized_one_by_one_and_files_are_read(tmp_path):
    tokenizer = word_tokenizer("the", "cat", "sat", "ran")
    (tmp_path / "more.txt").write_text("the cat ran")
    draft = NGramDraft.from_texts(["the cat sat", "the cat sat", tmp_path / "more.txt"], tokenizer, order=3)
    the, cat, sat, ran = tokenizer("the cat sat ran")["input_ids"]
    assert draft.propose(context([the], vocab=5), [2]).tokens.tolist() == [[cat, sat]]
    assert draft.table.match([the, cat])[1].tolist() == [sat, ran]
    assert draft.table.match([ran], min_order=2)[0] == 0, "n-grams crossed from one text into the next"


# --- proposing ----------------------------------------------------------------------------------------------------------


def test_the_most_frequent_continuation_of_the_longest_match_is_proposed_with_back_off():
    draft = NGramDraft.from_tokens([[1, 2, 3, 1, 2, 3, 1, 2, 4], [5, 2, 4]], order=3)
    ctx = context([1, 2], [5, 2], [6, 2], [0, 6])
    assert draft.evidence(ctx) == [3, 3, 2, -1]
    proposal = draft.propose(ctx, [1, 1, 1, 1])
    assert proposal.sizes == [1, 1, 1, 0] and proposal.probs is None
    assert proposal.tokens[:3, 0].tolist() == [3, 4, 3], "2 is followed by 3 twice, by 4 twice: the smaller id goes first"


def test_a_chain_goes_on_from_its_own_tokens_and_stops_where_nothing_is_known():
    draft = NGramDraft.from_tokens([[1, 2, 3, 4, 5]])
    proposal = draft.propose(context([1], [9, 4], [5], [1, 2]), [10, 10, 10, 0])
    assert proposal.sizes == [4, 1, 0, 0]
    assert proposal.tokens[0, :4].tolist() == [2, 3, 4, 5] and proposal.tokens[1, 0] == 5
    proposal.check(4, VOCAB, "ngram")


def test_unigrams_are_drafted_only_on_request_or_from_a_table_that_has_nothing_else():
    documents = [[3, 3, 3, 1]]
    assert NGramDraft.from_tokens(documents, order=2).evidence(context([6])) == [-1]
    for draft in (NGramDraft.from_tokens(documents, order=2, min_order=1), NGramDraft.from_tokens(documents, order=1)):
        assert draft.evidence(context([6])) == [1] and draft.propose(context([6]), [2]).tokens[0, 0] == 3


def test_tokens_the_target_does_not_have_are_not_proposed():
    draft = NGramDraft.from_tokens([[1, 9, 1, 9, 1, 2, 3, 8]], vocab_size=10, order=2)
    assert draft.propose(context([1], vocab=5), [3]).tokens.tolist() == [[2, 3]]
    assert draft.evidence(context([3], vocab=5)) == [-1]
    drawn = NGramDraft(draft.table, sample=True).propose(context([1], vocab=5, do_sample=True), [1])
    assert drawn.tokens.tolist() == [[2]] and drawn.probs[0, 0].tolist() == [0, 0, 1, 0, 0]


def test_sampled_tokens_follow_the_counts_and_the_counts_are_the_law_that_is_reported():
    documents, n = corpus(20), 4000
    draft = NGramDraft.from_tokens(documents, order=2, vocab_size=VOCAB, sample=True)
    proposal = draft.propose(context(*[[3]] * n, do_sample=True), [2] * n)
    proposal.check(n, VOCAB, "ngram")
    counts = counted(documents, 2)[2]
    first = torch.tensor([counts[(3,)][token] for token in range(VOCAB)], dtype=torch.float64)
    assert torch.allclose(proposal.probs[:, 0].double(), (first / first.sum()).expand(n, VOCAB), atol=1e-6)
    observed = torch.bincount(proposal.tokens[:, 0], minlength=VOCAB).numpy()
    assert chisquare(observed, (n * first / first.sum()).numpy()).pvalue > 1e-6
    for row in range(20):
        second = torch.tensor([counts[(int(proposal.tokens[row, 0]),)][token] for token in range(VOCAB)], dtype=torch.float64)
        assert torch.allclose(proposal.probs[row, 1].double(), second / second.sum(), atol=1e-6)


def test_a_sampled_row_is_the_same_alone_as_in_a_ragged_batch_and_a_greedy_call_draws_nothing():
    draft = NGramDraft.from_tokens(corpus(), vocab_size=VOCAB, sample=True)
    together = draft.propose(context([1, 2], [3], [4, 5], do_sample=True), [2, 0, 4])
    alone = draft.propose(context([4, 5], do_sample=True, seed=2), [4])
    assert together.sizes == [2, 0, 4] and torch.equal(together.tokens[2], alone.tokens[0])
    assert torch.equal(together.probs[2], alone.probs[0])
    assert draft.propose(context([1, 2]), [3]).probs is None


def test_it_serves_stock_assisted_decoding():
    draft = NGramDraft.from_tokens([[1, 2, 3, 4, 5]])
    ids, logits = draft.get_candidates(torch.tensor([[1, 2]]))
    assert ids.tolist() == [[1, 2, 3, 4, 5]] and logits is None


# --- files --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    draft = NGramDraft.from_tokens(corpus(), vocab_size=VOCAB)
    return draft, draft.save(tmp_path / "table.safetensors")


def test_a_saved_table_proposes_the_same_and_is_mapped_not_read(saved):
    draft, path = saved
    loaded = NGramDraft.load(path)
    rows = [row[:9] for row in corpus()]
    assert torch.equal(draft.propose(context(*rows), [6] * 3).tokens, loaded.propose(context(*rows), [6] * 3).tokens)
    array = loaded.table.levels[-1].tokens
    while not isinstance(array, np.memmap):
        array = array.base
    assert array.mode == "r" and not loaded.table.levels[-1].tokens.flags.writeable


def test_saving_leaves_one_file_and_saving_over_a_loaded_table_works(saved):
    draft, path = saved
    NGramDraft.load(path).save(path)
    again = NGramDraft.load(path).table.levels
    assert all(np.array_equal(a, b) for one, other in zip(draft.table.levels, again) for a, b in zip(one, other))
    assert [item.name for item in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_save_leaves_the_old_file_as_it_was(saved, monkeypatch, error):
    draft, path = saved
    before = path.read_bytes()

    def half(tensors, filename, metadata):
        filename.write_bytes(before[: len(before) // 2])
        raise error

    monkeypatch.setattr("safetensors.numpy.save_file", half)
    with pytest.raises(error):
        draft.save(path)
    assert path.read_bytes() == before and [item.name for item in path.parent.iterdir()] == [path.name]


def rewritten(path, change=None, metadata=None) -> None:
    """Write the table again with some arrays or metadata changed."""
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    with safe_open(path, "numpy") as file:
        old = file.metadata()
    arrays = load_file(path)
    if change:
        change(arrays)
    save_file(arrays, path, {**old, **(metadata or {})})


def put(name: str, index: int, value: int):
    def change(arrays):
        arrays[name][index] = value

    return change


DAMAGE = {
    "offsets of order 2 that do not ascend": put("2.offsets", 1, 0),
    "offsets of order 2 that are out of range": put("2.offsets", -1, 10**6),
    "offsets of order 3 that are out of range": put("3.offsets", 0, -1),
    "unsorted keys in order 4": put("4.keys", 0, 2**62),
    "token ids in order 5 outside its vocabulary of 7": put("5.tokens", 3, VOCAB),
    "token ids in order 1 outside its vocabulary of 7": put("1.tokens", 0, -1),
    "counts of order 1 that are not sorted": put("1.counts", -1, 10**6),
    "counts of order 2 that are not sorted": put("2.counts", -1, 0),
    "does not hold the arrays of orders 1 to 5": lambda arrays: arrays.pop("5.counts"),
    "holds 1.tokens as I64": lambda arrays: arrays.update({"1.tokens": arrays["1.tokens"].astype(np.int64)}),
    "offsets of order 2 that are out": lambda arrays: arrays.update({"2.keys": arrays["2.keys"][:-1]}),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_table_is_refused_with_its_name_and_the_remedy(saved, what):
    _, path = saved
    rewritten(path, DAMAGE[what])
    with pytest.raises(ValueError, match=f"table.safetensors .*{what}.*; build it again"):
        NGramDraft.load(path)


@pytest.mark.parametrize("metadata, what", [
    ({"format": "pt"}, "not an n-gram table"), ({"order": "9"}, "order 9"), ({"order": "-1"}, "order '-1'"),
    ({"vocab_size": "1e3"}, "vocab_size '1e3'"), ({"vocab_size": "0"}, "vocabulary 0"), ({"order": "4"}, "orders 1 to 4"),
])  # fmt: skip
def test_foreign_metadata_is_refused(saved, metadata, what):
    _, path = saved
    rewritten(path, metadata=metadata)
    with pytest.raises(ValueError, match=f"table.safetensors .*{what}.*; build it again"):
        NGramDraft.load(path)


def test_a_newer_format_asks_for_an_upgrade(saved):
    _, path = saved
    rewritten(path, metadata={"version": "2"})
    with pytest.raises(ValueError, match="table.safetensors: written in version 2 .* upgrade hf-specdec"):
        NGramDraft.load(path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(saved, keep):
    _, path = saved
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="table.safetensors is truncated, damaged or not a safetensors file"):
        NGramDraft.load(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"PK\x03\x04 this is no safetensors file at all")
    with pytest.raises(ValueError, match="weights.safetensors is truncated, damaged or not a safetensors file"):
        NGramDraft.load(path)


def test_a_table_built_with_another_tokenizer_is_refused_where_both_are_known(tmp_path):
    right, wrong = word_tokenizer("a", "b", "c"), word_tokenizer("b", "a", "c")
    path = NGramDraft.from_texts(["a b c"], right).save(tmp_path / "table.safetensors")
    assert NGramDraft.load(path, tokenizer=right).table.vocab_size == 4
    with pytest.raises(ValueError, match="table.safetensors was built with another tokenizer"):
        NGramDraft.load(path, tokenizer=wrong)
    unknown = NGramDraft.from_tokens([[1, 2, 3]]).save(tmp_path / "unknown.safetensors")
    assert NGramDraft.load(unknown, tokenizer=wrong).table.fingerprint == ""


# --- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, named", [
    (dict(order=0), "^order=0"), (dict(order=9), "^order=9"), (dict(order=2.5), "^order=2.5"), (dict(min_count=0), "^min_count=0"),
    (dict(min_order=6), "^min_order=6"), (dict(min_order=0), "^min_order=0"), (dict(vocab_size=2**24 + 1), "^vocab_size="),
    (dict(vocab_size=3), r"^sources\[0\] holds ids from 0 to 6; they must be in 0..2"),
])  # fmt: skip
def test_arguments_out_of_range_are_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        NGramDraft.from_tokens(corpus(), **arguments)


@pytest.mark.parametrize("sources, named", [
    ([], "not a single token"), ([[]], "not a single token"), ([[1, -2]], r"sources\[0\] holds ids from -2"),
    ([[1], [0.5]], r"sources\[1\] holds float64"), ([1, 2], r"sources\[0\] holds int64 of shape \(\)"),
    ([[[1, 2]]], r"sources\[0\] holds int64 of shape \(1, 2\)"), ([["a"]], r"sources\[0\] holds"),
])  # fmt: skip
def test_sources_that_are_no_token_ids_are_refused_by_name(sources, named):
    with pytest.raises(ValueError, match=named):
        NGramDraft.from_tokens(sources)


def test_token_files_that_are_none_are_refused_by_name(tmp_path):
    (tmp_path / "words.txt").write_text("1 2 three")
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY\x01")
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    for name in ("words.txt", "broken.npy", "objects.npy"):
        with pytest.raises(ValueError, match=f"{name} is not a token file"):
            NGramDraft.from_tokens([tmp_path / name])


def test_one_text_in_the_place_of_a_list_and_items_that_are_no_text_are_refused():
    tokenizer = word_tokenizer("a")
    with pytest.raises(ValueError, match="^texts: expected a list"):
        NGramDraft.from_texts("a a a", tokenizer)
    with pytest.raises(ValueError, match=r"^texts\[1\] is a bytes"):
        NGramDraft.from_texts(["a", b"a"], tokenizer)
