"""The end of the model's context: what fits is generated as plain generate does it, drafted tokens never reach beyond, and what
cannot fit is refused."""

from functools import lru_cache

import pytest
import torch

from hf_specdec import compat
from hf_specdec.compat import CACHE
from tests.architectures import FAMILIES
from tests.helpers import KnowingTreeDraft, ScriptedDraft, build, enabled, generated, padded, perturbed, plain, prompts, speculate

LIMIT = 128  # of every model of the table
BOUND = ["GPT-2", "OPT", "GPT-J", "CTRL", "MPT"]  # positions of their own; the others go on beyond the limit, as in a plain call
every_model = pytest.mark.parametrize("name", ["Llama", "Falcon (ALiBi)", *BOUND])


@lru_cache
def made(name: str):
    return next(family for family in FAMILIES if family.name == name).model("eager")


def longer(model, row: list[int], n: int) -> ScriptedDraft:
    """A draft that is right until plain generate ends, and then goes on."""
    (text,) = plain(model, [row], max_new_tokens=n)
    return ScriptedDraft(lambda tokens: (row + text + [1] * 64)[len(tokens):])


@every_model
@pytest.mark.parametrize("new", [1, 2, 4])
def test_a_prompt_that_fits_is_continued_up_to_the_last_position(name, new):
    model, (row,) = made(name), prompts(LIMIT + 1 - new)
    for draft in (longer(model, row, new), perturbed(model), None):
        out = speculate(model, [row], draft, 8, max_new_tokens=new)
        assert generated(out, [row]) == plain(model, [row], max_new_tokens=new)


@every_model
def test_a_row_that_ends_before_the_limit_is_not_disturbed_by_drafts_that_would_reach_beyond(name):
    model, (row,) = made(name), prompts(LIMIT - 4)
    (text,) = plain(model, [row], max_new_tokens=5)
    out = speculate(model, [row], longer(model, row, 5), 16, max_new_tokens=60, eos_token_id=text[4])
    assert generated(out, [row]) == plain(model, [row], max_new_tokens=5, eos_token_id=text[4])


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "OPT", "GPT-J"])
@pytest.mark.parametrize("wrong", [3, 50])
def test_a_draft_that_proposes_more_than_it_is_asked_for_does_not_reach_beyond_either(name, wrong):
    model, rows = made(name), prompts(LIMIT - 9, LIMIT - 12)
    finished = [row + text for row, text in zip(rows, plain(model, rows, max_new_tokens=10))]

    class Long(ScriptedDraft):
        def propose(self, context, k):
            return super().propose(context, [30] * len(k))

    class Bush(KnowingTreeDraft):
        def propose(self, context, k):
            return super().propose(context, [30] * len(k))

    more = [text + [1] * 40 for text in finished]
    for draft in (Long.knowing(more, wrong=wrong), Bush(more, (0, 0, 1, 3, 4, 2, 5, 7, 8, 9, 10), wrong)):
        for rows_of_call in (rows, rows[:1]):
            out = speculate(model, rows_of_call, draft, 2, max_new_tokens=10)
            assert generated(out, rows_of_call) == [text[len(row):] for row, text in zip(rows_of_call, finished)]
            assert out.speculation.accepted > 0


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "OPT", "GPT-J"])
def test_a_deep_tree_for_one_row_does_not_push_another_one_over_the_limit(name):
    model, rows = made(name), prompts(LIMIT - 1, LIMIT - 30, seed=6)
    eos = plain(model, rows[:1], max_new_tokens=2)[0][1]
    texts = plain(model, rows[:1], max_new_tokens=2, eos_token_id=eos) + plain(model, rows[1:], max_new_tokens=12, eos_token_id=eos)

    class Whole(KnowingTreeDraft):
        def propose(self, context, k):
            return super().propose(context, [8] * len(k))

    draft = Whole([row + text + [1] * 40 for row, text in zip(rows, texts)], (0, 0, 0, 1, 4, 5, 6, 7))
    out = speculate(model, rows, draft, 8, max_new_tokens=12, eos_token_id=eos)
    assert generated(out, rows) == texts and len(texts[0]) <= 2 < len(texts[1])
    assert (out.get(CACHE) is None) == (len(texts[0]) == 2)  # a token beyond the context cannot be cached


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "OPT"])
def test_rows_of_a_batch_reach_the_limit_one_by_one(name):
    model, rows = made(name), prompts(LIMIT, LIMIT - 1, 9)
    if name != "Llama":
        rows = prompts(LIMIT - 3, LIMIT - 5, 9)
    out = speculate(model, rows, perturbed(model), 8, max_new_tokens=4)
    assert generated(out, rows) == plain(model, rows, max_new_tokens=4)


def test_the_cache_of_rows_that_end_at_the_limit_and_before_comes_back():
    model, rows = build("gpt2", vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=24), prompts(23, 23)
    texts = plain(model, rows, max_new_tokens=2)
    first, draft = [text[0] for text in texts], ScriptedDraft.knowing([row + text for row, text in zip(rows, texts)])
    assert first[0] != first[1]
    stock = model.generate(**padded(rows), max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=first[0], return_dict_in_generate=True)
    out = speculate(model, rows, draft, 4, max_new_tokens=2, eos_token_id=first[0])
    assert torch.equal(out.sequences, stock.sequences)
    for ours, theirs in zip(out[CACHE].layers, stock[CACHE].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-5)


def test_rotary_models_go_on_beyond_the_limit_as_in_a_plain_call():
    model, (row,) = made("Llama"), prompts(LIMIT)
    out = speculate(model, [row], longer(model, row, 12), 4, max_new_tokens=12)
    assert generated(out, [row]) == plain(model, [row], max_new_tokens=12)
    assert out.speculation.accepted > 4


@every_model
def test_a_prompt_beyond_the_limit_is_refused(name):
    model = enabled(made(name))
    with pytest.raises(ValueError, match=f"input_ids: the prompt has {LIMIT + 1} tokens and the target's context is {LIMIT}. Shorten"):
        model.generate(**padded(prompts(LIMIT + 1)), speculative=True, max_new_tokens=1)


def test_padding_does_not_count():
    model, (row,) = made("GPT-2"), prompts(LIMIT)
    inputs = {"input_ids": torch.tensor([[0, 0, *row]]), "attention_mask": torch.tensor([[0, 0, *[1] * LIMIT]])}
    out = enabled(model).generate(**inputs, speculative=True, max_new_tokens=1, pad_token_id=0)
    assert out[:, LIMIT + 2:].tolist() == plain(model, [row], max_new_tokens=1)


def test_without_a_length_the_prompt_has_to_leave_room_as_in_a_plain_call():
    model = enabled(made("GPT-2"))
    with pytest.raises(ValueError, match="max_length"):
        model.generate(**padded(prompts(LIMIT)), speculative=True)
    out = model.generate(**padded(prompts(LIMIT - 1)), speculative=True, pad_token_id=0)
    assert out.shape == (1, LIMIT)


# --- Llama 4's attention temperature ------------------------------------------------------------------------------------------------


def tempered(floor: int):
    """A Llama 4 that scales its attention from position `floor` on."""
    family = next(line for line in FAMILIES if line.name == "Llama 4 (text, chunked)")
    return build("llama4_text", **{**family.settings, "attn_temperature_tuning": True, "floor_scale": floor, "attn_scale": 1.0})


def test_a_model_that_counts_positions_itself_takes_chains_alone_in_a_text_that_gets_long():
    model, rows = tempered(floor=8), prompts(7, 13)
    texts = plain(model, rows, max_new_tokens=16)
    finished = [row + text for row, text in zip(rows, texts)]
    for row, text in zip(rows, texts):
        assert generated(speculate(model, [row], ScriptedDraft.knowing(finished, wrong=3), 6, max_new_tokens=16), [row]) == [text]
    words = r"target: Llama4ForCausalLM .*attn_temperature_tuning.*max_length at 0 or below.*batch size 1.*chains.*speculative=False"
    with pytest.raises(ValueError, match=words):
        speculate(model, rows, None, max_new_tokens=16)
    with pytest.raises(ValueError, match=words):
        speculate(model, rows[:1], KnowingTreeDraft(finished), 10, max_new_tokens=16)
    with pytest.warns(UserWarning, match="target: .* runs without compile=True: it makes its masks or positions itself"):
        assert generated(speculate(model, rows[:1], None, max_new_tokens=16, speculative={"compile": True}), rows[:1]) == texts[:1]


def test_in_a_text_that_stays_short_it_takes_batches_and_trees():
    model, rows = tempered(floor=2048), prompts(7, 13)
    texts = plain(model, rows, max_new_tokens=16)
    draft = KnowingTreeDraft([row + text for row, text in zip(rows, texts)])
    assert generated(speculate(model, rows, draft, 10, max_new_tokens=16), rows) == texts
    with pytest.raises(ValueError, match="max_length at 1728 or below"):
        speculate(model, rows, draft, 10, max_new_tokens=1800)


# --- Doge's selection of keys -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("doge" in compat._OWN_WAYS, reason="before transformers 5.24 Doge is refused")
def test_a_model_that_selects_among_the_keys_of_a_pass_is_refused_where_it_would():
    family, row = next(line for line in FAMILIES if line.name == "Doge"), prompts(7)[0]
    model = build("doge", **{**family.settings, "keep_window_size": 300})
    with pytest.raises(ValueError, match=r"target: DogeForCausalLM .*keep_window_size.*max_length at 44 or below \(here 47\).*speculative=False"):
        speculate(model, [row], max_new_tokens=40)
    assert [generated(speculate(model, [row], max_new_tokens=37), [row])] == [plain(model, [row], max_new_tokens=37)]


@pytest.mark.parametrize("kind", ["MPT", "GPT-Neo (local layers)"])
def test_rows_that_reach_the_last_position_at_different_times_share_the_columns_that_there_are(kind):
    """Their masks have as many columns as the model has positions; drafts with such masks, too."""
    line, limit = next(family for family in FAMILIES if family.name == kind), 20
    model = build(line.kind, 0, "eager", line.spread, **line.settings | {name: limit for name in ("max_seq_len", "max_position_embeddings") if name in line.settings})
    rows = prompts(9, 2, 5, 1, seed=3)
    texts = plain(model, rows, max_new_tokens=11)
    for draft in (perturbed(model), perturbed(model, 0.2), None):
        for k in (7, 16, "auto"):
            assert generated(speculate(model, rows, draft, k, max_new_tokens=11), rows) == texts
