"""Targets and drafts that run flash attention, whose kernels take no mask: chains, alone and in ragged batches. The kernels are a stand-in on a CPU
(`tests/flash.py`); what transformers does around them is its own."""

from __future__ import annotations

import copy
import dataclasses
from functools import lru_cache

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache

import hf_specdec
from hf_specdec import compat, integration, mx, probe
from hf_specdec.cached_model import CachedModel
from hf_specdec.caches import GOES_ON
from hf_specdec.compat import CACHE
from hf_specdec.drafts import CascadeDraft, EarlyExitDraft, MixtureDraft, ModelDraft, ModelTreeDraft, PromptLookupDraft, UniformDraft
from hf_specdec.mx.kernels import cpu
from hf_specdec.training import drafter
from hf_specdec.tree import Tree
from tests import flash, seeing
from tests.architectures import FAMILIES, STATEFUL, outcome
from tests.conformance.builders import masked_places, of_heads
from tests.drafts.test_assistants import gemma
from tests.helpers import (
    VOCAB, KnowingTreeDraft, ScriptedDraft, build, enabled, generated, padded, perturbed, plain, prompts, repetitive, speculate, tiny_llama,
)
from tests.test_cached_model import check_scores, proposal, take

NAMES = [
    "Llama", "Mistral", "Qwen2", "Qwen2 (windowed layers)", "Gemma 2", "Gemma 3 (text)", "Phi-3 (sliding)", "GPT-NeoX", "GPT-2", "GPT-BigCode (one K/V head)", "OPT",
    "Falcon (rotary)", "GPT-Neo (local layers)", "DeepSeek-V3", "GPT-OSS", "RoBERTa (as a decoder)", "BART (its decoder)",
]
OWN_KERNEL = {"GPT-OSS", "Flint", "Granite SWA", "Granite-MoE SWA", "MiMo-V2-Flash", "MiniMax-M3 (text, dense)"}  # whose class names a kernel of a hub
KEPT = ["Llama", "Mistral", "Gemma 3 (text)", "GPT-2", "GPT-OSS"]  # for what is the same in all families
ROWS = prompts(5, seed=2) + repetitive(14) + prompts(3, seed=1)
LONG = 22  # tokens: windows are 8
every_name = pytest.mark.parametrize("name", NAMES)
every_kept = pytest.mark.parametrize("name", KEPT)
BY_NAME = {family.name: family for family in (*FAMILIES, *STATEFUL)}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    return flash.install(monkeypatch)


@pytest.fixture
def top_left(monkeypatch):
    """Kernels of another contract: the causal mask begins at the first key."""
    return flash.install(monkeypatch, top_left=True)


def made(name: str, seed: int = 0):
    """A new model under flash attention."""
    family, own = BY_NAME[name], name in OWN_KERNEL
    model = build(family.kind, seed, "eager" if own else flash.NAME, family.spread, **family.settings)
    return flash.switched(model) if own else model


def twin(model, attention: str = "sdpa"):
    """The same weights under another attention."""
    return flash.switched(copy.deepcopy(model), attention)


@lru_cache
def wanted(name: str) -> list[list[int]]:
    """What plain generate makes of each of ROWS alone, under flash attention."""
    return plain(made(name), ROWS, max_new_tokens=LONG)


def drafts(model) -> dict:
    return {"model": perturbed(model), "lookup": PromptLookupDraft()}


# --- the text ------------------------------------------------------------------------------------------------------------


@pytest.mark.share(1 / 4)
@every_name
@pytest.mark.parametrize("k", [1, 3, 7, "auto"])
@pytest.mark.parametrize("draft", ["model", "lookup"])
def test_greedy_text_is_plain_generates_alone_and_in_a_ragged_batch(name, k, draft):
    model, texts = made(name), wanted(name)
    for rows in ([0], [1], [2], [0, 1, 2]):
        out = speculate(model, [ROWS[i] for i in rows], drafts(model)[draft], k, max_new_tokens=LONG)
        assert generated(out, [ROWS[i] for i in rows]) == [texts[i] for i in rows]


@pytest.mark.share(2)
@every_name
def test_ragged_rows_accept_different_numbers_of_tokens(name):
    model, texts = made(name), wanted(name)
    knowing = ScriptedDraft.knowing([row + text for row, text in zip(ROWS, texts)], wrong=4)
    out = speculate(model, ROWS, knowing, 6, max_new_tokens=LONG)
    assert generated(out, ROWS) == texts and out.speculation.accepted > LONG


def test_the_kernels_get_blocks_behind_a_text_and_rows_of_their_own_lengths(kernels):
    model = made("Llama")
    wanted("Llama")
    kernels.calls.clear()
    speculate(model, ROWS[:1], ScriptedDraft(lambda row: [1, 2, 3]), 3)
    assert {call[0] for call in kernels.calls[-8:]} == {"equal"} and any(1 < queries < keys for _, queries, keys in kernels.calls[-8:])
    knowing = ScriptedDraft.knowing([row + text for row, text in zip(ROWS, wanted("Llama"))], wrong=4)
    speculate(model, ROWS, knowing, 6)
    assert any(call[0] == "unequal" and set(call[1]) == {7} and len(set(call[2])) > 1 for call in kernels.calls)


@pytest.mark.share(2)
@every_kept
@pytest.mark.parametrize("flash_target", [True, False], ids=["target", "draft"])
def test_target_and_draft_may_run_different_attention(name, flash_target):
    model = made(name)
    target, draft = (model, twin(perturbed(model), "eager")) if flash_target else (twin(model, "eager"), perturbed(model))
    out = speculate(target, ROWS, draft, 4, max_new_tokens=LONG)
    assert generated(out, ROWS) == plain(target, ROWS, max_new_tokens=LONG) and out.speculation.accepted > 0


@pytest.mark.share(2)
@pytest.mark.parametrize("make", [
    lambda model: EarlyExitDraft(model, 1), lambda model: CascadeDraft(perturbed(model), PromptLookupDraft()),
    lambda model: MixtureDraft([PromptLookupDraft(), ModelDraft(perturbed(model))], mode="choose"), lambda model: UniformDraft(),
], ids=["early exit", "cascade", "mixture", "uniform"])
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_other_drafts(name, make):
    model = made(name)
    assert generated(speculate(model, ROWS, make(model), 4, max_new_tokens=LONG), ROWS) == wanted(name)


def test_assistants_of_a_target_that_runs_it():
    target = gemma()
    expected, assistant = plain(target, ROWS, max_new_tokens=LONG), of_heads(target)
    flash.switched(target)  # the assistant may run it, too, or not
    for model in (assistant, flash.switched(assistant)):
        out = speculate(target, ROWS, model, 4, max_new_tokens=LONG)
        assert generated(out, ROWS) == expected and out.speculation.drafted
    blocks = masked_places(model := made("Llama"))
    for draft in (blocks, mx.compress(copy.deepcopy(blocks))):
        assert generated(speculate(model, ROWS, draft, 4, max_new_tokens=LONG), ROWS) == wanted("Llama")
    with pytest.raises(ValueError, match="MuseGlimmerAssistantModel runs attn_implementation='flash_attention_2', which takes no masks of numbers.*the target may run another"):
        speculate(model, ROWS, flash.switched(blocks), 4)


@pytest.mark.share(3)
@every_kept
def test_sampled_rows_are_those_under_another_attention(name):
    """Seeds fix a text, of which rounding changes nothing here."""
    model, options = made(name), dict(seed=5, do_sample=True, temperature=0.8, num_return_sequences=3, max_new_tokens=LONG)
    under = [speculate(target, ROWS[:2], perturbed(target), 3, **options).sequences for target in (model, twin(model, "eager"))]
    assert len(under[0]) == 6 and torch.equal(*under)


@pytest.mark.parametrize("draft", ["model", "lookup"])
def test_beams(draft):
    model = made("Mistral")
    settings = dict(**padded(ROWS), num_beams=3, max_new_tokens=12, pad_token_id=0, do_sample=False)
    reference = model.generate(**settings)
    assert torch.equal(enabled(model).generate(**settings, speculative=True, assistant_model=drafts(model)[draft]), reference)


@pytest.mark.share(3)
@pytest.mark.parametrize("name", ["GPT-2", "OPT", "GPT-Neo (local layers)", "BART (its decoder)", "Llama"])
def test_ragged_rows_up_to_the_end_of_the_context(name):
    model, rows = made(name), prompts(120, 20, 113)
    limit = compat.traits_of(model, "target").max_positions
    new = limit + 1 - 120 if name != "Llama" else 20
    out = speculate(model, rows, perturbed(model), 7, max_new_tokens=new)
    assert generated(out, rows) == plain(model, rows, max_new_tokens=new)


def test_a_short_row_drafts_on_while_a_long_one_nears_the_end_of_the_context():
    """Columns are not positions here: GPT-2 under flash attention."""
    model = made("GPT-2")
    cached = CachedModel(model, 300)
    assert cached.room([[1] * 126, [1] * 9], [50, 50]) == [3, 50]


@pytest.mark.share(1 / 12)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("batch", [1, 3], ids=["alone", "ragged"])
def test_every_family_is_exact_or_refused(family, batch, monkeypatch):
    monkeypatch.setattr(type(family), "model", lambda self, attn, seed=0: made(self.name, seed))
    try:
        model = made(family.name)
        plain(model, ROWS[:1], max_new_tokens=20)
    except (ImportError, KeyError, AttributeError, TypeError, ValueError, StopIteration) as error:
        pytest.skip(f"plain generate does not run it with flash attention: {type(error).__name__}")
    result = outcome(family, flash.NAME, batch)
    assert result == "exact" or result.startswith("refused: ")


# --- caches --------------------------------------------------------------------------------------------------------------


@pytest.mark.share(3)
@every_kept
def test_a_cache_comes_back_and_goes_in(name):
    model, ids = made(name), torch.tensor(repetitive(14))
    options = dict(do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    stock = lambda tokens, new, cache=None: model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, **{CACHE: cache}, **options)  # noqa: E731
    ours = lambda tokens, new, cache=None: integration.generate(  # noqa: E731
        model, input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, assistant_model=perturbed(model), num_assistant_tokens=4,
        **{CACHE: cache}, **options)
    first = ours(ids, 15)
    again = torch.cat([first.sequences, torch.tensor(prompts(5, seed=8))], dim=1)
    reference = stock(again, 12).sequences
    assert isinstance(first[CACHE], DynamicCache) and torch.equal(first.sequences, stock(ids, 15).sequences)
    assert torch.equal(ours(again, 12, copy.deepcopy(first[CACHE])).sequences, reference)
    assert torch.equal(stock(again, 12, first[CACHE]).sequences, reference)
    assert torch.equal(ours(again, 12, stock(ids, 15)[CACHE]).sequences, reference)


# --- logits --------------------------------------------------------------------------------------------------------------


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "RoBERTa (as a decoder)"])  # alone, it counts from its padding token on
@pytest.mark.parametrize("lengths", [(9,), (9, 3, 14)], ids=["alone", "ragged"])
def test_logits_of_random_rounds_are_those_of_whole_passes(name, lengths):
    model, rows = made(name), prompts(*lengths)
    cached, generator = CachedModel(model, 90), torch.Generator().manual_seed(len(lengths))
    for number in range(5):
        n = int(torch.randint(1, 7, (1,), generator=generator))
        sizes = torch.randint(0, n + 1, (len(rows),), generator=generator).tolist()
        drafted = proposal(Tree.chain(n), len(rows), sizes, seed=number)
        check_scores(model, cached, rows, drafted)
        take(cached, rows, drafted, [int(torch.randint(0, size + 1, (1,), generator=generator)) for size in sizes])
    check_scores(model, cached, rows, proposal(Tree.chain(0), len(rows)))


@every_kept
def test_rows_that_leave_and_rows_that_are_fed_more_than_others(name):
    model, rows = made(name), prompts(9, 3, 14)
    cached = CachedModel(model, 90)
    check_scores(model, cached, rows, proposal(Tree.chain(3), 3))
    take(cached, rows, proposal(Tree.chain(3), 3), [3, 0, 1])
    cached.keep([1, 2])
    rows = [rows[1] + [4, 5, 6], rows[2]]
    check_scores(model, cached, rows, proposal(Tree.chain(2), 2, [1, 2]))
    take(cached, rows, proposal(Tree.chain(2), 2, [1, 2]), [1, 0])
    cached.keep([0])
    check_scores(model, cached, rows[:1], proposal(Tree.chain(4), 1, [2]))


# --- what would show a mistake -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["alone", "ragged"])
def test_kernels_of_another_contract_give_another_text(rows, top_left, monkeypatch):
    model = made("Llama")
    monkeypatch.setattr(probe, "obeys_masks", lambda *args: True)
    texts = plain(model, rows, max_new_tokens=LONG)
    knowing = ScriptedDraft.knowing([row + text for row, text in zip(rows, texts)])
    assert generated(speculate(model, rows, knowing, 4, max_new_tokens=LONG), rows) != texts


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["alone", "ragged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_another_contract_are_found_out_before_a_token_is_decoded(rows, dtype, top_left):
    model = made("Llama").to(dtype)
    with pytest.raises(ValueError, match="^target: LlamaForCausalLM runs attn_implementation='flash_attention_2', which gives the tokens of a pass other logits"):
        speculate(model, rows, PromptLookupDraft())
    with pytest.raises(ValueError, match="^assistant_model: .* other logits than a pass over the whole text does.*set_attn_implementation"):
        speculate(twin(model), rows, model)


def test_each_attention_of_a_model_is_asked_by_itself(top_left):
    model = BY_NAME["BioGPT"].model(flash.NAME)
    assert not probe.obeys_masks(model, compat.traits_of(model, "target"))
    model = flash.switched(model, "eager")
    assert probe.obeys_masks(model, compat.traits_of(model, "target"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_kept
def test_kernels_of_this_contract_are_taken_in_every_precision(name, dtype):
    model = made(name).to(dtype)
    assert probe.obeys_masks(model, compat.traits_of(model, "target"))


# --- what stands beside it -----------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("name", ["LLaVA", "Qwen2-VL", "Idefics3", "Qwen2-Audio"])
@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_that_show_something(name, rows):
    family = dataclasses.replace(next(one for one in seeing.FAMILIES if one.name == name), attn=flash.NAME)
    model, inputs = family.model(), family.prompts(rows)
    reference = model.generate(**inputs, max_new_tokens=20)
    for draft in (None, perturbed(model, 0.02)):
        out = integration.generate(model, **inputs, max_new_tokens=20, assistant_model=draft, num_assistant_tokens=4)
        assert torch.equal(out, reference)


def test_compile_is_set_aside_for_as_long_as_it_is_flash_attention():
    model = made("Llama")
    with pytest.warns(UserWarning, match="target: LlamaForCausalLM runs without compile=True: it runs flash attention, which takes no mask over buffers"):
        out = speculate(model, ROWS, perturbed(model), speculative={"compile": True}, max_new_tokens=LONG)
    assert generated(out, ROWS) == wanted("Llama")
    model = flash.switched(model, "sdpa")
    assert CachedModel(model, 40, compile=True).compiled.usable is None


@pytest.mark.skipif(cpu.library() is None, reason="the kernels are not available")
@pytest.mark.parametrize("change", [mx.to_tiles, lambda model: mx.compress(model, "mxfp8_e4m3")], ids=["tiles", "mxfp8"])
def test_weights_in_tiles_and_in_mx_formats_leave_the_attention_alone(change):
    model = change(made("Llama").to(torch.bfloat16))
    assert model.config._attn_implementation == flash.NAME
    speculate(model, ROWS, perturbed(twin(tiny_llama())), 4)
    assert model.config._attn_implementation == flash.NAME


def test_a_drafter_made_of_the_targets_layers_is_trained_with_masks_of_numbers():
    target = made("Llama")
    draft = drafter.build(target, [0])
    assert draft.config._attn_implementation == "sdpa" and target.config._attn_implementation == flash.NAME
    assert generated(speculate(target, ROWS, ModelDraft(draft), 4, max_new_tokens=LONG), ROWS) == wanted("Llama")


# --- refused -------------------------------------------------------------------------------------------------------------


def refusal(model, role: str = "target") -> str:
    with pytest.raises(ValueError) as caught:
        compat.traits_of(model, role)
    assert str(caught.value).startswith(f"{role}: {type(model).__name__} runs attn_implementation=") and 'set_attn_implementation("sdpa")' in str(caught.value)
    return str(caught.value)


def test_trees_are_refused_before_any_work(kernels):
    model = made("Llama")
    words = "LlamaForCausalLM runs attn_implementation='flash_attention_2', which goes along one text .*set_attn_implementation.*branches of a tree cannot share"
    with pytest.raises(ValueError, match=f"^target: {words}"):
        speculate(model, ROWS, ModelTreeDraft(twin(model), (2, 2)))
    with pytest.raises(ValueError, match=f"^assistant_model: {words}"):
        ModelTreeDraft(model, (2, 2))
    compat.traits_of(model, "target")
    before = len(kernels.calls)
    with pytest.raises(ValueError, match=f"^target: {words}"):
        speculate(model, ROWS[:1], KnowingTreeDraft([]))
    assert len(kernels.calls) - before <= 40  # the probe


def bart():
    return BartForConditionalGeneration(BartConfig(vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                                                   decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16)).eval()


def windowed_experts():
    family = BY_NAME["Qwen2-MoE"]
    return dataclasses.replace(family, settings={**family.settings, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}).model("eager")


REFUSED = {
    "chunks": (lambda: BY_NAME["Llama 4 (text, chunked)"].model("eager"), "has no chunks", True),
    "not supported": (lambda: BY_NAME["BLOOM"].model("eager"), "_supports_flash_attn=False", False),
    "ALiBi": (lambda: BY_NAME["Falcon (ALiBi)"].model("eager"), "takes no biases", False),
    "windows in masks": (lambda: BY_NAME["Phi-MoE"].model("eager"), "is not told its sliding window", False),
    "windows in masks, of some layers": (windowed_experts, "is not told its sliding window", False),
    "positions on three axes": (lambda: next(one for one in seeing.FAMILIES if one.name == "GLM-4.5V").model(), "three axes of its positions", False),
    "encoder": (bart, "padding of what an encoder has read", False),
    "whisper's decoder": (lambda: BY_NAME["Whisper (its decoder)"].model("eager"), "padding of what an encoder has read", False),
    "states": (lambda: BY_NAME["Granite 4 (hybrid)"].model("eager"), "layers that carry states", False),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("role", ["target", "assistant_model"])
def test_what_flash_attention_cannot_do_is_refused_by_name(what, role, monkeypatch):
    make, words, supported = REFUSED[what]
    if what == "states" and not GOES_ON:
        pytest.skip("this transformers does not go on from a state")
    model = flash.switched(copy.deepcopy(make()))
    if supported:
        monkeypatch.setattr(type(model), "_supports_flash_attn", True)
    assert words in refusal(model, role)


def test_kernels_that_say_of_themselves_that_they_align_at_the_top_left_are_refused(monkeypatch):
    monkeypatch.setattr("transformers.modeling_flash_attention_utils.flash_attn_supports_top_left_mask", lambda: True)
    assert "aligned at the top left" in refusal(made("Llama"))


def test_a_window_that_is_named_to_the_kernels_is_none_to_refuse():
    for name in ("Mistral", "Gemma 3 (text)", "GPT-OSS"):
        assert compat.traits_of(made(name), "target").flash


@pytest.mark.parametrize("attention", ["paged|flash_attention_2", "paged|sdpa", "flex_attention"])
def test_paged_and_flex_attention_stay_refused(attention):
    assert "masks and cache are not ours" in refusal(flash.switched(tiny_llama(), attention))


@pytest.mark.parametrize("attention", ["flash_attention_3", "flash_attention_4", "kernels-community/flash-attn2", "kernels-community/vllm-flash-attn3"])
def test_other_flash_kernels_are_known_by_their_names(attention):
    model = flash.switched(tiny_llama(), attention)
    traits = compat.traits_of(model, "target")
    assert traits.flash and traits.own_positions and traits.placed
    assert hf_specdec.enable(model) is model
    assert ModelDraft(model).traits.flash
