"""Beams of prompts that show images or sounds beside their text, or that are embeddings: those of plain generate, each looking at what its own prompt shows."""

import copy

import pytest
import torch

import hf_specdec
from hf_specdec import integration
from hf_specdec.drafts import ModelTreeDraft
from tests.generate.test_beams import DRAFTS
from tests.generate.test_embeddings import ROWS, shown
from tests.generate.test_handed_on import KINDS, made
from tests.generate.test_handed_on import shown as picture
from tests.helpers import enabled, perturbed, tiny_llama
from tests.seeing import FAMILIES, IMAGE

BY_NAME = {family.name: family for family in FAMILIES}
OPTIONS = dict(num_beams=3, num_return_sequences=2, max_new_tokens=10, output_scores=True, return_dict_in_generate=True, pad_token_id=0)
LIKE_BATCHES = "Generate the rows one by one"  # what beams of a model are refused with that takes no batches


def both(model, inputs, draft=None, k=3, **options):
    found = []
    for run in (model.generate, lambda **given: integration.generate(model, **given, assistant_model=draft, num_assistant_tokens=k)):
        torch.manual_seed(0)
        found.append(run(**inputs, **{**OPTIONS, **options}))
    return found


def assert_equal(plain, ours):
    assert torch.equal(plain.sequences, ours.sequences) and torch.equal(plain.beam_indices, ours.beam_indices)
    torch.testing.assert_close(plain.sequences_scores, ours.sequences_scores, atol=1e-4, rtol=1e-4)


@pytest.mark.share(1 / 6)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_beams_are_those_of_plain_search(family, rows):
    model, inputs = family.model(), family.prompts(rows)
    try:
        plain = model.generate(**inputs, **OPTIONS)
    except (RuntimeError, ValueError):
        pytest.skip("plain generate fails in such beams")
    if not family.ragged:
        with pytest.raises(ValueError, match=LIKE_BATCHES):
            integration.generate(model, **inputs, **OPTIONS)
        return
    for draft in [None, perturbed(model, 0.02)] + ([ModelTreeDraft(model, (3, 2))] if family.trees else []):
        assert_equal(plain, integration.generate(model, **inputs, **OPTIONS, assistant_model=draft, num_assistant_tokens=3))


@pytest.mark.parametrize("name", ["LLaVA", "Qwen2.5-VL", "Gemma 3", "Mllama", "PaliGemma"])
def test_prompts_alike_in_text_look_each_at_their_own_image(name):
    family = BY_NAME[name]
    model, one, other = family.model(), family.prompts(1, seed=1), family.prompts(1, seed=2)
    two = {key: torch.cat([one[key], (other if value.is_floating_point() else one)[key]]) for key, value in one.items()}
    plain, ours = both(model, two, perturbed(model, 0.02))
    assert_equal(plain, ours)
    assert not torch.equal(ours.sequences[:2], ours.sequences[2:])
    for draft in (None, perturbed(model, 0.02)):
        assert_equal(*both(model, two, draft, do_sample=True, top_k=30))


@pytest.mark.parametrize("name", ["LLaVA", "Qwen2-VL", "Qwen3-VL", "Mllama", "PaliGemma"])
def test_a_draft_of_the_same_kind_sees_what_the_target_sees(name):
    family = BY_NAME[name]
    model, inputs = family.model(), family.prompts(2, seed=1)
    blind = tiny_llama()
    passes = []
    for draft in (copy.deepcopy(model), blind):
        plain, ours = both(model, inputs, draft, num_return_sequences=1, num_beams=2, max_new_tokens=16)
        assert_equal(plain, ours)
        passes.append(ours.speculation.target_calls)
    assert passes[0] < passes[1]


@pytest.mark.parametrize("name", ["LLaVA", "Qwen2.5-VL"])
def test_settings_are_obeyed(name):
    family = BY_NAME[name]
    model, inputs = family.model(), family.prompts(2, images=2)
    for options in (dict(num_beams=5, num_return_sequences=5, length_penalty=2.0), dict(repetition_penalty=1.4, no_repeat_ngram_size=2),
                    dict(eos_token_id=list(range(20, 30)), early_stopping=True, num_beams=4)):
        assert_equal(*both(model, inputs, perturbed(model, 0.02), **options))


@pytest.mark.parametrize("name", ["PaliGemma", "PaliGemma 2"])
def test_text_that_is_read_in_both_directions(name):
    family = BY_NAME[name]
    model, inputs = family.model(), family.prompts(3, seed=6)
    ids = inputs["input_ids"]
    text = {"input_ids": ids.where(ids != IMAGE, 7), "attention_mask": inputs["attention_mask"]}
    for told in ({**inputs, "token_type_ids": None}, text):
        assert_equal(*both(model, told, perturbed(model, 0.02)))


@pytest.mark.share(2)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_model_that_hands_embeddings_on(name, rows):
    """BLIP-2 and its kind."""
    model, ours, inputs = made(name), hf_specdec.enable(copy.deepcopy(made(name))), picture(name, rows)
    for sample in (False, True):
        for draft in (None, copy.deepcopy(model)):
            torch.manual_seed(5)
            reference = model.generate(**inputs, **OPTIONS, do_sample=sample)
            torch.manual_seed(5)
            assert_equal(reference, ours.generate(**inputs, **OPTIONS, do_sample=sample, speculative=True, assistant_model=draft, num_assistant_tokens=3))
    assert torch.equal(ours.generate(**inputs, num_beams=5, max_new_tokens=10, speculative=True), model.generate(**inputs, num_beams=5, max_new_tokens=10))


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("ids", [False, True], ids=["alone", "beside ids"])
@pytest.mark.parametrize("rows", [ROWS[:1], ROWS, [[5], [9]]], ids=["one row", "ragged", "one place"])
@pytest.mark.parametrize("draft", ["lookup", "automaton tree", "recycling", "model", "tree"])
def test_embeddings(draft, rows, ids):
    target = tiny_llama()
    inputs = shown(target, rows, ids=ids)
    for options in ({}, dict(max_length=24, max_new_tokens=None), dict(min_length=8, eos_token_id=list(range(0, 60, 3))), dict(repetition_penalty=1.5), dict(do_sample=True)):
        given = {**OPTIONS, **options}
        torch.manual_seed(2)
        plain = target.generate(**inputs, **given)
        torch.manual_seed(2)
        ours = enabled(copy.deepcopy(target)).generate(**inputs, **given, speculative=True, assistant_model=DRAFTS[draft](), num_assistant_tokens=4)
        assert_equal(plain, ours)
