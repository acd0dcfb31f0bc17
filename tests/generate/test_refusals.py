"""What cannot be exact, or cannot be done, is refused by name before any work; what looks like it and can, is not."""

import copy
import gc
import sys
import threading
import warnings
from dataclasses import dataclass

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria

import hf_specdec
from hf_specdec import SpeculativeDecoder
from hf_specdec.compat import CACHE
from hf_specdec.drafts import CascadeDraft, Draft, MixtureDraft, ModelDraft, PromptLookupDraft, RecyclingDraft, base
from hf_specdec.proposal import Proposal
from tests.helpers import VOCAB, ScriptedDraft, build, generated, padded, perturbed, plain, prompts, repetitive, speculate, tiny_llama

ROWS = repetitive(13) + prompts(7, seed=2)


def ours(model, rows, **options):
    return model.generate(**padded(rows), **{"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "speculative": True, **options})


# --- adapters ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def test_adapters_that_read_the_ends_of_a_pass_are_refused(peft):
    adapters = [peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)]
    if "alora_invocation_tokens" in peft.LoraConfig.__dataclass_fields__:
        adapters.append(peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3, 4]))
    for adapter in adapters:
        model = hf_specdec.enable(peft.get_peft_model(tiny_llama(3), adapter))
        with pytest.raises(ValueError, match="adapter of type .* reads where a pass begins or ends.*speculative=False"):
            ours(model, ROWS[:1])
        with pytest.raises(ValueError, match="adapter of type"):
            model.generate(**padded(ROWS[:1]), max_new_tokens=4, custom_generate=SpeculativeDecoder(PromptLookupDraft()))
    drafts = peft.get_peft_model(tiny_llama(3), adapters[0])
    with pytest.raises(ValueError, match="assistant_model: .*adapter of type"):
        speculate(tiny_llama(3), ROWS[:1], drafts)


def test_ordinary_adapters_are_not_refused_but_one_per_row_is(peft):
    model = peft.get_peft_model(tiny_llama(3), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)).eval()
    assert generated(speculate(model, ROWS, None, max_new_tokens=12), ROWS) == plain(model, ROWS, max_new_tokens=12)
    with pytest.raises(ValueError, match="adapter_names.*set_adapter"):
        ours(hf_specdec.enable(model), ROWS, adapter_names=["default", "__base__"])


# --- the state of a model ---------------------------------------------------------------------------------------------------


def test_a_model_in_training_with_gradient_checkpointing_keeps_no_cache():
    model = tiny_llama(3)
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match=r"target: .*gradient checkpointing.*eval\(\)"):
        speculate(model, ROWS, None)
    with pytest.raises(ValueError, match="assistant_model: .*gradient checkpointing"):
        speculate(tiny_llama(3), ROWS, model)
    model.eval()
    assert generated(speculate(model, ROWS, None, max_new_tokens=12), ROWS) == plain(model, ROWS, max_new_tokens=12)


@pytest.mark.filterwarnings("error")
def test_a_model_in_training_runs_without_a_warning():
    model, draft = tiny_llama(3).train(), perturbed(tiny_llama(3)).train()
    assert generated(speculate(model, ROWS, draft, max_new_tokens=12), ROWS) == plain(tiny_llama(3), ROWS, max_new_tokens=12)


def test_flex_attention_is_refused():
    model = tiny_llama(3)
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match='flex_attention.*set_attn_implementation\\("sdpa"\\)'):
        hf_specdec.enable(model)


@pytest.mark.parametrize("config, settings, why", [
    ("xlnet", dict(vocab_size=VOCAB, d_model=32, n_layer=1, n_head=4, d_inner=48), "gives one next token per pass"),
    ("xlm", dict(vocab_size=VOCAB, emb_dim=32, n_layers=1, n_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2), "gives one next token per pass, at a mask token"),
])
def test_models_with_ways_of_their_own_are_refused(config, settings, why):
    model = build(config, attn="eager", **settings)
    with pytest.raises(ValueError, match=f"{why}.*speculative=False"):
        hf_specdec.enable(model)


_BERT = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
_GEMMA = dict(_BERT, num_key_value_heads=2, head_dim=8, layer_types=["full_attention"])
_GEMMA_4 = dict(_GEMMA, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=0)


@pytest.mark.parametrize("kind, settings, says", [
    *[(kind, _BERT, {"is_decoder": False}) for kind in ("bert", "bert-generation", "camembert", "data2vec-text", "roberta")],
    ("gemma", _GEMMA, {"use_bidirectional_attention": True}),
    ("gemma3_text", _GEMMA, {"use_bidirectional_attention": True}),
    ("gemma4_text", _GEMMA_4, {"use_bidirectional_attention": "all"}),
    ("llama", _BERT, {"is_causal": False}),
], ids=lambda value: value if isinstance(value, str) else "")
def test_models_that_read_their_text_in_both_directions_are_refused(kind, settings, says):
    model = build(kind, attn="eager", **settings, **says)
    with pytest.raises(ValueError, match=f"model: {type(model).__name__} reads its text in both directions .*speculative=False"):
        hf_specdec.enable(model)
    with pytest.raises(ValueError, match="assistant_model: .* in both directions"):
        ModelDraft(model)


@pytest.mark.parametrize("kind, says", [("bert", {"is_decoder": True}), ("gpt_neox", {"is_decoder": False}), ("gemma3_text", {}), ("gemma4_text", {})],
                         ids=lambda value: value if isinstance(value, str) else "")
def test_models_that_read_forwards_are_not_whatever_their_configs_carry(kind, says):
    model = build(kind, attn="eager", **{"bert": _BERT, "gpt_neox": _BERT, "gemma3_text": _GEMMA, "gemma4_text": _GEMMA_4}[kind], **says)
    assert generated(speculate(model, ROWS[:1], None, max_new_tokens=12), ROWS[:1]) == plain(model, ROWS[:1], max_new_tokens=12)


def quantised(model, *names):
    """Its linear layers in 8 bits, with one scale for all activations of a pass; all of them, or those whose names end so."""
    layers = {name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and name.endswith(names or "")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), layers, dtype=torch.qint8)


@pytest.mark.skipif(not hasattr(torch.ao, "quantization"), reason="this torch has no quantize_dynamic")
@pytest.mark.parametrize("names", [(), ("lm_head",), ("q_proj",)], ids=["all", "head", "queries"])
def test_a_target_whose_activations_share_a_scale_is_refused_and_a_draft_is_not(names):
    target = tiny_llama(3)
    other = quantised(target, *names)
    with pytest.raises(ValueError, match=r"target: LlamaForCausalLM has layers of torch\.ao\..*\(quantize_dynamic\).*speculative=False"):
        speculate(other, ROWS[:1], None)
    hf_specdec.disable(other)
    out = speculate(target, ROWS, other, max_new_tokens=12)
    assert generated(out, ROWS) == plain(target, ROWS, max_new_tokens=12) and out.speculation.accepted > 0


def test_offloaded_models_run_where_their_hooks_say(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    expected = plain(tiny_llama(3), ROWS, max_new_tokens=12)
    offloaded = accelerate.cpu_offload(tiny_llama(3), execution_device=torch.device("cpu"))
    assert offloaded.device.type == "meta"
    assert generated(speculate(offloaded, ROWS, None, max_new_tokens=12), ROWS) == expected
    assert generated(speculate(tiny_llama(3), ROWS, offloaded, max_new_tokens=12), ROWS) == expected
    on_disk = accelerate.disk_offload(tiny_llama(3), tmp_path, execution_device=torch.device("cpu"))
    assert generated(speculate(on_disk, ROWS, None, max_new_tokens=12), ROWS) == expected


# --- inputs -----------------------------------------------------------------------------------------------------------------


def test_given_positions_are_compared_in_whatever_shape_they_come():
    model, inputs = hf_specdec.enable(tiny_llama(3)), padded(repetitive(9) + prompts(9, seed=2))
    counted = torch.arange(9)
    expected = plain(model, [row.tolist() for row in inputs["input_ids"]], max_new_tokens=8)
    for positions in (counted[None], counted[None].repeat(2, 1)):
        out = model.generate(**inputs, position_ids=positions, max_new_tokens=8, do_sample=False, pad_token_id=0, speculative=True)
        assert out[:, 9:].tolist() == expected
    for wrong in (counted[None] * 2, torch.arange(10)[None] + 3, (counted + 1)[None].repeat(2, 1), counted[None].repeat(3, 1)):
        with pytest.raises(ValueError, match="position_ids: the loop counts positions itself"):
            model.generate(**inputs, position_ids=wrong, max_new_tokens=8, do_sample=False, pad_token_id=0, speculative=True)


@pytest.mark.parametrize("new", [3, 12])
def test_a_second_turn_needs_the_whole_conversation(new):
    model = hf_specdec.enable(tiny_llama(3))
    first = ours(model, ROWS[:1], return_dict_in_generate=True)
    more = torch.tensor(prompts(new, seed=9))
    mask = torch.ones((1, first.sequences.shape[1] + new), dtype=torch.long)
    with pytest.raises(ValueError, match="whole conversation"):
        model.generate(input_ids=more, attention_mask=mask, **{CACHE: copy.deepcopy(first[CACHE])}, max_new_tokens=6, do_sample=False,
                       pad_token_id=0, speculative=True)
    whole = torch.cat([first.sequences, more], dim=1)
    out = model.generate(input_ids=whole, attention_mask=mask, **{CACHE: first[CACHE]}, max_new_tokens=6, do_sample=False, pad_token_id=0,
                         speculative=True)
    assert out[0, whole.shape[1]:].tolist() == plain(model, [whole[0].tolist()], max_new_tokens=6)[0]


class TextStream:
    def put(self, ids): ...

    def end(self): ...


@pytest.mark.parametrize("streamer", [lambda row, tokens, drafted: None, TextStream()], ids=["callable", "text"])
def test_beams_are_not_streamed(streamer):
    with pytest.raises(ValueError, match="num_beams=2: beams cannot be streamed|with beam search"):
        ours(hf_specdec.enable(tiny_llama(3)), ROWS[:1], num_beams=2, streamer=streamer)


# --- processors and criteria that know the batch ---------------------------------------------------------------------------


class PerRow(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores + torch.eye(len(ROWS), scores.shape[1]) * 9


class Limits(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] > 15, False])


class AnyRow(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return bool((input_ids[:, -1] % 3 == 1).any())


def test_what_knows_the_batch_is_refused():
    model = hf_specdec.enable(tiny_llama(3))
    with pytest.raises(ValueError, match="logits_processor: PerRow was given one row.*does not know the batch"):
        ours(model, ROWS, logits_processor=LogitsProcessorList([PerRow()]))
    with pytest.raises(ValueError, match="stopping_criteria: Limits was given one row and returned 2 verdicts"):
        ours(model, ROWS, stopping_criteria=[Limits()])
    with pytest.warns(UserWarning, match="stopping_criteria: AnyRow returned True, which plain generate.. takes for all rows of a batch"):
        ours(model, ROWS, stopping_criteria=[AnyRow()])
    assert torch.equal(ours(model, ROWS[:1], stopping_criteria=[AnyRow()]), ours(model, ROWS[:1], stopping_criteria=[AnyRow()], speculative=False))  # of one row it means the row


class Nothing(LogitsProcessor):
    def __init__(self, value: float):
        self.value = value

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, self.value)


@pytest.mark.parametrize("acceptance", ["auto", "block", "coupled", "spectr"])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_nothing_to_draw_from_is_an_error_and_no_short_answer(value, acceptance):
    model = hf_specdec.enable(tiny_llama(3))
    for draft in (None, ScriptedDraft(lambda row: [0, 0, 0])):
        with pytest.raises(RuntimeError, match="row 0: the target's probabilities are nan, or its processors have left no token"):
            ours(model, ROWS, do_sample=True, acceptance=acceptance, assistant_model=draft, logits_processor=LogitsProcessorList([Nothing(value)]))


# --- one draft, two calls -----------------------------------------------------------------------------------------------------


class Nested(LogitsProcessor):
    """Calls generate() with the same draft from within."""

    def __init__(self, model, draft):
        self.model, self.draft = model, draft

    def __call__(self, input_ids, scores):
        ours(hf_specdec.enable(self.model), ROWS[:1], max_new_tokens=2, assistant_model=self.draft)
        return scores


@pytest.mark.parametrize("make", [PromptLookupDraft, lambda: ModelDraft(perturbed(tiny_llama(3)))], ids=["lookup", "model"])
def test_a_draft_serves_one_call_at_a_time_and_the_next_one_after_an_error(make):
    model, draft = hf_specdec.enable(tiny_llama(3)), make()
    with pytest.raises(ValueError, match="is in use by another call.*a draft of its own"):
        ours(model, ROWS[:1], assistant_model=draft, logits_processor=LogitsProcessorList([Nested(tiny_llama(3), draft)]))
    assert generated(speculate(model, ROWS, draft, max_new_tokens=12), ROWS) == plain(model, ROWS, max_new_tokens=12)


@pytest.mark.parametrize("make", [
    lambda model, shared: MixtureDraft([CascadeDraft(model, shared), shared]), lambda model, shared: CascadeDraft(model, MixtureDraft([MixtureDraft([shared]), shared])),
], ids=["beside", "within"])
def test_one_draft_at_two_places_is_refused_before_any_work(make):
    model = hf_specdec.enable(tiny_llama(3))
    with pytest.raises(ValueError, match="one and the same RecyclingDraft is in this .*twice"):
        ours(model, ROWS, assistant_model=make(perturbed(tiny_llama(3)), RecyclingDraft()))


def test_a_draft_inside_another_one_serves_one_call_at_a_time_too():
    model, inside = hf_specdec.enable(tiny_llama(3)), RecyclingDraft()
    with pytest.raises(ValueError, match="this RecyclingDraft is in use by another call"):
        ours(model, ROWS[:1], assistant_model=MixtureDraft([inside, "suffix_automaton"]),
             logits_processor=LogitsProcessorList([Nested(tiny_llama(3), MixtureDraft([inside]))]))
    assert generated(speculate(model, ROWS, inside, max_new_tokens=12), ROWS) == plain(model, ROWS, max_new_tokens=12)


def test_a_copy_made_while_its_draft_is_in_use_serves_a_call_inside_the_call():
    model, draft = hf_specdec.enable(tiny_llama(3)), PromptLookupDraft()

    class Copying(Nested):
        def __call__(self, input_ids, scores):
            ours(hf_specdec.enable(self.model), ROWS[:1], max_new_tokens=2, assistant_model=copy.deepcopy(draft))
            return scores

    out = ours(model, ROWS[:1], assistant_model=draft, logits_processor=LogitsProcessorList([Copying(tiny_llama(3), None)]))
    assert out[0, len(ROWS[0]):].tolist() == plain(model, ROWS[:1], max_new_tokens=12)[0]


@pytest.mark.parametrize("at", range(1, 13))
def test_ctrl_c_while_a_draft_is_taken_leaves_it_free_and_while_it_is_given_back_another_one_at_its_address(at):
    draft, before, lines, entered = PromptLookupDraft(), sys.gettrace(), [], False

    def trace(frame, event, arg):
        if frame.f_code.co_name != "in_use":
            return None
        lines.extend([frame.f_lineno] * (event == "line"))
        if len(lines) == at:
            sys.settrace(before)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with draft.in_use():
            entered = True
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    if not entered:
        with draft.in_use():
            pass
    del draft
    gc.collect()
    assert not base._in_use


def test_threads_with_drafts_of_their_own_get_their_own_texts():
    model, found = hf_specdec.enable(tiny_llama(3)), {}
    expected = plain(model, ROWS, max_new_tokens=12)

    def work(number: int) -> None:
        found[number] = generated(speculate(model, ROWS, PromptLookupDraft(), max_new_tokens=12), ROWS)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(texts == expected for texts in found.values()) and len(found) == 3


@dataclass
class Plain(Draft):
    """A draft of the caller's own that compares by value, and so has no hash."""

    token: int = 5

    def propose(self, context, k):
        return Proposal.from_lists([[self.token] * own for own in k], context.device, "plain")


def test_a_draft_of_the_callers_own_needs_no_hash():
    target = tiny_llama(3)
    assert generated(speculate(target, ROWS, Plain(), max_new_tokens=12), ROWS) == plain(target, ROWS, max_new_tokens=12)


# --- what a generation config says --------------------------------------------------------------------------------------------


def test_a_generation_config_of_the_callers_means_what_arguments_mean():
    model, row = hf_specdec.enable(tiny_llama(3)), repetitive(13)[:1]
    draft = perturbed(model, 0.05)

    def proposed(options, **settings):
        config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0, **settings)
        out = model.generate(**padded(row), generation_config=config, assistant_model=draft, return_dict_in_generate=True, **options)
        return max(entry.proposed for entries in out.speculation.rounds for entry in entries)

    assert proposed({"speculative": True}, num_assistant_tokens=7) == 7
    assert proposed({"speculative": {"num_assistant_tokens": 3}}, num_assistant_tokens=7) == 3
    assert proposed({"speculative": {"seed": 1}, "num_assistant_tokens": 2}, num_assistant_tokens=7) == 2
    with pytest.raises(ValueError, match='^assistant_confidence_threshold=0.4.*"draft_stop": "confidence", "draft_confidence"'):
        proposed({"speculative": True}, assistant_confidence_threshold=0.4)
    with pytest.raises(ValueError, match="^max_matching_ngram_size=3.*num_assistant_tokens says"):
        proposed({"speculative": True}, max_matching_ngram_size=3)
    with pytest.raises(ValueError, match="^token_healing=True: .*heal_tokens"):
        proposed({"speculative": True}, token_healing=True)
    model.generation_config.assistant_confidence_threshold = 0.4  # what a checkpoint carries is nobody's wish
    assert proposed({"speculative": {"num_assistant_tokens": 3}}, assistant_confidence_threshold=0.4) == 3


@pytest.mark.parametrize("name, value, words", [
    ("token_healing", True, "heal_tokens"), ("dola_layers", "low", "DoLa")])
def test_what_the_models_own_config_asks_for_is_refused_with_where_that_is(name, value, words):
    model, where = hf_specdec.enable(tiny_llama(3)), f"It is set in model.generation_config: model.generation_config.{name} = None"
    with pytest.raises(ValueError, match=f"^{name}.*{words}") as caught:
        ours(model, ROWS[:1], **{name: value})
    assert where not in str(caught.value)
    expected = ours(model, ROWS[:1])
    setattr(model.generation_config, name, value)
    for options in ({}, {"generation_config": GenerationConfig()}, {name: value}):
        with pytest.raises(ValueError, match=f"^{name}.*{words}.*{where}"):
            ours(model, ROWS[:1], **options)
    if name != "token_healing":  # without a tokenizer, transformers has refused that before
        with pytest.raises(ValueError, match=f"^{name}.*{words}.*{where}"):
            model.generate(**padded(ROWS[:1]), max_new_tokens=4, custom_generate=SpeculativeDecoder(PromptLookupDraft()))
    off = {"token_healing": False, "dola_layers": None}[name]  # what a caller says comes before the config
    assert torch.equal(ours(model, ROWS[:1], **{name: off}), expected)
    setattr(model.generation_config, name, None)
    assert torch.equal(ours(model, ROWS[:1]), expected)


def test_a_prompt_of_padding_alone_is_told_of_the_mask_that_makes_it_a_token():
    """transformers takes a prompt of the beginning of text alone for padding, where the two are one token and there is no mask."""
    model, ids = hf_specdec.enable(tiny_llama(3)), torch.tensor([[0]])
    with pytest.raises(ValueError, match="input_ids: a row of padding alone.*attention_mask with a 1 where"):
        model.generate(ids, max_new_tokens=8, pad_token_id=0, speculative=True)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0)
    assert torch.equal(model.generate(ids, **options, speculative=True), model.generate(ids, **options))
