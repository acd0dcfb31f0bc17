"""Models of all kinds: enabled, copied, pickled, saved, wrapped, in another dtype, with a padded vocabulary; and left as they were."""

import copy
import functools
import gc
import io
import json
import pickle
import warnings

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec import compat
from hf_specdec.caches import CACHE
from hf_specdec.drafts import (
    LookaheadDraft, MixtureDraft, ModelDraft, ModelTreeDraft, NGramDraft, NGramRecyclingDraft, PromptLookupDraft, RecyclingDraft, SuffixAutomatonDraft,
    UniformDraft,
)
from hf_specdec.probe import check_batch
from tests.conformance.builders import make
from tests.helpers import (
    VOCAB, ScriptedDraft, assert_unchanged, build, enabled, generated, padded, perturbed, plain, prompts, repetitive, snapshot, speculate, tiny_llama,
    torch_defaults,
)

ROWS = repetitive(13) + prompts(2, 7, seed=2)
INPUTS = padded(ROWS)
OPTIONS = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)


def text(model, **options):
    return model.generate(**padded(ROWS), **{**OPTIONS, **options})[:, 13:].tolist()


@pytest.fixture
def target():
    return tiny_llama(1)


@pytest.fixture
def expected(target):
    return plain(target, ROWS, max_new_tokens=12)


# --- enable and disable -----------------------------------------------------------------------------------------------------


def test_enable_returns_the_instance_and_touches_no_class(target):
    before = dict(vars(LlamaForCausalLM)), LlamaForCausalLM.__mro__
    assert hf_specdec.enable(target) is target
    assert isinstance(target, LlamaForCausalLM) and type(target).__name__ == "LlamaForCausalLM"
    assert (dict(vars(LlamaForCausalLM)), LlamaForCausalLM.__mro__) == before


def test_only_the_enabled_instance_understands_speculative(target):
    other = tiny_llama(1)
    hf_specdec.enable(target)
    with pytest.raises((ValueError, TypeError)):
        other.generate(**padded(ROWS), speculative=True, **OPTIONS)


def test_disable_undoes_enable(target):
    kind = type(target)
    hf_specdec.enable(hf_specdec.enable(target))
    assert hf_specdec.disable(target) is target and type(target) is kind
    hf_specdec.disable(target)
    assert type(target) is kind and "generate" not in vars(target)


def test_a_generate_kept_over_disable_goes_on(target, expected):
    kept = enabled(target).generate
    hf_specdec.disable(target)
    for options in ({}, {"speculative": True}):
        assert kept(**padded(ROWS[:1]), **options, **OPTIONS)[0, 13:].tolist() == expected[0]
    target.generate = kept
    assert target.generate(**padded(ROWS[:1]), **OPTIONS)[0, 13:].tolist() == expected[0]


def test_a_model_whose_generate_has_been_replaced_is_refused(target, expected):
    target.generate = functools.partial(target.generate)
    with pytest.raises(ValueError, match="model: this instance has a generate of its own.*del model.generate"):
        hf_specdec.enable(target)
    del target.generate
    hf_specdec.enable(target)
    target.generate = functools.partial(target.generate)
    assert text(hf_specdec.enable(target), speculative=True) == expected


class Turned(LlamaForCausalLM):
    """Hands on whatever its forward is given, as wrappers do, and changes what comes out."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + torch.linspace(0, 2, out.logits.shape[-1])
        return out


def turned(model):
    model.__class__ = Turned
    return model


@pytest.mark.parametrize("draft", [lambda: None, lambda: ModelDraft(turned(perturbed(tiny_llama(1)))), NGramRecyclingDraft], ids=["lookup", "model", "tree"])
def test_a_forward_that_hands_on_whatever_it_is_given_takes_what_the_next_one_takes(target, expected, draft):
    changed = plain(turned(target), ROWS, max_new_tokens=12)
    assert changed != expected and text(enabled(target), speculative=True, assistant_model=draft()) == changed
    with pytest.raises(ValueError, match="num_asistant_tokens is no argument"):
        text(target, speculative=True, num_asistant_tokens=3)


def test_a_forward_put_in_the_place_of_the_models_own_is_called(target, expected):
    own, calls = target.forward, []

    def forward(*args, **kwargs):
        calls.append(kwargs)
        return own(*args, **kwargs)

    target.forward = forward
    assert text(enabled(target), speculative=True) == expected and calls
    target.forward = lambda input_ids, attention_mask=None: own(input_ids, attention_mask=attention_mask)
    with pytest.raises(ValueError, match="takes no cache"):
        text(target, speculative=True)


@pytest.mark.parametrize("draft", [lambda: None, lambda: ModelDraft(perturbed(tiny_llama(1))), NGramRecyclingDraft], ids=["lookup", "model", "tree"])
@pytest.mark.parametrize("chunk", [1, 5, 40])
def test_a_prompt_is_read_in_chunks_where_the_call_asks_for_them(target, expected, chunk, draft):
    widths = []
    target.register_forward_pre_hook(lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    for options in ({"prefill_chunk_size": chunk}, {"generation_config": GenerationConfig(prefill_chunk_size=chunk)}):
        widths.clear()
        assert text(enabled(target), speculative={"num_assistant_tokens": 2}, assistant_model=draft(), **options) == expected
        assert widths[: 12 // chunk] == [chunk] * (12 // chunk) and (max(widths) < 13) == (chunk < 13)


@pytest.mark.parametrize("name", ["model", "model_tree", "cascade", "translated", "feature", "feature_parallel", "prefixed"])
def test_draft_models_read_a_prompt_in_chunks_where_the_target_does(target, expected, name):
    def rounds(chunk):
        torch.manual_seed(0)
        draft, widths = make(name, target), []
        watched = draft.model.base_model.layers[0].register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
        out = speculate(target, ROWS, draft, 3, max_new_tokens=12, prefill_chunk_size=chunk)
        watched.remove()
        assert generated(out, ROWS) == expected
        return [[(row.proposed, row.accepted) for row in entry] for entry in out.speculation.rounds], widths[0]

    (whole, wide), (pieces, narrow) = rounds(None), rounds(5)
    assert pieces == whole and narrow == 5 and wide >= 12


def test_enable_changes_no_weight_config_or_attribute(target):
    before = snapshot(target)
    assert_unchanged(hf_specdec.enable(target), before)


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "deepcopy", "pickle"])
def test_a_copy_of_an_enabled_model_is_enabled(target, expected, made):
    other = made(enabled(target))
    assert text(other, speculative=True, assistant_model=perturbed(target)) == expected
    assert type(hf_specdec.disable(other)) is LlamaForCausalLM


def test_a_deep_copy_has_weights_of_its_own(target, expected):
    other = copy.deepcopy(enabled(target))
    with torch.no_grad():
        target.lm_head.weight.neg_()
    assert text(other, speculative=True) == expected != text(target, speculative=True)


def test_torch_save_and_load_keep_the_model_enabled(target, expected):
    buffer = io.BytesIO()
    torch.save(enabled(target), buffer)
    buffer.seek(0)
    assert text(torch.load(buffer, weights_only=False), speculative=True) == expected


def test_a_saved_checkpoint_is_an_ordinary_one(target, expected, tmp_path):
    enabled(target).save_pretrained(tmp_path / "enabled")
    hf_specdec.disable(target).save_pretrained(tmp_path / "plain")
    names = [sorted(path.name for path in (tmp_path / kind).iterdir()) for kind in ("enabled", "plain")]
    assert names[0] == names[1]
    assert all((tmp_path / "enabled" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes() for name in names[0])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "enabled")
    assert type(loaded) is LlamaForCausalLM
    assert text(enabled(loaded), speculative=True) == expected


def test_an_enabled_model_can_still_be_moved_cast_trained_and_compared(target):
    model = enabled(target).to(torch.float64).train()
    loss = model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
    loss.backward()
    assert model.lm_head.weight.grad is not None and model.training
    assert model.eval().dtype == torch.float64


def test_the_functional_form_needs_no_enabling(target, expected):
    from hf_specdec.integration import generate

    out = generate(target, **padded(ROWS), assistant_model=perturbed(target), num_assistant_tokens=3, **OPTIONS)
    assert out[:, 13:].tolist() == expected and type(target) is LlamaForCausalLM


# --- stock behaviour without speculative= -------------------------------------------------------------------------------------

STOCK = {
    "greedy": {},
    "sampling": dict(do_sample=True, temperature=1.3),
    "beams": dict(num_beams=3),
    "speculative=False": dict(speculative=False, do_sample=True),
    "speculative=None": dict(speculative=None),
    "dict": dict(return_dict_in_generate=True, output_scores=True),
}


@pytest.mark.parametrize("options", STOCK.values(), ids=STOCK)
def test_without_speculative_an_enabled_model_is_the_stock_model(target, options):
    stock = {name: value for name, value in options.items() if name != "speculative"}
    results = []
    for model, given in ((target, stock), (enabled(copy.deepcopy(target)), options)):
        torch.manual_seed(0)
        out = model.generate(**padded(ROWS), **{**OPTIONS, **given})
        results.append(out if torch.is_tensor(out) else out.sequences)
    assert torch.equal(*results)


def test_stock_assisted_generation_stays_available_on_an_enabled_model(target, expected):
    out = enabled(target).generate(**padded(ROWS[:1]), assistant_model=perturbed(target), **OPTIONS)
    assert out[:, 13:].tolist() == expected[:1]


def test_stock_prompt_lookup_stays_available_on_an_enabled_model(target, expected):
    unseen = next(token for token in range(61) if token not in expected[0] + ROWS[0])  # transformers 5.10 fails without any EOS
    out = enabled(target).generate(**padded(ROWS[:1]), prompt_lookup_num_tokens=3, eos_token_id=unseen, **OPTIONS)
    assert out[:, 13:].tolist() == expected[:1]


# --- left as they were --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("k", [4, "auto"])
def test_a_call_changes_neither_model(target, k, do_sample):
    draft = perturbed(target)
    enabled(target)
    before = snapshot(target), snapshot(draft)
    for _ in range(2):
        speculate(target, ROWS, draft, k, do_sample=do_sample, output_scores=True)
    assert_unchanged(target, before[0])
    assert_unchanged(draft, before[1])
    assert type(draft) is LlamaForCausalLM


def test_a_call_leaves_no_hook_behind(target):
    draft = perturbed(target)
    speculate(target, ROWS, draft, 4)
    assert not any(module._forward_hooks or module._forward_pre_hooks for model in (target, draft) for module in model.modules())


def test_a_training_mode_is_kept(target):
    enabled(target).train()
    target.generate(**padded(ROWS), speculative=True, **OPTIONS)
    assert target.training


def test_the_callers_arguments_are_not_changed(target):
    inputs, config = padded(ROWS), GenerationConfig(**OPTIONS, temperature=1.0)
    speculative = {"num_assistant_tokens": 3}
    before = {name: tensor.clone() for name, tensor in inputs.items()}, config.to_dict(), dict(speculative)
    enabled(target).generate(**inputs, generation_config=config, speculative=speculative)
    assert all(torch.equal(inputs[name], tensor) for name, tensor in before[0].items())
    assert (config.to_dict(), speculative) == before[1:]


def test_a_generation_config_of_the_caller_is_obeyed(target, expected):
    config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    out = enabled(target).generate(**padded(ROWS), generation_config=config, speculative=True)
    assert out[:, 13:].tolist() == expected


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_or_ctrl_c_inside_a_draft_leaves_both_models_and_the_draft_usable(target, expected, error):
    model = perturbed(target)
    draft = ModelDraft(model)
    enabled(target)
    before, rounds, propose = (snapshot(target), snapshot(model)), [], draft.propose

    def break_off(context, k):
        rounds.append(k)
        if len(rounds) == 3:
            raise error("here")
        return propose(context, k)

    draft.propose = break_off
    with pytest.raises(error, match="here"):
        speculate(target, ROWS, draft, 3)
    draft.propose = propose
    assert_unchanged(target, before[0])
    assert_unchanged(model, before[1])
    assert generated(speculate(target, ROWS, draft, 3, max_new_tokens=12), ROWS) == expected


def test_an_error_inside_a_streamer_leaves_the_model_usable(target, expected):
    def streamer(row, tokens, drafted):
        raise RuntimeError("here")

    before = snapshot(enabled(target))
    with pytest.raises(RuntimeError, match="here"):
        speculate(target, ROWS, streamer=streamer)
    assert_unchanged(target, before)
    assert text(target, speculative=True) == expected


@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_calls_leave_no_tensors_behind(target, kind):
    draft = ModelDraft(perturbed(target)) if kind == "model" else PromptLookupDraft()

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    for _ in range(3):
        speculate(target, ROWS, draft, 4)
    before = tensors()
    for _ in range(10):
        speculate(target, ROWS, draft, 4)
    assert tensors() <= before


# --- drafts of another kind ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_draft_in_another_dtype_drafts_for_a_float32_target(target, dtype, do_sample):
    out = speculate(target, ROWS, perturbed(target).to(dtype), 4, do_sample=do_sample, max_new_tokens=12, seed=0)
    assert out.speculation.accepted > 0
    assert do_sample or generated(out, ROWS) == plain(target, ROWS, max_new_tokens=12)


def test_a_target_in_bfloat16_takes_a_float32_draft(target):
    out = speculate(target.to(torch.bfloat16), ROWS, tiny_llama(1), 4, output_logits=True)
    assert out.speculation.acceptance_rate > 0.5 and out.logits[0].dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")], ids=str)
def test_draft_and_target_may_be_on_different_devices(target, expected, devices):
    draft = perturbed(target).to(devices[1])
    target.to(devices[0])
    inputs = {name: tensor.to(devices[0]) for name, tensor in padded(ROWS).items()}
    out = enabled(target).generate(**inputs, speculative=True, assistant_model=draft, num_assistant_tokens=4, **OPTIONS)
    assert out[:, 13:].tolist() == expected


@pytest.mark.parametrize("make", [ModelDraft, ModelTreeDraft, lambda model: MixtureDraft()], ids=["model", "tree", "mixture"])
def test_torchs_default_device_is_not_ours(target, expected, make):
    draft = make(perturbed(target))
    with torch_defaults(device="meta"):
        tokens = enabled(target).generate(**INPUTS, speculative=True, assistant_model=draft, num_assistant_tokens=4, **OPTIONS)
    assert tokens[:, 13:].tolist() == expected


@pytest.mark.parametrize("make", [ModelTreeDraft, lambda model: UniformDraft(), lambda model: NGramDraft.from_tokens(ROWS, vocab_size=VOCAB, sample=True)],
                         ids=["tree", "uniform", "ngram"])
def test_torchs_default_dtype_is_not_ours(target, make):
    draft = perturbed(target)

    def sampled():
        out = enabled(target).generate(**INPUTS, speculative={"seed": 3, "record_probs": True}, assistant_model=make(draft), num_assistant_tokens=4,
                                       return_dict_in_generate=True, **{**OPTIONS, "do_sample": True})
        return out.sequences, json.loads(out.speculation.to_json())["rounds"]

    wanted = sampled()
    with torch_defaults(torch.bfloat16):
        found = sampled()
    assert torch.equal(found[0], wanted[0]) and found[1] == wanted[1]  # with the drafts' probabilities as they were


def test_a_family_is_probed_on_its_own_device_too():
    model = build("biogpt", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    with torch_defaults(device="meta"):
        check_batch(model, compat.traits_of(model, "target"), 2, "target")


def resized(model, vocab: int):
    """The same model with its vocabulary padded to `vocab`; the new rows are large, so that a mix-up would show."""
    other = copy.deepcopy(model)
    old = other.config.vocab_size
    other.resize_token_embeddings(vocab, mean_resizing=False)
    with torch.no_grad():
        for weight in (other.get_input_embeddings().weight, other.get_output_embeddings().weight):
            weight[old:] = 2.0
    return other


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("draft_is_larger", [True, False])
def test_vocabularies_may_be_padded_to_different_sizes(target, draft_is_larger, do_sample):
    ours, draft = (target, resized(perturbed(target), 64)) if draft_is_larger else (resized(target, 64), perturbed(target))
    out = speculate(ours, ROWS, draft, 4, seed=1, do_sample=do_sample)
    assert out.speculation.accepted > 0
    assert int(out.sequences.max()) < ours.config.vocab_size
    assert do_sample or generated(out, ROWS) == plain(ours, ROWS)


READERS = {"lookup": PromptLookupDraft, "automaton": SuffixAutomatonDraft, "automaton tree": lambda: SuffixAutomatonDraft(branches=3),
           "recycling": RecyclingDraft, "recycling tree": lambda: RecyclingDraft(branches=3), "n-grams": NGramRecyclingDraft,
           "lookahead": LookaheadDraft, "mixture": MixtureDraft}


@pytest.mark.share(2)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("draft", READERS.values(), ids=READERS)
def test_tokens_that_the_target_reads_and_cannot_write_are_not_drafted(draft, do_sample):
    target = tiny_llama(1)
    target.lm_head = torch.nn.Linear(target.config.hidden_size, 30, bias=False)
    with torch.no_grad():
        target.lm_head.weight.copy_(target.get_input_embeddings().weight[:30])
    rows = [[*row, 40, 5, 45, 6, 40] for row in ROWS]
    greedy = {"top_k": 1} if do_sample else {}
    for call in (rows, rows[:1]):
        out = speculate(target, call, draft(), 4, max_new_tokens=24, do_sample=do_sample, **greedy)
        assert generated(out, call) == plain(target, call, max_new_tokens=24) and out.speculation.drafted


@pytest.mark.parametrize("options", [dict(repetition_penalty=1.3), dict(top_k=5), dict(typical_p=0.8), dict(top_p=0.5, temperature=0.5)], ids=str)
def test_processors_work_on_a_draft_with_a_smaller_vocabulary(target, options):
    out = speculate(resized(target, 64), ROWS, perturbed(target), 4, seed=1, do_sample=True, **options)
    assert out.speculation.accepted > 0


def test_a_draft_that_lacks_the_only_token_allowed_does_not_break_the_call(target):
    larger = resized(target, 64)
    for do_sample in (False, True):
        out = speculate(larger, ROWS, perturbed(target), 3, do_sample=do_sample, prefix_allowed_tokens_fn=lambda row, ids: [62, 63])
        assert set(sum(generated(out, ROWS), [])) <= {62, 63}


def test_a_draft_without_a_single_token_in_common_with_the_prompt_is_still_exact(target, expected):
    out = speculate(target, ROWS, ScriptedDraft(lambda row: [60, 60, 60]), 3, max_new_tokens=12)
    assert generated(out, ROWS) == expected


def test_a_draft_with_a_shorter_context_stops_drafting_where_it_ends(target):
    draft = tiny_llama(1, max_position_embeddings=32)
    draft.load_state_dict(target.state_dict())
    row = prompts(20)
    out = speculate(target, row, draft, 4, max_new_tokens=40)
    assert generated(out, row) == plain(target, row, max_new_tokens=40)
    assert out.speculation.accepted > 0


def test_a_draft_that_is_never_right_is_warned_of(target):
    from tests.helpers import contrary

    with pytest.warns(UserWarning, match="assistant_model.*tokenizer"):
        speculate(target, ROWS, contrary(target), 4, max_new_tokens=40)


def test_a_draft_that_is_right_is_not_warned_of(target):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        speculate(target, ROWS, perturbed(target), 4, max_new_tokens=40)


# --- PEFT ---------------------------------------------------------------------------------------------------------------------


def adapted(model, seed=3):
    """A LoRA adapter that changes the text."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False))
    return wrapped.eval()


@pytest.mark.parametrize("order", ["wrap, then enable", "enable, then wrap"])
def test_a_lora_model_generates_its_own_text(target, expected, order):
    if order == "wrap, then enable":
        model = hf_specdec.enable(adapted(target))
    else:
        model = adapted(hf_specdec.enable(target))
    reference = [model.generate(**padded([row]), **OPTIONS)[0, len(row):].tolist() for row in ROWS]
    assert reference != expected
    for draft in (None, perturbed(tiny_llama(1)), ScriptedDraft.knowing([row + new for row, new in zip(ROWS, reference)])):
        out = model.generate(**padded(ROWS), speculative=True, assistant_model=draft, num_assistant_tokens=4, return_dict_in_generate=True, **OPTIONS)
        assert out.sequences[:, 13:].tolist() == reference
        assert out.speculation.new_tokens == [12, 12, 12]
    ids = padded(ROWS[:1])["input_ids"]
    assert model.generate(ids, speculative=True, **OPTIONS)[0, 13:].tolist() == reference[0]  # by position


def test_a_lora_model_through_the_decoder_object(target):
    model = adapted(target)
    reference = model.generate(**padded(ROWS[:1]), **OPTIONS)
    out = model.generate(**padded(ROWS[:1]), custom_generate=hf_specdec.SpeculativeDecoder(), **OPTIONS)
    assert torch.equal(out, reference)


def test_a_lora_model_is_a_draft_too(target, expected):
    draft = adapted(perturbed(target))
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    out = speculate(target, ROWS, draft, 4, max_new_tokens=12)
    assert generated(out, ROWS) == expected
    assert all(torch.equal(before[name], tensor) for name, tensor in draft.state_dict().items())


def test_a_wrapped_model_can_be_disabled(target):
    model = adapted(target)
    kind = type(model)
    assert type(hf_specdec.disable(hf_specdec.enable(model))) is kind


@pytest.mark.parametrize("name", ["merge_and_unload", "unload"])
def test_the_model_that_peft_hands_out_is_enabled_too(target, expected, name):
    model = hf_specdec.enable(adapted(target), speculative={"num_assistant_tokens": 4})
    reference = expected if name == "unload" else [model.generate(**padded([row]), speculative=False, **OPTIONS)[0, len(row):].tolist() for row in ROWS]
    inside = getattr(model, name)()
    assert inside is target and type(hf_specdec.disable(copy.copy(inside))) is LlamaForCausalLM
    for options in ({"speculative": True}, {}):  # in so many words, and by what was said when the wrapper was enabled
        out = inside.generate(**padded(ROWS), return_dict_in_generate=True, **options, **OPTIONS)
        assert out.sequences[:, 13:].tolist() == reference and out.speculation.new_tokens == [12, 12, 12]


def test_a_wrapper_that_is_disabled_hands_out_a_model_that_is_not_enabled(target):
    inside = hf_specdec.disable(hf_specdec.enable(adapted(target))).merge_and_unload()
    assert type(inside) is LlamaForCausalLM


# --- the text of vision-language models -----------------------------------------------------------------------------------------

TEXT = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None)
VISION = dict(hidden_size=32, embed_dim=32, intermediate_size=32, num_hidden_layers=1, depth=1, num_attention_heads=2, num_heads=2, image_size=16, patch_size=8,
              out_hidden_size=32)
SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
IMAGES = dict(image_token_id=VOCAB - 1, image_token_index=VOCAB - 1)
VISUAL = {
    "Llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}),
    "Gemma3": ({"model_type": "gemma3_text", "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}, {"model_type": "siglip_vision_model"}),
    "Qwen2_5_VL": ({"model_type": "qwen2_5_vl_text", **SECTIONS}, {"fullatt_block_indexes": [0]}),
}


def visual(name: str, text: dict, vision: dict):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(text_config={**TEXT, **text}, vision_config={**VISION, **vision}, **IMAGES)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("name", VISUAL)
def test_a_vision_language_model_without_images_is_a_text_model(name):
    model, rows = visual(name, *VISUAL[name]), [[token % 60 + 1 for token in row] for row in repetitive(12) + prompts(5, seed=3)]
    expected = plain(model, rows, max_new_tokens=12)
    for draft in (None, ModelDraft(perturbed(model)), ModelTreeDraft(perturbed(model))):
        assert generated(speculate(model, rows, draft, max_new_tokens=12), rows) == expected


@pytest.mark.parametrize("name, kinds", [("Gemma3", "token_type_ids"), ("Qwen2_5_VL", "mm_token_type_ids")])
def test_token_kinds_mean_what_they_mean_to_plain_generate(name, kinds):
    """All of text, or all of an image that nobody shows (Gemma 3 reads such a prompt in both directions)."""
    model, ids = visual(name, *VISUAL[name]), torch.tensor(repetitive(12)) % 60 + 1
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    for marks in (torch.zeros_like(ids), torch.ones_like(ids)):
        expected = model.generate(ids, **{kinds: marks}, **options)
        assert torch.equal(enabled(model).generate(ids, **{kinds: marks}, speculative=True, **options), expected)


def test_the_token_kinds_of_a_model_without_images_are_not():
    model, ids = build("gpt2", vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=64), torch.tensor(repetitive(12))
    with pytest.raises(ValueError, match="^token_type_ids: this model input is not supported"):
        enabled(model).generate(ids, token_type_ids=torch.zeros_like(ids), speculative=True, max_new_tokens=4, pad_token_id=0)


def test_a_text_alone_that_is_read_in_both_directions():
    model = visual("PaliGemma", {"model_type": "gemma"}, {"model_type": "siglip_vision_model", "projection_dim": 32})
    ids, settings = torch.tensor([prompts(9)[0]]), dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    for marks in ({}, {"token_type_ids": torch.zeros_like(ids)}, {"token_type_ids": torch.ones_like(ids)}):
        out = hf_specdec.enable(copy.deepcopy(model)).generate(ids, **marks, **settings, speculative=True)
        assert torch.equal(out, model.generate(ids, **marks, **settings))


class NamesTheOlder(LlamaForCausalLM):
    """As written for transformers before 5.24, which hands the cache over by another name."""

    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        return super().forward(input_ids=input_ids, **kwargs, **({CACHE: past_key_values} if past_key_values is not None else {}))


class LosesTheCache(LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        kwargs.pop(CACHE, None)
        return super().forward(input_ids=input_ids, **kwargs)


def test_a_subclass_that_names_other_arguments_hands_the_cache_on():
    model = tiny_llama()
    wanted = model.generate(**padded(ROWS[:1]), **OPTIONS)
    model.__class__ = NamesTheOlder
    assert torch.equal(enabled(model).generate(**padded(ROWS[:1]), **OPTIONS, speculative=True), wanted)


def test_one_that_loses_it_is_named():
    model = tiny_llama()
    model.__class__ = LosesTheCache
    with pytest.raises(ValueError, match=f"target: the forward of LosesTheCache has left its cache empty.*hand on {CACHE}="):
        enabled(model).generate(**padded(ROWS), **OPTIONS, speculative=True)
