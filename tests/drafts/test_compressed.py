"""The target with fewer bits as the draft: on the target's own cache, or on one of its own; whatever it drafts, the text is the target's."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import hf_specdec
from hf_specdec import integration, mx
from hf_specdec.caches import CACHE
from hf_specdec.drafts import CascadeDraft, CompressedDraft, HorizontalCascadeDraft, MixtureDraft, ModelDraft, PromptLookupDraft
from tests import encoder_decoders
from tests.architectures import FAMILIES
from tests.helpers import assert_unchanged, build, generated, padded, perturbed, plain, prompts, repetitive, snapshot, speculate, tiny_llama

ROWS = repetitive(12) + prompts(3, 7, seed=6)
BY_NAME = {"draft": "compressed", "draft_options": {"format": "mxfp4_e2m1"}}
BATCHES = {"alone": ROWS[:1], "ragged": ROWS}
each_batch = pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)


def named(target, rows=ROWS, k=3, options=None, **settings):
    """By name."""
    return generated(speculate(target, rows, None, k, speculative=BY_NAME if options is None else {**BY_NAME, "draft_options": options}, **settings), rows)


# --- the text ---------------------------------------------------------------------------------------------------------


@each_batch
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("bits", ["mxfp4_e2m1", "mxint8"])
def test_greedy_text_is_plain_generates(rows, attn, bits):
    target = tiny_llama(3, num_hidden_layers=3)
    target.set_attn_implementation(attn)
    draft = mx.draft_of(target, bits)
    for k in (1, 4, "auto"):
        out = speculate(target, rows, draft, k)
        assert generated(out, rows) == plain(target, rows) and (k == "auto" or out.speculation.accepted)


@each_batch
def test_a_copy_that_is_the_target_agrees_with_it_always(rows):
    target = tiny_llama(3)
    for model in (target, copy.deepcopy(target)):
        out = speculate(target, rows, CompressedDraft(target, model), 4)
        assert generated(out, rows) == plain(target, rows) and out.speculation.acceptance_rate == 1.0


def test_a_copy_that_is_wrong_every_time_costs_time_alone():
    target = tiny_llama(3)
    out = speculate(target, ROWS, CompressedDraft(target, perturbed(target, 5.0)), 4)
    assert generated(out, ROWS) == plain(target, ROWS) and out.speculation.acceptance_rate < 0.5


@each_batch
def test_no_prompt_pass_of_its_own_and_one_token_a_pass(rows):
    target = tiny_llama(3)
    draft, widths, batches = mx.draft_of(target, "mxfp4_e2m1"), [], []
    forward = draft.model.forward
    draft.model.forward = lambda **inputs: (widths.append(inputs["input_ids"].shape[1]), batches.append(len(inputs["input_ids"])), forward(**inputs))[2]
    out = speculate(target, rows, draft, 3)
    assert set(widths) == {1} and draft.calls == len(widths) and max(batches) == len(rows)
    assert not any(row.proposed for row in out.speculation.rounds[0]) and not draft.cached.cache.layers


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in
                                    ("Gemma 2", "GPT-2", "OPT", "Mistral", "Gemma 3n (text)", "DeepSeek-V3", "Llama 4 (text, chunked)", "BLOOM")], ids=lambda family: family.name)
def test_families_whose_caches_are_of_other_kinds(family):
    target, rows = family.model("eager"), repetitive(13) + prompts(4, seed=1)
    for draft in (mx.draft_of(target, "mxfp4_e2m1"), CompressedDraft(target, perturbed(target, 0.1))):
        assert generated(speculate(target, rows, draft, 3, max_new_tokens=12), rows) == plain(target, rows, max_new_tokens=12)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in ("Qwen3.5 (text)", "Mamba 2", "Jamba")], ids=lambda family: family.name)
def test_beside_states_it_has_a_cache_of_its_own(family):
    target = family.model("eager")
    draft = mx.draft_of(target, "mxfp4_e2m1")
    assert generated(speculate(target, ROWS, draft, 3, max_new_tokens=10), ROWS) == plain(target, ROWS, max_new_tokens=10) and not draft.shared


@pytest.mark.parametrize("kind", ["T5", "BART"])
def test_beside_an_encoder_it_has_a_cache_of_its_own(kind):
    line = encoder_decoders.family(kind)
    target, inputs = line.model(), encoder_decoders.sources(line.kind, 1)
    before, text = snapshot(target), encoder_decoders.plain(target, inputs)
    draft = mx.draft_of(target, "mxfp4_e2m1")
    assert torch.equal(encoder_decoders.speculate(target, inputs, draft).sequences, text) and not draft.shared
    assert torch.equal(integration.generate(target, **inputs, max_new_tokens=encoder_decoders.MAX_NEW, speculative=BY_NAME, return_dict_in_generate=True).sequences, text)
    assert_unchanged(target, before)


# --- what a call may ask for ------------------------------------------------------------------------------------------


@each_batch
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.8, "repetition_penalty": 1.2}], ids=str)
def test_samples_with_a_seed_repeat_and_a_rows_do_not_depend_on_the_others(rows, settings):
    target = tiny_llama(3)
    seeds = [5 + b for b in range(len(rows))]
    first, again = (generated(speculate(target, rows, mx.draft_of(target, "mxfp4_e2m1"), 3, seed=seeds, do_sample=True, **settings), rows) for _ in range(2))
    assert first == again == named(target, rows, seed=seeds, do_sample=True, **settings)
    assert first[:1] == named(target, rows[:1], seed=seeds[:1], do_sample=True, **settings)
    assert first != named(target, rows, seed=[99 + b for b in range(len(rows))], do_sample=True, **settings)


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 6, "eos_token_id": list(range(30))}], ids=str)
def test_processors_are_heeded(settings):
    target = tiny_llama(3)
    for draft in (mx.draft_of(target), MixtureDraft([PromptLookupDraft(), mx.draft_of(target)])):
        assert _cut(generated(speculate(target, ROWS, draft, 4, **settings), ROWS), settings) == _cut(plain(target, ROWS, **settings), settings)


def _cut(texts, settings):
    """The texts up to where they end."""
    ends = settings.get("eos_token_id", [])
    return [text[: next((i + 1 for i, token in enumerate(text) if token in ends), len(text))] for text in texts]


def test_beams_are_refused():
    target = tiny_llama(3)
    for draft, options in ((mx.draft_of(target), {}), (None, BY_NAME)):
        with pytest.raises(ValueError, match="num_beams=3: the draft 'compressed' does not follow beams.*use num_beams=1"):
            speculate(target, ROWS, draft, 3, speculative=options, num_beams=3)


def test_rows_that_end_at_different_lengths():
    target = tiny_llama(3)
    texts = plain(target, ROWS)
    settings = {"eos_token_id": [texts[0][2], texts[1][9], texts[2][5]]}
    expected = _cut(plain(target, ROWS, **settings), settings)
    assert len({len(text) for text in expected}) > 1
    for draft in (mx.draft_of(target, "mxfp4_e2m1"), CompressedDraft(target, copy.deepcopy(target))):
        assert generated(speculate(target, ROWS, draft, 4, **settings), ROWS) == expected


@each_batch
def test_a_text_is_continued_on_the_cache_that_came_back(rows):
    target = tiny_llama(3)
    draft = mx.draft_of(target, "mxfp4_e2m1")
    options = dict(do_sample=False, pad_token_id=0, return_dict_in_generate=True, max_new_tokens=7)
    inputs = padded(rows)
    expected, out = target.generate(**inputs, **options), speculate(target, rows, draft, 3, max_new_tokens=7)
    assert torch.equal(out.sequences, expected.sequences)
    for _ in range(2):  # either cache goes on with either generate
        more = torch.cat([expected.sequences, torch.tensor([[7, 9, 11]] * len(rows))], dim=1)
        inputs = {"input_ids": more, "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(len(rows), 10, dtype=torch.long)], dim=1)}
        wanted = target.generate(**inputs, **{CACHE: copy.deepcopy(expected[CACHE])}, **options)
        ours = [hf_specdec.enable(target).generate(**inputs, **{CACHE: copy.deepcopy(cache)}, **options, speculative=True, assistant_model=draft, num_assistant_tokens=3)
                for cache in (expected[CACHE], out[CACHE])]
        assert all(torch.equal(each.sequences, wanted.sequences) for each in ours)
        expected, out = wanted, ours[1]


INSIDE = {
    "mixture": lambda target, draft: MixtureDraft([PromptLookupDraft(), draft]),
    "mixture, one chosen": lambda target, draft: MixtureDraft([PromptLookupDraft(), draft], mode="choose"),
    "cascade, drafts for the middle model": lambda target, draft: CascadeDraft(perturbed(target, 0.05), draft),
    "cascade, is the middle model": lambda target, draft: CascadeDraft(draft.model, PromptLookupDraft()),
    "horizontal cascade, first": lambda target, draft: HorizontalCascadeDraft(draft, PromptLookupDraft()),
    "horizontal cascade, then": lambda target, draft: HorizontalCascadeDraft(PromptLookupDraft(), draft, after=1),
    "two of them": lambda target, draft: HorizontalCascadeDraft(draft, mx.draft_of(target, "mxfp4_e2m1"), after=1),
}


@each_batch
@pytest.mark.parametrize("way", INSIDE)
def test_inside_other_drafts(way, rows):
    target = tiny_llama(3)
    draft = INSIDE[way](target, mx.draft_of(target))
    assert generated(speculate(target, rows, draft, 4), rows) == plain(target, rows)
    first, again = (generated(speculate(target, rows, draft, 4, seed=list(range(len(rows))), do_sample=True), rows) for _ in range(2))
    assert first == again


def test_in_a_call_of_another_target_it_drafts_on_a_cache_of_its_own():
    target, other = tiny_llama(3), tiny_llama(4)
    draft = mx.draft_of(target)
    assert generated(speculate(other, ROWS, draft, 3), ROWS) == plain(other, ROWS) and not draft.shared
    assert generated(speculate(target, ROWS, draft, 3), ROWS) == plain(target, ROWS) and draft.shared


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "words"), [
    (lambda target: build("gpt2", vocab_size=61, n_embd=32, n_layer=2, n_head=4), "model: GPT2LMHeadModel is no copy of the target.*assistant_model"),
    (lambda target: tiny_llama(3, num_hidden_layers=3), "model: .*num_hidden_layers=3, the target's 2.*assistant_model"),
    (lambda target: tiny_llama(3, num_key_value_heads=4), "model: .*num_key_value_heads=4"),
    (lambda target: tiny_llama(3, rope_parameters={"rope_type": "default", "rope_theta": 5.0}), "model: .*rope_parameters.rope_theta=5.0"),
    (lambda target: copy.deepcopy(target).to(torch.bfloat16), "model: it is in torch.bfloat16 .*Load both alike"),
    (lambda target: tiny_llama(3).to("meta"), "model: it is in torch.float32 on meta.*Load both alike"),
], ids=["class", "layers", "heads", "rotary", "dtype", "device"])  # fmt: skip
def test_a_model_that_is_no_copy_is_refused(model, words):
    target = tiny_llama(3)
    with pytest.raises(ValueError, match=words):
        CompressedDraft(target, model(target))


@pytest.mark.parametrize("other", [None, "mxfp4_e2m1", 3, GPT2LMHeadModel, AutoModelForCausalLM, ModelDraft(tiny_llama(3))], ids=lambda other: type(other).__name__)
def test_what_is_no_model_is_refused(other):
    target = tiny_llama(3)
    for arguments, role in (((target, other), "model"), ((other, target), "target")):
        with pytest.raises(TypeError, match=rf"^{role}: expected a transformers model.*mx.draft_of"):
            CompressedDraft(*arguments)


def test_a_copy_that_is_not_in_the_targets_dtype_any_more_is_refused():
    target = tiny_llama(3)
    draft = CompressedDraft(target, copy.deepcopy(target))
    target.to(torch.bfloat16)
    with pytest.raises(ValueError, match="model: it is in torch.float32 .*torch.bfloat16.*alike"):
        speculate(target, ROWS, draft, 3)
    target.to(torch.float32)
    assert generated(speculate(target, ROWS, draft, 3), ROWS) == plain(target, ROWS)
