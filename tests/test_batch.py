"""A row of a batch never knows of its neighbours: it equals its own batch-1 run, whatever they accept and whenever they end."""

import pytest
import torch

from hf_specdec.cached_model import CachedModel
from hf_specdec.drafts import (
    CascadeDraft, HorizontalCascadeDraft, MixtureDraft, ModelDraft, PromptLookupDraft, RecyclingDraft, SuffixAutomatonDraft, UniformDraft,
)
from tests.conformance.builders import early_exit, ngram
from tests.helpers import (
    FULL, KnowingTreeDraft, ScriptedDraft, TreeDraft, enabled, generated, padded, perturbed, plain, prompts, repetitive, speculate, tiny_llama,
)

ROWS = repetitive(13) + prompts(2, 7, 1, seed=2) + repetitive(20, seed=3)
MAX_NEW = 24

DRAFTS = {
    "model": lambda target: ModelDraft(perturbed(target, 0.05)),
    "lookup": lambda target: PromptLookupDraft(),
    "ngram": ngram,
    "ngram drawn": lambda target: ngram(target, sample=True),
    "uniform": lambda target: UniformDraft(),
    "tree": lambda target: TreeDraft(),
    "automaton": lambda target: SuffixAutomatonDraft(),
    "recycling": lambda target: RecyclingDraft(),
    "early exit": early_exit,
    "cascade": lambda target: CascadeDraft(perturbed(target, 0.05), PromptLookupDraft()),
    "horizontal cascade": lambda target: HorizontalCascadeDraft(ModelDraft(perturbed(target, 0.05)), ngram(target, sample=True)),
    "mixture, one chosen": lambda target: MixtureDraft([SuffixAutomatonDraft(), ModelDraft(perturbed(target, 0.05))], mode="choose"),
}
every_draft = pytest.mark.parametrize("draft", DRAFTS)
SEEDED = [(draft, seed) for i, draft in enumerate(DRAFTS) for seed in (range(12) if FULL else [i % 3])]


def alone(target, rows, make, seeds, **options) -> list[list[int]]:
    return [generated(speculate(target, [row], make(target), seed=seed, **options), [row])[0] for row, seed in zip(rows, seeds)]


@pytest.mark.share(1 / 6)
@pytest.mark.parametrize(("draft", "seed"), SEEDED)
def test_sampled_rows_equal_their_own_runs_with_their_own_seeds(draft, seed):
    target, options = tiny_llama(seed), dict(k=4, do_sample=True, temperature=0.6, max_new_tokens=MAX_NEW)
    seeds = [100 * seed + i for i in (7, 3, 50, 11, 2)]
    out = speculate(target, ROWS, DRAFTS[draft](target), seed=seeds, **options)
    assert generated(out, ROWS) == alone(target, ROWS, DRAFTS[draft], seeds, **options)


@pytest.mark.share(1 / 6)
@every_draft
def test_one_seed_means_seed_plus_row(draft):
    target, options = tiny_llama(5), dict(k=3, do_sample=True, max_new_tokens=MAX_NEW)
    out = speculate(target, ROWS, DRAFTS[draft](target), seed=40, **options)
    assert generated(out, ROWS) == alone(target, ROWS, DRAFTS[draft], range(40, 40 + len(ROWS)), **options)


@pytest.mark.share(1 / 4)
@every_draft
def test_greedy_rows_equal_their_own_runs(draft):
    target = tiny_llama(1)
    assert generated(speculate(target, ROWS, DRAFTS[draft](target), 4, max_new_tokens=MAX_NEW), ROWS) == plain(target, ROWS, max_new_tokens=MAX_NEW)


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("draft", ["model", "lookup", "tree"])
@pytest.mark.parametrize("options", [dict(repetition_penalty=1.5), dict(no_repeat_ngram_size=2), dict(min_new_tokens=9, eos_token_id=[3, 4, 5, 6])], ids=str)
def test_rows_equal_their_own_runs_under_processors_that_look_at_the_prefix(draft, options):
    target = tiny_llama(1)
    options = dict(k=4, do_sample=True, temperature=0.7, max_new_tokens=MAX_NEW, **options)
    out = speculate(target, ROWS, DRAFTS[draft](target), seed=9, **options)
    assert generated(out, ROWS) == alone(target, ROWS, DRAFTS[draft], range(9, 9 + len(ROWS)), **options)


def test_the_order_of_the_rows_does_not_matter():
    target, options = tiny_llama(2), dict(k=4, do_sample=True, max_new_tokens=MAX_NEW)
    forward = speculate(target, ROWS, perturbed(target), seed=[1, 2, 3, 4, 5], **options)
    backward = speculate(target, ROWS[::-1], perturbed(target), seed=[5, 4, 3, 2, 1], **options)
    assert generated(forward, ROWS) == generated(backward, ROWS[::-1])[::-1]


def test_equal_rows_with_different_seeds_differ_and_with_equal_seeds_do_not():
    target, row = tiny_llama(2), prompts(6)[0]
    texts = generated(speculate(target, [row] * 3, seed=[1, 2, 1], do_sample=True, temperature=1.5), [row] * 3)
    assert texts[0] == texts[2] != texts[1]


# --- different numbers accepted, different ends ---------------------------------------------------------------------------


def uneven(target, rows, max_new=MAX_NEW):
    """A draft that knows the first row by heart, every other token of the second, and nothing of the rest."""
    texts = plain(target, rows, max_new_tokens=max_new)
    first = ScriptedDraft.knowing([rows[0] + texts[0]])
    second = ScriptedDraft.knowing([rows[1] + texts[1]], wrong=2)

    def script(row):
        return first.script(row) or [token if i % 2 else (token + 1) % 61 for i, token in enumerate(second.script(row))]

    return ScriptedDraft(script), texts


def test_rows_accept_different_numbers_and_finish_at_different_rounds():
    target, rows = tiny_llama(4), prompts(9, 4, 6)
    draft, texts = uneven(target, rows)
    out = speculate(target, rows, draft, 5, max_new_tokens=MAX_NEW)
    assert generated(out, rows) == texts
    rounds = [sum(entry.row == row for entries in out.speculation.rounds for entry in entries) for row in range(3)]
    assert rounds[0] == 4 and rounds[2] == MAX_NEW and rounds[0] < rounds[1] <= rounds[2]


def test_rows_that_end_early_are_padded_on_the_right():
    target, rows = tiny_llama(4), prompts(9, 4, 6)
    texts = plain(target, rows, max_new_tokens=MAX_NEW)
    eos = [texts[0][3], texts[1][8]]
    ends = [next((i + 1 for i, token in enumerate(text) if token in eos), MAX_NEW) for text in texts]
    out = speculate(target, rows, perturbed(target), 5, max_new_tokens=MAX_NEW, eos_token_id=eos, pad_token_id=60)
    tails = out.sequences[:, 9:].tolist()
    assert len(set(ends)) > 1 and out.speculation.new_tokens == ends
    assert tails == [text[:end] + [60] * (max(ends) - end) for text, end in zip(texts, ends)]


def test_the_padded_output_is_the_tensor_that_plain_generate_returns():
    target, rows = tiny_llama(4), prompts(9, 4, 6)
    eos = plain(target, rows)[1][4]
    options = dict(max_new_tokens=MAX_NEW, eos_token_id=eos, pad_token_id=0, do_sample=False)
    stock = target.generate(**padded(rows), **options)
    assert torch.equal(speculate(target, rows, perturbed(target), 4, **options).sequences, stock)


def test_a_prompt_padded_on_the_right_is_read_without_its_padding():
    target, rows = tiny_llama(4), prompts(5, 3)
    inputs = {"input_ids": torch.tensor([rows[0], rows[1] + [0, 0]]), "attention_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])}
    out = enabled(target).generate(**inputs, speculative=True, max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert out[:, 5:].tolist() == plain(target, rows, max_new_tokens=10)


@pytest.mark.parametrize("pad", [0, 5, 60])
def test_the_padding_token_does_not_matter(pad):
    target, rows = tiny_llama(4), prompts(9, 2, 6)
    out = enabled(target).generate(**padded(rows, pad), speculative=True, max_new_tokens=12, do_sample=False, pad_token_id=0, repetition_penalty=1.4)
    assert out[:, 9:].tolist() == plain(target, rows, max_new_tokens=12, repetition_penalty=1.4)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_half_precision_batches_with_much_padding_make_no_nan(attn):
    target = tiny_llama(4, attn=attn).to(torch.float16)
    rows = prompts(40, 1)
    out = speculate(target, rows, perturbed(target), 4, max_new_tokens=10, output_logits=True)
    assert all(bool(step.isfinite().all()) for step in out.logits)


def test_num_return_sequences_makes_rows_of_their_own():
    target, row = tiny_llama(2), repetitive(9)[0]
    out = speculate(target, [row], perturbed(target), 4, seed=3, do_sample=True, num_return_sequences=4)
    assert generated(out, [row] * 4) == alone(target, [row] * 4, DRAFTS["model"], range(3, 7), k=4, do_sample=True)


# --- the cache --------------------------------------------------------------------------------------------------------------


class Watch:
    """Looks at the target's cache after every round: (cached, committed) per row, and the slots allocated."""

    def __init__(self, monkeypatch):
        self.cached, self.capacity, self.models, real = [], [], [], CachedModel.commit

        def commit(model, *args, **kwargs):
            real(model, *args, **kwargs)
            if model.role == "target":
                self.models.append(model)
                self.cached.append(list(model.lengths))
                self.capacity += [layer.keys.shape[2] for layer in model.cache.layers]

        monkeypatch.setattr(CachedModel, "commit", commit)


@pytest.mark.parametrize("kind", ["chain", "tree", "lookup", "model"])
def test_after_every_round_the_cache_holds_all_but_the_last_committed_token(kind, monkeypatch):
    target, rows = tiny_llama(4), prompts(9, 4, 6)
    texts = plain(target, rows, max_new_tokens=MAX_NEW)
    finished = [row + text for row, text in zip(rows, texts)]
    draft = {"chain": ScriptedDraft.knowing(finished, wrong=3), "tree": KnowingTreeDraft(finished), "lookup": None, "model": perturbed(target)}[kind]
    watch = Watch(monkeypatch)
    out = speculate(target, rows, draft, 6, max_new_tokens=MAX_NEW)
    lengths = dict(enumerate(map(len, rows)))
    for cached, entries in zip(watch.cached, out.speculation.rounds, strict=True):
        for entry in entries:
            lengths[entry.row] += entry.committed
        assert cached == [lengths[entry.row] - 1 for entry in entries]
    assert generated(out, rows) == texts


@pytest.mark.parametrize("k", [1, 7, 64])
def test_the_cache_has_no_more_slots_than_the_longest_row_and_the_drafted_tokens(k, monkeypatch):
    target, rows = tiny_llama(4), prompts(9, 2, 60)
    watch = Watch(monkeypatch)
    speculate(target, rows, perturbed(target), k, max_new_tokens=90)
    assert max(watch.capacity) <= 60 + 90 + k


def test_the_cache_grows_with_the_text_and_not_at_once_to_the_largest_possible(monkeypatch):
    target, row = tiny_llama(4), prompts(9)[0]
    watch = Watch(monkeypatch)
    eos = plain(target, [row])[0][5]
    speculate(target, [row], None, 4, max_new_tokens=200, eos_token_id=eos)
    assert max(watch.capacity) < 150


def test_rows_that_are_done_leave_the_cache(monkeypatch):
    target, rows = tiny_llama(4), prompts(9, 4, 6)
    draft, _ = uneven(target, rows)
    watch = Watch(monkeypatch)
    out = speculate(target, rows, draft, 5, max_new_tokens=MAX_NEW)
    assert [len(cached) for cached in watch.cached] == [len(entries) for entries in out.speculation.rounds]
    assert len(watch.cached[0]) == 3 and len(watch.cached[-1]) < 3


@pytest.mark.share(3)
@pytest.mark.parametrize("make", DRAFTS.values(), ids=DRAFTS)
def test_the_draft_sees_the_rows_that_go_on_and_only_those(make):
    target, rows = tiny_llama(4), prompts(9, 4, 6)
    draft, seen = make(target), []
    propose = draft.propose

    def watched(context, k):
        seen.append([(row[-1], own) for row, own in zip(context.rows, k, strict=True)])
        return propose(context, k)

    draft.propose = watched
    eos = plain(target, rows)[0][3]
    assert all(row[-1] != eos for row in rows)
    out = speculate(target, rows, draft, 4, eos_token_id=eos)
    ended = [[own for last, own in shown if last == eos] for shown in seen]  # for one round more, since the cache is returned
    assert [len(shown) - len(own) for shown, own in zip(seen, ended)] == [len(entries) for entries in out.speculation.rounds]
    assert any(ended) and not any(sum(ended, []))


def test_a_draft_sees_each_rows_committed_tokens_at_every_round():
    target, rows = tiny_llama(4), prompts(9, 4, 6)
    draft, texts = uneven(target, rows)
    out = speculate(target, rows, draft, 5, max_new_tokens=MAX_NEW)
    lengths = dict(enumerate(map(len, rows)))
    for seen, entries in zip(draft.seen, out.speculation.rounds, strict=True):
        assert seen == [(rows[entry.row] + texts[entry.row])[: lengths[entry.row]] for entry in entries]
        for entry in entries:
            lengths[entry.row] += entry.committed
