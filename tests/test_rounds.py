"""What every round leaves behind: the keys and values of a fresh prefill, in a cache no larger than it has to be, without the rows
that have ended; and no trace of a row's neighbours, in its text or in its processors."""

from __future__ import annotations

import itertools
from functools import lru_cache

import pytest
import torch
from transformers import DynamicCache

import hf_specdec.call
from hf_specdec.compat import CACHE
from hf_specdec.drafts import MixtureDraft, ModelDraft, NGramDraft, PromptLookupDraft, RecyclingDraft, SuffixAutomatonDraft, UniformDraft
from hf_specdec.kv_cache import SLACK
from hf_specdec.loop import SpeculativeLoop

from .conformance.builders import early_exit
from .helpers import (
    VOCAB, KnowingTreeDraft, ScriptedDraft, TreeDraft, build, generated, perturbed, plain, prompts, repetitive, speculate, tiny_llama,
)

ROWS = repetitive(14) + prompts(3, 9, 1, seed=6) + repetitive(7, seed=2)  # none is the beginning of another
ENDS = (2, 13, 6, 9, 4)


@lru_cache
def llama():
    return tiny_llama(3)


@lru_cache
def texts(target) -> list[list[int]]:
    """Prompts with their plain greedy continuation."""
    return [row + new for row, new in zip(ROWS, plain(target, ROWS, max_new_tokens=40))]


def table(target, **options) -> NGramDraft:
    return NGramDraft.from_tokens(texts(target), order=3, vocab_size=VOCAB, min_order=1, **options)


# name -> target -> draft
DRAFTS = {
    "model": lambda target: ModelDraft(perturbed(target, 0.08)),
    "prompt_lookup": lambda target: PromptLookupDraft(),
    "ngram": table,
    "uniform": lambda target: UniformDraft(),
    "scripted": lambda target: ScriptedDraft.knowing(texts(target), wrong=4),
    "tree": lambda target: TreeDraft(),
    "knowing tree": lambda target: KnowingTreeDraft(texts(target)),
    "suffix automaton": lambda target: SuffixAutomatonDraft(),
    "recycling": lambda target: RecyclingDraft(),
    "early exit": early_exit,
    "mixture": lambda target: MixtureDraft(["suffix_automaton", ModelDraft(perturbed(target, 0.08))]),
}
every_draft = pytest.mark.parametrize("draft", DRAFTS)
greedy_and_sampled = pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])


def ending(target) -> list[int]:
    """Tokens that, taken as EOS, end the rows at different places."""
    return sorted({text[len(row) + i] for text, row, i in zip(texts(target), ROWS, ENDS)})


# --- rows that part -----------------------------------------------------------------------------------------------------


@pytest.mark.share(1 / 4)
@greedy_and_sampled
@pytest.mark.parametrize("draft", ["model", "prompt_lookup", "uniform", "knowing tree", "suffix automaton", "recycling", "early exit"])
def test_a_row_does_not_depend_on_its_neighbours(draft, do_sample):
    target = llama()
    made, row, eos, found = DRAFTS[draft](target), ROWS[1], ending(target)[:2], []
    for neighbours in ([], [ROWS[0]], [row], prompts(40, 2, 17, seed=8)):
        rows, seeds = [*neighbours, row], [*range(100, 100 + len(neighbours)), 3]
        out = speculate(target, rows, made, 4, do_sample=do_sample, eos_token_id=eos, speculative={"seed": seeds})
        found.append(generated(out, rows)[-1])
    assert all(text == found[0] for text in found)


def test_the_trace_counts_what_every_row_got():
    target = llama()
    out = speculate(target, ROWS, DRAFTS["scripted"](target), 5, eos_token_id=ending(target))
    trace, committed, accepted = out.speculation, [0] * len(ROWS), [0] * len(ROWS)
    for entry in itertools.chain(*trace.rounds):
        committed[entry.row] += entry.committed
        accepted[entry.row] += entry.accepted
    assert committed == trace.new_tokens == [len(text) for text in generated(out, ROWS)]
    assert accepted == trace.draft_mask.sum(-1).tolist() and sum(accepted) == trace.accepted
    assert trace.target_calls == len(trace.rounds)


# --- the cache ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def watch(monkeypatch):
    """watch(check): run check(loop) after every round that leaves rows; gives the list of their numbers."""

    def install(check):
        seen = []

        class Watched(SpeculativeLoop):
            peak = 0  # most slots that a pass has read

            def round(self):
                super().round()
                self.peak = max(self.peak, self.target.cache.plan.visible)
                if self.sequences.active:
                    check(self)
                    seen.append(len(self.sequences.active))

        monkeypatch.setattr(hf_specdec.call, "SpeculativeLoop", Watched)
        return seen

    return install


@torch.no_grad()
def prefilled(model, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [H, n, D] per layer of a fresh pass over `tokens`."""
    cache = DynamicCache()
    model(input_ids=torch.tensor([tokens]), **{CACHE: cache}, use_cache=True)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def assert_same_cache(found, expected) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        for buffer, fresh in zip(ours, theirs):
            torch.testing.assert_close(buffer, fresh, atol=1e-5, rtol=0)


def holds_a_fresh_prefill(loop) -> None:
    """All but the last committed token of every row that goes on, as one pass would have cached them."""
    assert loop.target.lengths == [len(row) - 1 for row in loop.sequences.tokens]
    for b, row in enumerate(loop.sequences.tokens):
        assert_same_cache(loop.target.row(b), prefilled(loop.target.model, row[:-1]))


@every_draft
def test_a_row_that_has_ended_leaves_the_buffers(draft, watch):
    def check(loop):
        assert loop.target.lengths == [len(row) - 1 for row in loop.sequences.tokens]
        assert all(layer.keys.shape[0] == layer.values.shape[0] == len(loop.sequences.active) for layer in loop.target.cache.layers)

    target, seen = llama(), watch(check)
    speculate(target, ROWS, DRAFTS[draft](target), 2, eos_token_id=ending(target))
    assert len(seen) >= 3 and len(set(seen)) >= 2, "no row has left while others went on"


_SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=256)
ARCHITECTURES = {
    "llama": llama,
    "mistral, window 8": lambda: build("mistral", 3, **_SIZES, sliding_window=8),
    "gemma 2, hybrid": lambda: build("gemma2", 3, "eager", **_SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=8,
                                     layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=False),
    "gpt2": lambda: build("gpt2", 3, vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256),
}


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]], ids=["ragged", "alone"])
@pytest.mark.parametrize("draft", ["scripted", "knowing tree", "mixture"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_after_every_round_the_cache_is_that_of_a_fresh_prefill(name, draft, rows, watch):
    target = ARCHITECTURES[name]()
    seen = watch(holds_a_fresh_prefill)
    out = speculate(target, rows, DRAFTS[draft](target), 7, max_new_tokens=16)
    assert len(seen) >= 3 and max(entry.accepted for entries in out.speculation.rounds for entry in entries) >= 2
    assert generated(out, rows) == plain(target, rows, max_new_tokens=16)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plain_rounds_leave_the_cache_of_a_fresh_prefill_too(name, watch):
    target = ARCHITECTURES[name]()
    seen = watch(holds_a_fresh_prefill)
    speculate(target, ROWS[:1], ScriptedDraft(lambda row: []), 4, max_new_tokens=12)
    assert len(seen) == 11


def test_accepted_tree_paths_had_to_be_gathered(monkeypatch):
    """What the test of the trees relies on: some accepted path is not the first nodes of the tree."""
    target, paths = llama(), []

    class Watched(SpeculativeLoop):
        def _emit(self, proposal, on_path, *rest):
            paths.extend(row.nonzero().flatten().tolist() for row in on_path)
            return super()._emit(proposal, on_path, *rest)

    monkeypatch.setattr(hf_specdec.call, "SpeculativeLoop", Watched)
    speculate(target, ROWS, DRAFTS["knowing tree"](target), 7)
    assert any(path != list(range(len(path))) for path in paths)


def test_sampled_trees_leave_the_cache_of_a_fresh_prefill(watch):
    target = llama()
    seen = watch(holds_a_fresh_prefill)
    out = speculate(target, ROWS, TreeDraft(), 5, do_sample=True, temperature=2.5, max_new_tokens=16, speculative={"seed": 0})
    assert len(seen) >= 3 and out.speculation.accepted > 3


def test_after_every_round_the_drafts_cache_is_that_of_a_fresh_prefill(watch):
    target = llama()
    draft, eos = DRAFTS["model"](target), ending(target)

    def check(loop):
        for b, (length, base, guess) in enumerate(zip(draft.cached.lengths, draft.base, draft._drafted())):
            held = loop.sequences.tokens[b][:base] + guess
            assert base - 1 <= length <= len(held)
            assert_same_cache(draft.cached.row(b), prefilled(draft.model, held[:length]))

    seen = watch(check)
    out = speculate(target, ROWS, draft, 4, eos_token_id=eos)
    assert len(seen) >= 3 and generated(out, ROWS) == plain(target, ROWS, eos_token_id=eos)


@pytest.mark.parametrize("draft", ["model", "prompt_lookup", "knowing tree", "early exit", "mixture"])
def test_the_cache_that_comes_back_is_that_of_a_fresh_prefill(draft):
    target = llama()
    out = speculate(target, ROWS, DRAFTS[draft](target), 5, eos_token_id=ending(target))
    width = max(map(len, ROWS))
    for b, (row, new) in enumerate(zip(ROWS, generated(out, ROWS))):
        pad, n = width - len(row), len(row) + len(new) - 1
        found = [(layer.keys[b, :, pad : pad + n], layer.values[b, :, pad : pad + n]) for layer in out[CACHE].layers]
        assert_same_cache(found, prefilled(target, (row + new)[:-1]))


@pytest.mark.share(2)
@pytest.mark.parametrize("k", [1, 20])
@pytest.mark.parametrize("draft", ["prompt_lookup", "scripted", "knowing tree"])
def test_the_cache_is_never_far_ahead_of_the_longest_row_and_its_proposal(draft, k, watch):
    """Never more slots than the longest row can need; before that, at most an eighth (or SLACK) more than were used."""
    target, new = llama(), 120
    limit = max(map(len, ROWS)) + new + k

    def check(loop):
        slots = {buffer.shape[2] for layer in loop.target.cache.layers for buffer in (layer.keys, layer.values)}
        assert slots == {loop.target.cache.capacity}
        assert loop.peak <= max(len(row.tokens) for row in loop.sequences.rows) + k
        assert max(slots) <= min(limit, loop.peak + max(SLACK, loop.peak // 8))

    seen = watch(check)
    speculate(target, ROWS, DRAFTS[draft](target), k, max_new_tokens=new)
    assert len(seen) >= 5


# --- processors -----------------------------------------------------------------------------------------------------------


# name -> options; what transformers counts or compares, it does with the row's own tokens
PER_ROW = {
    "min_new_tokens": dict(min_new_tokens=9),
    "exponential_decay_length_penalty": dict(exponential_decay_length_penalty=(4, 1.6)),
    "forced_eos_token_id": dict(forced_eos_token_id=3),
    "begin_suppress_tokens": dict(begin_suppress_tokens=list(range(0, VOCAB, 2))),
    "repetition_penalty": dict(repetition_penalty=1.8),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=1),
    "bad_words_ids": dict(bad_words_ids=[[2, 3], *([token] for token in range(1, VOCAB, 4))]),
    "sequence_bias": dict(sequence_bias=[[[5], 3.0], [[4, 6], -8.0]]),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=1.5),
    "encoder_no_repeat_ngram_size": dict(encoder_no_repeat_ngram_size=1),
}


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("draft", ["prompt_lookup", "model"])
@pytest.mark.parametrize("name", PER_ROW)
def test_processors_treat_a_row_as_in_a_batch_of_its_own(name, draft):
    target = llama()
    options = {**PER_ROW[name], "eos_token_id": ending(target)[:2]}
    out = speculate(target, ROWS, DRAFTS[draft](target), 4, **options)
    assert generated(out, ROWS) == plain(target, ROWS, **options)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", PER_ROW)
def test_the_processors_of_the_test_above_make_a_difference(name):
    target = llama()
    eos = ending(target)[:2]
    assert plain(target, ROWS, eos_token_id=eos) != plain(target, ROWS, eos_token_id=eos, **PER_ROW[name])
