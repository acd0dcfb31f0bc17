"""The datastore: sorted like Python sorts it, found like a search through all of it finds it, and damaged files are refused."""

import json

import numpy as np
import pytest

from hf_specdec.drafts import RetrievalDraft
from hf_specdec.drafts import datastore as module
from hf_specdec.drafts.datastore import CONTEXT, Datastore
from hf_specdec.drafts.retrieval import _most_frequent
from tests.helpers import VOCAB, generated, plain, prompts, repetitive, speculate, tiny_llama, word_tokenizer


def documents(seed: int, vocab: int, longest: int = 60) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab, generator.integers(0, longest)) for _ in range(4)] + [np.array([0])]


@pytest.mark.parametrize("chunk", [7, 64, 2**22])
@pytest.mark.parametrize("vocab", [1, 2, 5, 200_000])
def test_suffixes_are_sorted_and_every_match_is_found(vocab, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    generator = np.random.default_rng(chunk)
    for seed in range(4):
        few = documents(seed, min(vocab, 5))
        store = Datastore.build(few, vocab)
        text = store.tokens.tolist()
        assert [text[i : i + CONTEXT] for i in store.suffixes] == sorted(text[i : i + CONTEXT] for i in range(len(text)))
        assert sorted(store.suffixes.tolist()) == list(range(len(text)))
        for _ in range(15):
            tail = generator.integers(0, min(vocab, 5), 20).tolist()
            longest = next(n for n in range(CONTEXT, -1, -1) if any(text[i : i + n] == tail[20 - n :] for i in range(len(text))))
            n, begin, end = store.match(tail)
            assert n == longest
            assert n == 0 or sorted(store.suffixes[begin:end].tolist()) == [i for i in range(len(text)) if text[i : i + n] == tail[20 - n :]]


def test_a_match_does_not_cross_documents_and_no_continuation_does():
    store = Datastore.build([np.array([1, 2]), np.array([3, 4, 5])], 6)
    assert store.match([2, 3])[0] == 1 and store.match([9, 6])[0] == 0
    assert store.continuations(*store.match([1]), 4, 8) == [[2]] and store.continuations(*store.match([3]), 2, 8) == [[4, 5]]
    assert store.match([0, 3, 4], least=3) == (0, 0, 0)
    assert store.match([2, 6])[0] == 0 and store.match([1, 2, 6, 3])[0] == 1  # 6 stands between documents, and is no token of them


def test_the_tree_holds_the_most_frequent_continuations():
    rows = [[1, 2, 3], [1, 2, 4], [1, 5], [6], [6], []]
    assert _most_frequent(rows, 4, 4) == [(0, 1), (1, 2), (0, 6), (2, 3)]
    assert _most_frequent(rows, 9, 1) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("rows", [repetitive(12), repetitive(12) + prompts(5, seed=4)], ids=["alone", "ragged"])
def test_text_that_is_in_the_datastore_is_proposed(rows):
    target = tiny_llama(3)
    texts = plain(target, rows, max_new_tokens=40)
    draft = RetrievalDraft.from_tokens([row + text for row, text in zip(rows, texts)], vocab_size=VOCAB)
    out = speculate(target, rows, draft, 7, max_new_tokens=40)
    assert generated(out, rows) == texts and out.speculation.block_efficiency > 5


def test_a_file_gives_back_what_was_saved_and_is_mapped(tmp_path):
    draft = RetrievalDraft.from_tokens(documents(1, VOCAB), vocab_size=VOCAB)
    again = RetrievalDraft.load(draft.save(tmp_path / "store.safetensors"), branches=2)
    for name in ("tokens", "suffixes", "firsts"):
        one, other = getattr(draft.datastore, name), getattr(again.datastore, name)
        assert np.array_equal(one, other) and not other.flags.writeable
    assert again.branches == 2 and [path.name for path in tmp_path.iterdir()] == ["store.safetensors"]


def test_texts_are_tokenized_and_another_tokenizer_is_refused(tmp_path):
    tokenizer = word_tokenizer(range(VOCAB))
    (tmp_path / "more.txt").write_text("w3 w4 w5")
    draft = RetrievalDraft.from_texts(["w1 w2 w3", tmp_path / "more.txt"], tokenizer)
    assert draft.datastore.tokens.tolist() == [1, 2, 3, VOCAB, 3, 4, 5, VOCAB]
    path = draft.save(tmp_path / "store.safetensors")
    assert RetrievalDraft.load(path, tokenizer).datastore.vocab_size == VOCAB
    with pytest.raises(ValueError, match="another tokenizer"):
        RetrievalDraft.load(path, word_tokenizer(range(1, VOCAB + 1)))


def test_a_target_with_fewer_tokens_gets_none_that_it_lacks():
    target, row = tiny_llama(3), [5, 6]
    draft = RetrievalDraft.from_tokens([[5, 6, 99, 7], [5, 6, 8]], vocab_size=100, min_match=1)
    out = speculate(target, [row], draft, 4)
    assert generated(out, [row]) == plain(target, [row])


def damaged(path, **changes):
    """The same file with other arrays or metadata."""
    from safetensors.numpy import load_file, save_file

    arrays = {name: array.copy() for name, array in load_file(path).items()}
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    metadata = header["__metadata__"] | {name: changes.pop(name) for name in list(changes) if name in header["__metadata__"]}
    for name, (at, value) in changes.items():
        arrays[name][at] = value
    save_file(arrays, path, metadata)


@pytest.mark.parametrize(("changes", "words"), [
    (dict(tokens=(0, VOCAB + 1)), "outside its vocabulary"), (dict(tokens=(0, -1)), "outside its vocabulary"),
    (dict(suffixes=(0, 10_000)), "outside its text"), (dict(suffixes=(3, -1)), "outside its text"),
    (dict(firsts=(4, 3)), "does not fit its text"), (dict(tokens=(-1, 0)), "do not fit together"),
    (dict(version="2"), "written in version 2"), (dict(version="x"), "names version"), (dict(vocab_size="7"), "do not fit together"),
    (dict(format="other"), "not a datastore"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_a_damaged_file_is_refused_by_name(changes, words, tmp_path):
    path = RetrievalDraft.from_tokens(documents(1, VOCAB), vocab_size=VOCAB).save(tmp_path / "store.safetensors")
    damaged(path, **changes)
    with pytest.raises(ValueError, match=f"store.safetensors.*{words}"):
        RetrievalDraft.load(path)


def test_a_truncated_or_foreign_file_is_refused_by_name(tmp_path):
    path = RetrievalDraft.from_tokens(documents(1, VOCAB), vocab_size=VOCAB).save(tmp_path / "store.safetensors")
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:20], b"", b"not at all" * 20):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="store.safetensors is truncated, damaged or not a safetensors file"):
            RetrievalDraft.load(path)


@pytest.mark.parametrize(("arguments", "words"), [
    (dict(sources=[[]]), "1 to"), (dict(sources=[[5]], vocab_size=5), "ids from 5"), (dict(sources=[[1]], branches=0), "branches=0"),
    (dict(sources=[[1]], min_match=17), "min_match=17"), (dict(sources=[[1]], vocab_size=2**21), "vocab_size="),
])
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        RetrievalDraft.from_tokens(**arguments)


def test_nothing_is_written_to_a_stream_that_is_no_terminal(tmp_path, capfd):
    draft = RetrievalDraft.from_texts(["w1 w2 w3 w4"], word_tokenizer(range(VOCAB)))
    draft.save(tmp_path / "store.safetensors")
    assert capfd.readouterr() == ("", "")
