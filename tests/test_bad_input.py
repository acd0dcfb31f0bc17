"""What is refused: with the right error, before any forward, in words that name the argument and the remedy, and with nothing changed.
Ctrl-C and exceptions in the middle of a call change nothing either."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    PreTrainedTokenizerFast,
    QuantizedCache,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    StaticCache,
    TextStreamer,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.cache_utils import DynamicLayer

import hf_specdec
from hf_specdec import SpeculativeConfig, SpeculativeDecoder, integration, registry
from hf_specdec.compat import CACHE
from hf_specdec.config import ALONE, OF_TARGET
from hf_specdec.drafts import CascadeDraft, Draft, ModelDraft, NGramDraft, PromptLookupDraft, UniformDraft
from hf_specdec.kv_cache import SlotPlan
from hf_specdec.proposal import Proposal
from hf_specdec.tree import Tree

from .architectures import FAMILIES
from .helpers import (
    VOCAB, ScriptedDraft, assert_unchanged, build, enabled, generated, padded, perturbed, plain, prompts, repetitive, snapshot, speculate, tiny_llama,
)

ROWS = repetitive(12)
NAN = float("nan")


def call(model, inputs=None, **options):
    options = {"speculative": True, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **options}
    return enabled(model).generate(**(padded(ROWS) if inputs is None else inputs), **options)


def state(model) -> tuple:
    return type(model), type(model).__mro__, snapshot(model)


@contextmanager
def left_alone(*models):
    """Class, weights, configs and attributes of the models are afterwards what they were."""
    before = [state(model) for model in models]
    yield
    for model, (kind, bases, rest) in zip(models, before):
        assert (type(model), type(model).__mro__) == (kind, bases)
        assert_unchanged(model, rest)


@contextmanager
def refused(*models, words, error=ValueError):
    """The block raises `error`, whose message has all of `words`; no model has run and none is changed."""
    forwards = []
    hooks = [model.register_forward_pre_hook(lambda module, _: forwards.append(type(module).__name__)) for model in models]
    try:
        with left_alone(*models), pytest.raises(error) as caught:
            yield
    finally:
        for hook in hooks:
            hook.remove()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in the message: {caught.value}"
    assert not forwards


@lru_cache
def encoder_decoder():
    sizes = dict(vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2)
    return NllbMoeForConditionalGeneration(NllbMoeConfig(**sizes, num_experts=2)).eval()


@lru_cache
def recurrent():
    config = RecurrentGemmaConfig(vocab_size=VOCAB, hidden_size=32, lru_width=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1)
    model = RecurrentGemmaForCausalLM(config).eval()
    block = model.model.layers[0].temporal_block
    block.forward = block.forward  # as accelerate gives it one
    return model


@lru_cache
def flex():
    model = tiny_llama()
    model.config._attn_implementation = "flex_attention"
    return model


def tokenizer(*words: str) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(("[unk]", *words))}, unk_token="[unk]"))
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[unk]")


LETTERS = tokenizer(*"abcdef")


# --- options ------------------------------------------------------------------------------------------------------------


K_REMEDY = ("num_assistant_tokens", "1..64", '"auto"')
LENIENCE_REMEDY = ("lenience", "(0, 1]", "1.0 keeps the output exact")

OPTIONS = [
    *[("num_assistant_tokens", value, K_REMEDY) for value in (0, -1, 65, 2.5, "x", True, NAN, [4])],
    *[("lenience", value, LENIENCE_REMEDY) for value in (0, -1, 1.5, NAN, float("inf"), "x", True)],
    *[("max_auto_tokens", value, ("max_auto_tokens", "1..64")) for value in (0, 65, "auto")],
    *[("seed", value, ("seed", "must be an int", "one such int per row")) for value in (-1, 2**63, 1.0, "x", True, [1, -1])],
    *[(name, value, (name, repr(value), "choose one of")) for name in ("draft", "acceptance") for value in ([1], {}, 3, NAN)],
    ("draft", UniformDraft(), ("draft", "choose one of", "pass the draft as assistant_model")),
    ("acceptance", "greedier", ("acceptance", "choose one of", "speculative_sampling")),
    ("draft", "oracle", ("draft", "choose one of", "prompt_lookup")),
    ("num_assistant_token", 4, ("num_assistant_token'", "the options are", "num_assistant_tokens")),
]


@pytest.mark.parametrize(("name", "value", "words"), OPTIONS, ids=[f"{name}={getattr(value, 'name', value)}" for name, value, _ in OPTIONS])
def test_a_wrong_option_is_refused_as_dict_key_and_in_a_config_file(name, value, words, tmp_path):
    model = enabled(tiny_llama())
    with refused(model, words=words):
        call(model, speculative={name: value})
    if isinstance(value, Draft):
        return
    (tmp_path / "speculative_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=f"speculative_config.json: .*{name}"):
        SpeculativeConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "words"), [o for o in OPTIONS if o[0] in ("num_assistant_tokens", "lenience", "acceptance")], ids=str,
)
def test_a_wrong_option_is_refused_beside_speculative_true(name, value, words):
    model = enabled(tiny_llama())
    with refused(model, words=words):
        call(model, **{name: value})


def test_a_streamer_that_nobody_can_call_is_named():
    model = enabled(tiny_llama())
    with refused(model, words=("streamer", "int", "streamer(row, tokens, drafted)"), error=TypeError):
        call(model, streamer=3)


@pytest.mark.parametrize("streamer", [lambda: None, lambda tokens: None, lambda row, tokens, drafted, more: None])
def test_a_streamer_of_other_values_is_refused_before_any_work(streamer):
    model = enabled(tiny_llama())
    with refused(model, words=("called with three values, streamer(row, tokens, drafted), and takes (",), error=TypeError):
        call(model, streamer=streamer)


class PutsTwo:
    def put(self, value, more):
        raise AssertionError

    def end(self):
        raise AssertionError


def test_a_put_of_other_values_is_what_python_says_before_any_work():
    model = enabled(tiny_llama())
    with refused(model, words=("put() missing 1 required positional argument: 'more'",), error=TypeError):
        call(model, streamer=PutsTwo())


def test_an_unknown_argument_of_generate_is_named():
    model = enabled(tiny_llama())
    with refused(model, words=("temprature", "typos")):
        call(model, temprature=0.5)


@pytest.mark.parametrize(("name", "meant"), [("k", "num_assistant_tokens"), ("gamma", "num_assistant_tokens"), ("num_speculative_tokens", "num_assistant_tokens"),
                                             ("draft_model", "assistant_model"), ("assistant", "assistant_model"), ("lenient", "lenience"), ("seeds", "seed"),
                                             ("max_tokens", "max_new_tokens")])
def test_an_unknown_argument_that_is_like_one_of_ours_is_told_which(name, meant):
    model = enabled(tiny_llama())
    with refused(model, words=(f"{name} is no argument of generate() (did you mean '{meant}'?)",)):
        call(model, **{name: 4})
    with refused(model, words=(name, "typos")):
        call(model, speculative=None, **{name: 4})


@pytest.mark.parametrize(("given", "words"), [
    ({"speculation": True}, "speculation is no argument of generate() (did you mean 'speculative'?)."),
    ({"speculate": True}, "(did you mean 'speculative'?)"), ({"speculativ": True}, "(did you mean 'speculative'?)"),
    ({"assistant": PromptLookupDraft()}, "(did you mean 'assistant_model'?)"), ({"draft": PromptLookupDraft()}, "(did you mean 'assistant_model'?)"),
    ({"num_assistant_token": 4}, "(did you mean 'num_assistant_tokens'?)"),
    ({"draft": "mixture"}, "draft is an option of speculative calls: pass speculative=True, too."),
    ({"acceptance": "block"}, "acceptance is an option of speculative calls: pass speculative=True, too."),
], ids=lambda part: part if isinstance(part, str) else ", ".join(part))
def test_a_plain_call_of_an_enabled_model_is_told_what_of_ours_was_meant(given, words):
    model = enabled(tiny_llama())
    with refused(model, words=("are not used by the model", words)):
        call(model, speculative=None, **given)


def test_speculative_misspelt_beside_itself_is_named():
    model = enabled(tiny_llama())
    with refused(model, words=("speculation is no argument of generate() (did you mean 'speculative'?)",)):
        call(model, speculation=True)


@pytest.mark.parametrize(("name", "one", "other"), [("num_assistant_tokens", 3, 7), ("acceptance", "greedy", "threshold"), ("lenience", 0.5, 1.0)])
def test_an_option_that_is_said_twice_is_said_alike(name, one, other):
    model = enabled(tiny_llama())
    with refused(model, words=(f"{name}={other!r}", f'speculative={{"{name}": {one!r}}}', "Say it once")):
        call(model, speculative={name: one}, **{name: other})
    assert torch.equal(call(model, speculative={name: one}, **{name: one}), call(model, speculative={name: one}, **{name: None}))


def test_an_option_in_a_generation_config_is_refused_with_where_it_goes():
    model = enabled(tiny_llama())
    with refused(model, words=('lenience is an option of the config: pass speculative={"lenience": 0.5}',)):
        call(model, generation_config=GenerationConfig(lenience=0.5))


@pytest.mark.parametrize(("argument", "place"), [
    (dict(assistant_model=PromptLookupDraft()), "SpeculativeDecoder(draft)"), (dict(streamer=print), "SpeculativeDecoder(streamer=...)"),
    (dict(stop_strings=["a"], tokenizer=LETTERS), "SpeculativeDecoder(stop_strings=..., tokenizer=...)"),
    (dict(num_assistant_tokens=3), 'SpeculativeDecoder(config={"num_assistant_tokens": ...})'),
    (dict(generation_config=GenerationConfig(num_assistant_tokens=3)), 'SpeculativeDecoder(config={"num_assistant_tokens": ...})'),
    (dict(lenience=0.5), 'SpeculativeDecoder(config={"lenience": ...})'), (dict(assistant_tokenizer=LETTERS), "assistant_tokenizer=..."),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_what_a_custom_generate_is_not_handed_is_refused_on_an_enabled_model(argument, place):
    model = enabled(tiny_llama())
    with refused(model, words=("transformers does not hand it to custom_generate", place)):
        call(model, speculative=None, custom_generate=SpeculativeDecoder(), **argument)


@pytest.mark.parametrize(("name", "value"), [("seed", 1), ("seed", [1, 2]), ("draft", "mixture"), ("draft_stop", "heuristic"), ("max_auto_tokens", 8), ("compile", True),
                                             ("record_probs", True), ("threshold", 0.3), ("draft_options", {"branches": 2}), ("draft_source", "folder")])
@pytest.mark.parametrize("speculative", [True, {"lenience": 1.0}, SpeculativeConfig()], ids=["True", "dict", "config"])
def test_an_option_of_the_config_beside_it_is_refused_with_where_it_goes(name, value, speculative):
    model = enabled(tiny_llama())
    with refused(model, words=(f'{name} is an option of the config: pass speculative={{"{name}": {value!r}}}',)):
        call(model, speculative=speculative, **{name: value})


def test_every_option_is_taken_beside_speculative_or_named_there():
    model, taken = enabled(tiny_llama()), {"num_assistant_tokens": 3, "acceptance": "greedy", "lenience": 1.0}
    assert call(model, **taken)[0, 12:].tolist() == plain(model, ROWS, max_new_tokens=5)[0]
    for name in {field.name for field in dataclasses.fields(SpeculativeConfig)} - set(taken):
        with refused(model, words=(f"{name} is an option of the config",)):
            call(model, **{name: "x"})
    assert call(model, seed=None)[0, 12:].tolist() == plain(model, ROWS, max_new_tokens=5)[0]


def test_a_draft_passed_as_draft_is_told_its_argument():
    model = enabled(tiny_llama())
    with refused(model, words=("draft=UniformDraft", "passed as assistant_model")):
        call(model, draft=UniformDraft())


@pytest.mark.parametrize(("name", "hint"), [
    *[(name, "did you mean 'num_assistant_tokens'?") for name in ("k", "K", "gamma", "num_speculative_tokens", "num_assistant_token")],
    ("draft_model", "did you mean 'draft'?), or assistant_model of generate() for a model"), ("lenient", "did you mean 'lenience'?"),
    *[(name, f"{name} is an argument of generate(), beside speculative=") for name in ("assistant_model", "max_new_tokens")],
])
def test_an_unknown_option_is_told_what_was_meant(name, hint):
    model = enabled(tiny_llama())
    with refused(model, words=(f"'{name}'", hint, "the options are")):
        call(model, speculative={name: 3})
    with refused(words=("SpeculativeConfig()", f"'{name}'", hint, "it takes"), error=TypeError):
        SpeculativeConfig(**{name: 3})


@pytest.mark.parametrize(("option", "given", "name"), [
    ("draft", "mixtur", "mixture"), ("draft", "prompt-lookup", "prompt_lookup"), ("draft", "PromptLookupDraft", "prompt_lookup"),
    ("draft", "smollm_drafter", "smollm2_drafter"), ("acceptance", "typcal", "typical"), ("draft_stop", "Confidence", "confidence"),
])
def test_an_unknown_name_is_told_the_nearest_one(option, given, name):
    with pytest.raises(ValueError, match=rf"{option}='{given}' is not known \(did you mean '{name}'\?\); choose one of"):
        SpeculativeConfig(**{option: given})


def test_a_name_that_is_like_none_is_told_no_other():
    with pytest.raises(ValueError, match="unknown speculative option 'zzz'; the options are"):
        SpeculativeConfig.from_dict({"zzz": 1})


def test_a_model_among_the_options_is_named_by_its_type_and_told_its_argument():
    model = enabled(tiny_llama())
    with refused(model, words=("draft=LlamaForCausalLM is no name: pass the draft as assistant_model, beside speculative=",)):
        call(model, speculative={"draft": model})
    with pytest.raises(ValueError) as caught:
        SpeculativeConfig(draft=model)
    assert "Linear" not in str(caught.value) and len(str(caught.value)) < 600
    for value, words in ((model, "speculative=LlamaForCausalLM must be True"), (PromptLookupDraft(), "passed as assistant_model, beside speculative=True"),
                         ("mixture", 'Pass speculative={"draft": "mixture"}'), (SpeculativeConfig, "SpeculativeConfig()")):
        with refused(model, words=(words,)):
            call(model, speculative=value)


@pytest.mark.parametrize("prompt", ["Hello", [[1, 2, 3]], {"input_ids": torch.tensor([[1, 2]])}, torch.tensor([1, 2])], ids=["text", "a list", "what a tokenizer returns", "one row"])
def test_a_prompt_is_token_ids(prompt):
    with pytest.raises(TypeError, match=r"inputs: expected token ids int64 \[B, L\], got (str|list|dict|a Tensor of the shape \[2\])\. Pass \*\*tokenizer"):
        integration.generate(tiny_llama(), prompt)


def test_the_class_of_the_decoder_is_told_to_be_made_an_instance():
    with pytest.raises(TypeError, match="takes an instance, SpeculativeDecoder()"):
        call(tiny_llama(), speculative=None, custom_generate=SpeculativeDecoder)


@pytest.mark.parametrize(("make", "role"), [(ModelDraft, "assistant_model"), (lambda name: CascadeDraft(name, PromptLookupDraft()), "model")])
def test_a_draft_that_runs_a_model_is_not_made_of_a_name(make, role):
    with pytest.raises(TypeError, match=f"{role}: expected a transformers model, got str. Load one"):
        make("gpt2")


@pytest.mark.parametrize("text", ['{"lenience": NaN}', '{"lenience": Infinity}', '{"lenience": -Infinity}', '{"lenience": 1e999}',
                                  '{"num_assistant_tokens": NaN}', '{"seed": 1e999}', '{"seed": [1, NaN]}', '{"max_auto_tokens": NaN}'])
def test_a_number_in_a_config_file_that_is_not_finite_is_refused_with_its_key(text, tmp_path):
    path = tmp_path / "speculative_config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"speculative_config.json: {next(iter(json.loads(text)))}=.*must be"):
        SpeculativeConfig.from_pretrained(path)
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["[]", "4", '"auto"', "null", "{", ""])
def test_a_config_file_that_holds_no_object_is_refused_by_name(text, tmp_path):
    (tmp_path / "speculative_config.json").write_text(text)
    with pytest.raises(ValueError, match="speculative_config.json"):
        SpeculativeConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("value", [3, "yes", [True], 0.5])
def test_speculative_is_a_bool_a_dict_or_a_config(value):
    model = enabled(tiny_llama())
    with refused(model, words=("speculative=", "True, False, a dict or a SpeculativeConfig")):
        call(model, speculative=value)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_number_of_seeds_is_the_number_of_rows(rows):
    model = enabled(tiny_llama())
    with refused(model, words=("seed", f"2 seeds for {rows} rows", "give one per row")):
        call(model, padded(prompts(*[5] * rows)), speculative={"seed": [1, 2]}, do_sample=True)


@pytest.mark.parametrize(("rule", "do_sample"), [("greedy", True), ("speculative_sampling", False)])
def test_a_rule_that_contradicts_do_sample_is_refused(rule, do_sample):
    model = enabled(tiny_llama())
    with refused(model, words=("acceptance", "do_sample", "auto")):
        call(model, acceptance=rule, do_sample=do_sample)


# --- models and drafts --------------------------------------------------------------------------------------------------


MODELS = [
    (encoder_decoder, ("NllbMoeForConditionalGeneration", "routes tokens by a mask", "Use speculative=False")),
    (recurrent, ("RecurrentGemmaForCausalLM", "cannot be rolled back", "Use speculative=False")),
    (flex, ("LlamaForCausalLM", "flex_attention", "set_attn_implementation")),
]
every_model = pytest.mark.parametrize(("made", "words"), MODELS, ids=[made.__name__ for made, _ in MODELS])


@every_model
def test_a_target_that_cannot_be_used_is_refused_by_name(made, words):
    model = made()
    with refused(model, words=("model", *words)):
        hf_specdec.enable(model)
    with refused(model, words=("target", *words)):
        model.generate(**padded(ROWS), custom_generate=SpeculativeDecoder(), max_new_tokens=4)


@every_model
def test_a_draft_model_that_cannot_be_used_is_refused_by_name(made, words):
    model, draft = enabled(tiny_llama()), made()
    with refused(model, draft, words=("assistant_model", *words)):
        call(model, assistant_model=draft)
    with refused(draft, words=("assistant_model", *words)):
        SpeculativeDecoder(draft)


def test_a_model_without_weights_is_refused_by_name():
    model, other = enabled(tiny_llama()), enabled(tiny_llama().to("meta"))
    with refused(model, words=("assistant_model", "on the meta device", "Load them")):
        call(model, assistant_model=other)
    with pytest.raises(ValueError, match="target: LlamaForCausalLM is on the meta device"):
        call(other)


@pytest.mark.parametrize("thing", ["gpt2", 3, torch.nn.Linear(2, 2), PromptLookupDraft], ids=["str", "int", "module", "class"])
def test_what_is_neither_model_nor_draft_is_refused(thing):
    model = enabled(tiny_llama())
    with refused(model, words=("assistant_model", "transformers model or a hf_specdec Draft"), error=TypeError):
        call(model, assistant_model=thing)


def test_a_dict_that_names_another_draft_than_the_one_that_is_passed_is_refused():
    model, draft = enabled(tiny_llama()), tiny_llama()
    with refused(model, words=("assistant_model=LlamaForCausalLM", "speculative={\"draft\": 'mixture'}", "two drafts")):
        call(model, speculative={"draft": "mixture"}, assistant_model=draft)
    with refused(model, words=("assistant_model=PromptLookupDraft", "'recycling'")):
        call(model, speculative={"draft": "recycling"}, assistant_model=PromptLookupDraft())
    with refused(model, words=("assistant_model=LlamaForCausalLM", "'mixture'")):
        hf_specdec.enable(model, speculative={"draft": "mixture"}, assistant_model=draft)
    call(model, speculative={"draft": "model_tree"}, assistant_model=draft)
    call(model, speculative={"draft": "prompt_lookup"}, assistant_model=PromptLookupDraft())
    out = call(model, speculative=SpeculativeConfig(draft="mixture"), assistant_model=draft, return_dict_in_generate=True)
    hf_specdec.enable(model, speculative={"draft": "mixture"})
    said = call(model, speculative=None, assistant_model=draft, return_dict_in_generate=True)
    assert out.speculation.config["draft"] == said.speculation.config["draft"] == "model"


@pytest.mark.parametrize(("thing", "words"), [
    ("prompt_lookup", 'speculative={"draft": "prompt_lookup"}'), ("smollm2_drafter", 'speculative={"draft": "smollm2_drafter"}'),
    ("gpt2", "AutoModelForCausalLM.from_pretrained('gpt2')"), ("model", "Load the model"), (PromptLookupDraft, "Pass an instance: PromptLookupDraft()."),
    (ModelDraft, "the class ModelDraft. Pass an instance: ModelDraft(...)."), (LlamaForCausalLM, "LlamaForCausalLM.from_pretrained(...)"),
    ({"draft": "mixture"}, "speculative={'draft': 'mixture'}"), (SpeculativeConfig(), "passed as speculative="),
    (torch.compile(torch.nn.Linear(2, 2)), 'the model that was given to torch.compile; speculative={"compile": True}'),
], ids=lambda value: str(value).partition("(")[0])
def test_a_name_a_class_or_options_in_the_place_of_a_draft_are_told_what_to_pass(thing, words):
    model = enabled(tiny_llama())
    with refused(model, words=("assistant_model: expected", words), error=TypeError):
        call(model, assistant_model=thing)
    with refused(words=("draft: expected", words.replace("speculative", "config")), error=TypeError):
        SpeculativeDecoder(thing)


@pytest.mark.parametrize(("options", "words"), [
    ({"num_assistant_tokens": 4}, 'pass config={"num_assistant_tokens": ...}'), ({"k": 4}, 'pass config={"num_assistant_tokens": ...}'),
    ({"draft_stop": "heuristic"}, 'pass config={"draft_stop": ...}'), ({"assistant_model": PromptLookupDraft()}, "did you mean 'draft'?"),
    ({"stream": 1}, "did you mean 'streamer'?"), ({"zzz": 1}, "it takes draft, config, streamer"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else value)
def test_what_a_decoder_does_not_take_is_told_where_it_goes(options, words):
    with refused(words=(f"SpeculativeDecoder() has no place for '{next(iter(options))}'", words), error=TypeError):
        SpeculativeDecoder(**options)


@pytest.mark.parametrize(("options", "words"), [
    ({"k": 4}, 'speculative={"num_assistant_tokens": ...}'), ({"num_assistant_tokens": 4}, 'speculative={"num_assistant_tokens": ...}'),
    ({"draft": "mixture"}, 'speculative={"draft": ...}'), ({"draft_model": PromptLookupDraft()}, "pass assistant_model=..."),
    ({"zzz": 1}, "it takes model, speculative, assistant_model"),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else value)
def test_what_enable_does_not_take_is_told_where_it_goes(options, words):
    model = tiny_llama()
    with refused(model, words=("enable() has no place for", words), error=TypeError):
        hf_specdec.enable(model, **options)
    with refused(model, words=("enable() has no place for LlamaForCausalLM", "go by name, here or to generate()"), error=TypeError):
        hf_specdec.enable(model, model)


@pytest.mark.parametrize(("thing", "words"), [
    ("gpt2", "enable(AutoModelForCausalLM.from_pretrained('gpt2'))"), (LlamaForCausalLM, "enable(LlamaForCausalLM.from_pretrained(...))"),
    (AutoModelForCausalLM, "got the class AutoModelForCausalLM. Load one first"), (SimpleNamespace(model=tiny_llama()), "enable(pipe.model)"),
], ids=["name", "class", "auto class", "pipeline"])
def test_what_is_no_model_but_leads_to_one_is_told_how(thing, words):
    with refused(words=("model: expected a transformers model", words), error=TypeError):
        hf_specdec.enable(thing)
    with refused(words=("model: expected the model that was enabled, got",), error=TypeError):
        hf_specdec.disable(thing)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: PromptLookupDraft(max_match=3), "PromptLookupDraft() has no place for 'max_match' (did you mean 'min_match'?); it takes min_match"),
    (lambda: PromptLookupDraft(1, 2), "PromptLookupDraft() has no place for 2; it takes min_match"),
    (lambda: type("Own", (UniformDraft,), {})(x=1), "UniformDraft() has no place for 'x'; it takes vocab_size"),
    (lambda: type("Own", (PromptLookupDraft,), {"__init__": lambda self, width: None})(widths=1), "'widths' (did you mean 'width'?); it takes width"),
])
def test_what_the_constructor_of_a_draft_does_not_take_is_told_what_it_takes(make, words):
    with refused(words=(words,), error=TypeError):
        make()


@pytest.mark.parametrize("value", [0, True, 2.0, "3", None])
def test_a_match_length_that_is_none_is_refused(value):
    with refused(words=(f"min_match={value!r} must be an int in 1..",)):
        PromptLookupDraft(min_match=value)


def test_a_draft_that_takes_any_keyword_gets_them():
    class Own(UniformDraft):
        def __init__(self, *args, **options):
            self.given = args, options

    assert Own(1, x=2).given == ((1,), {"x": 2})


def test_an_unknown_draft_is_told_the_names_that_are_enough_and_what_the_others_need():
    with pytest.raises(ValueError, match="choose one of") as caught:
        SpeculativeConfig(draft="oracle")
    alone, _, others = str(caught.value).partition("], a drafter")
    makers = {name: inspect.signature(registry.load(registry.DRAFTS, name, "draft")).parameters.values() for name in registry.DRAFTS}
    needing_none = {name for name, given in makers.items() if all(each.default is not each.empty for each in given)}
    assert needing_none | set(OF_TARGET) == {name for name in registry.DRAFTS if repr(name) in alone} == {*ALONE, *OF_TARGET}
    assert "'ngram'" in others and "draft_source" in others and "'cascade'" not in others


@pytest.mark.parametrize("thing", ["gpt2", None, torch.nn.Linear(2, 2)], ids=["str", "None", "module"])
def test_only_a_model_can_be_enabled(thing):
    with pytest.raises(TypeError, match="model: expected a transformers model"):
        hf_specdec.enable(thing)


@pytest.mark.parametrize("vocab", [VOCAB // 2, VOCAB * 2])
def test_a_draft_with_another_vocabulary_is_refused(vocab):
    model, draft = enabled(tiny_llama()), tiny_llama(vocab_size=vocab)
    with refused(model, draft, words=("assistant_model", f"{vocab} tokens", f"{VOCAB}", "needs a draft with the target's tokenizer")):
        call(model, assistant_model=draft)


@pytest.mark.parametrize("other", [tokenizer(*"fedcba"), tokenizer(*map(str, range(200)))], ids=["same size, other ids", "other words"])
def test_a_draft_with_another_tokenizer_is_refused_where_it_cannot_be_translated(other):
    model, draft = enabled(tiny_llama()), tiny_llama(1)
    both = {"tokenizer": LETTERS, "assistant_tokenizer": other}
    with refused(model, draft, words=("assistant_tokenizer", "the draft model itself")):
        call(model, assistant_model=ModelDraft(draft), **both)
    with pytest.raises(ValueError, match="assistant_tokenizer.*chains"):
        SpeculativeDecoder(draft, {"draft": "model_tree"}, **both)
    with pytest.raises(ValueError, match="NoneType is no model"):
        SpeculativeDecoder(None, **both)


def test_the_drafts_tokenizer_alone_is_not_passed_over():
    model, draft = enabled(tiny_llama()), tiny_llama(1)
    words = ("assistant_tokenizer", "needs tokenizer=", "translated")
    with refused(model, draft, words=words):
        call(model, assistant_model=draft, assistant_tokenizer=LETTERS)
    with refused(model, draft, words=words):
        SpeculativeDecoder(draft, assistant_tokenizer=LETTERS)


def test_the_targets_tokenizer_alone_is_as_welcome_as_in_a_plain_call():
    model = tiny_llama()
    expected = model.generate(**padded(ROWS), max_new_tokens=5, do_sample=False, pad_token_id=0, tokenizer=LETTERS)
    assert torch.equal(call(model, assistant_model=perturbed(model), tokenizer=LETTERS), expected)


def test_an_equal_tokenizer_is_not_refused():
    model = tiny_llama()
    tokens = call(model, assistant_model=perturbed(model), tokenizer=LETTERS, assistant_tokenizer=tokenizer(*"abcdef"))
    assert tokens[0, 12:].tolist() == plain(model, ROWS, max_new_tokens=5)[0]


@pytest.mark.parametrize(("name", "remedy"), [("model", "assistant_model"), ("ngram", "assistant_model")])
def test_a_draft_that_has_to_be_made_first_is_not_taken_by_name(name, remedy):
    model = enabled(tiny_llama())
    with refused(model, words=("draft", name, remedy)):
        call(model, speculative={"draft": name})


@pytest.mark.parametrize("speculative", [False, None])
@pytest.mark.parametrize("draft", [PromptLookupDraft(), UniformDraft()], ids=lambda draft: draft.name)
def test_a_draft_instance_without_speculative_is_refused(draft, speculative):
    model = enabled(tiny_llama())
    with refused(model, words=("assistant_model", "pass speculative=True")):
        call(model, assistant_model=draft, speculative=speculative)


# --- arguments of generate ----------------------------------------------------------------------------------------------


def a_row_of_padding():
    return {"input_ids": torch.tensor([[1, 2], [0, 0]]), "attention_mask": torch.tensor([[1, 1], [0, 0]])}


EMPTY = torch.zeros((1, 0), dtype=torch.long)

# name -> (model -> arguments, words of the message)
CALLS = {
    "beams of a draft that cannot follow them": (lambda m: dict(num_beams=2, assistant_model=UniformDraft()), ("num_beams=2", "use num_beams=1")),
    "beams that sample with a seed of their own": (lambda m: dict(num_beams=3, do_sample=True, speculative={"seed": 1}), ("seed=1", "num_beams=3", "torch.manual_seed", "num_beams=1")),
    "empty prompt": (lambda m: dict(inputs=dict(input_ids=EMPTY)), ("input_ids", "at least one token")),
    "empty prompt and mask": (lambda m: dict(inputs=dict(input_ids=EMPTY, attention_mask=EMPTY)), ("input_ids", "at least one token")),
    "no rows": (lambda m: dict(inputs=dict(input_ids=torch.zeros((0, 5), dtype=torch.long))), ("input_ids", "at least one row")),
    "a token beyond the vocabulary": (lambda m: dict(inputs=dict(input_ids=torch.tensor([[3, VOCAB]]))), ("input_ids", "from 3 to 61", "from 0 to 60", "tokenizer")),
    "a token below 0": (lambda m: dict(inputs=dict(input_ids=torch.tensor([[3, -100]]))), ("input_ids", "from -100 to 3", "from 0 to 60")),
    "tokens that are no integers": (lambda m: dict(inputs=dict(input_ids=torch.tensor([[3.0, 1.0]]))), ("input_ids", "int64", "torch.float32")),
    "tokens that are True and False": (lambda m: dict(inputs=dict(input_ids=torch.tensor([[True, False]]))), ("input_ids", "int64", "torch.bool")),
    "one empty row": (lambda m: dict(inputs=a_row_of_padding()), ("input_ids", "at least one")),
    "prompt beyond the context": (lambda m: dict(inputs=padded(prompts(257))), ("input_ids", "257", "256", "Shorten the prompt")),
    "short static cache": (lambda m: {CACHE: StaticCache(config=m.config, max_cache_len=15)}, (CACHE, "StaticCache has room for 15 tokens", "max_cache_len=16")),
    "quantised cache of two rows": (lambda m: {CACHE: quantised(), "inputs": padded(prompts(5, 5))}, (CACHE, "QuantizedCache", "one row", "one by one")),
    "quantised cache of beams": (lambda m: {CACHE: quantised(), "num_beams": 2}, (CACHE, "QuantizedCache", "one row", "num_beams")),
    "quantised cache of a padded row": (lambda m: {CACHE: quantised(), "inputs": dict(input_ids=torch.tensor([[0, 1, 2]]), attention_mask=torch.tensor([[0, 1, 1]]))},
                                        (CACHE, "QuantizedCache", "without padding")),
    "quantised cache of another model": (lambda m: {CACHE: quantised(3)}, (CACHE, "QuantizedCache", "3 layers", "target has 2")),
    "cache of another kind": (lambda m: {CACHE: Cache(layers=[])}, (CACHE, "Cache cannot be read", "Pass a DynamicCache")),
    "cache longer than the prompt": (lambda m: {CACHE: filled(m)}, (CACHE, "input_ids", "must be the whole conversation")),
    **{f"{name} cache by name": (lambda m, name=name: dict(cache_implementation=name), ("cache_implementation", name, "Leave cache_implementation unset"))
       for name in ("paged",)},
    "pieces of no tokens": (lambda m: dict(prefill_chunk_size=0), ("prefill_chunk_size=0", "1 or more", "Drop it")),
    "pieces of half a token": (lambda m: dict(prefill_chunk_size=0.5), ("prefill_chunk_size=0.5", "1 or more", "Drop it")),
    "contrastive search": (lambda m: dict(penalty_alpha=0.6, top_k=4), ("penalty_alpha=0.6", "contrastive search", "use speculative=False")),
    "contrastive search by config": (lambda m: dict(generation_config=GenerationConfig(penalty_alpha=0.6, top_k=4, max_new_tokens=5)),
                                     ("penalty_alpha=0.6", "contrastive search", "use speculative=False")),
    "DoLa": (lambda m: dict(dola_layers="low"), ("dola_layers='low'", "use speculative=False")),
    "forced words": (lambda m: dict(force_words_ids=[[3]]), ("force_words_ids", "constrained beam search", "use speculative=False")),
    "stock schedule": (lambda m: dict(num_assistant_tokens_schedule="constant"), ("num_assistant_tokens_schedule='constant'", "Drop it", "num_assistant_tokens")),
    "stock confidence": (lambda m: dict(assistant_confidence_threshold=0.3), ("assistant_confidence_threshold=0.3", "Drop it")),
    "custom_generate": (lambda m: dict(custom_generate=SpeculativeDecoder()),
                        ("custom_generate", "speculative=", "pass custom_generate=SpeculativeDecoder(...) alone")),
    "text streamer for two rows": (lambda m: dict(inputs=padded(prompts(5, 4)), streamer=TextStreamer(LETTERS)),
                                   ("streamer", "2", "streamer(row, tokens, drafted)")),
    "devices in step": (lambda m: dict(synced_gpus=True), ("synced_gpus=True", "whole model", "speculative=False")),
    "stop strings": (lambda m: dict(stop_strings=["a"]), ("stop_strings", "needs tokenizer=")),
    "stop strings in a config": (lambda m: dict(generation_config=GenerationConfig(stop_strings=["a"], max_new_tokens=5)),
                                 ("stop_strings", "needs tokenizer=")),
    "classifier-free guidance": (lambda m: dict(guidance_scale=1.5, num_beams=2), ("guidance_scale=1.5", "num_beams=2", "Use num_beams=1")),
    "classifier-free guidance of the caller's own": (lambda m: dict(logits_processor=[UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, m)], repetition_penalty=1.2),
                                                     ("logits_processor", "ClassifierFreeGuidance", "Drop it")),
    "mask of another width": (lambda m: dict(inputs=dict(input_ids=torch.tensor(ROWS), attention_mask=torch.ones(1, 15, dtype=torch.long))),
                              ("attention_mask has the shape [1, 15] and input_ids [1, 12]", "one number per token")),
    "mask of another width that hides something": (lambda m: dict(inputs=dict(input_ids=torch.tensor(ROWS), attention_mask=torch.tensor([[0] + [1] * 14]))),
                                                   ("attention_mask has the shape [1, 15] and input_ids [1, 12]", "one number per token")),
    "mask of other numbers": (lambda m: dict(inputs=dict(input_ids=torch.tensor(ROWS), attention_mask=torch.full((1, 12), 2))),
                              ("attention_mask holds other numbers", "1 for a token and 0 for padding")),
    "attentions of beams without a cache": (lambda m: dict(output_attentions=True, return_dict_in_generate=True, num_beams=2, use_cache=False), ("output_attentions", "num_beams=2", "Drop it")),
    "hidden states of beams without a cache": (lambda m: dict(output_hidden_states=True, return_dict_in_generate=True, num_beams=2, use_cache=False), ("output_hidden_states", "num_beams=2", "Drop it")),
}


def quantised(layers: int = 2):
    """Its backend may not be installed, and nothing of it is used before it is refused."""
    cache = QuantizedCache.__new__(QuantizedCache)
    Cache.__init__(cache, layers=[DynamicLayer() for _ in range(layers)])
    return cache


def filled(model) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    for layer in range(2):
        cache.update(torch.zeros(1, 2, 14, 8), torch.zeros(1, 2, 14, 8), layer)
    return cache




@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_be_served_is_refused(name):
    arguments, words = CALLS[name]
    model = enabled(tiny_llama())
    options = arguments(model)
    with refused(model, words=words):
        call(model, **options)


@pytest.mark.parametrize("name", ["prompt beyond the context", "short static cache", "classifier-free guidance",
                                  "contrastive search", "contrastive search by config", "DoLa", "forced words"])
def test_the_hook_refuses_what_the_override_refuses(name):
    arguments, words = CALLS[name]
    model = tiny_llama()
    options = {"inputs": padded(ROWS), "max_new_tokens": 5, **arguments(model)}
    with refused(model, words=words):
        model.generate(**options.pop("inputs"), **options, custom_generate=SpeculativeDecoder())


@pytest.mark.parametrize(("name", "value"), [("prompt_lookup_num_tokens", 3), ("penalty_alpha", 0.6)])
def test_what_the_models_own_config_asks_for_is_refused_too(name, value):
    model = enabled(tiny_llama())
    setattr(model.generation_config, name, value)
    with refused(model, words=(f"{name}={value}", "Drop it")):
        call(model)


def test_what_asks_for_nothing_is_not_refused():
    model = tiny_llama()
    tokens = call(model, penalty_alpha=0, prompt_lookup_num_tokens=None, cache_implementation="dynamic", num_assistant_tokens_schedule=None)
    assert tokens[0, 12:].tolist() == plain(model, ROWS, max_new_tokens=5)[0]


def test_a_hybrid_cache_by_name_is_what_transformers_makes_of_it_no_wish_at_all():
    model, config = tiny_llama(), GenerationConfig(cache_implementation="hybrid", max_new_tokens=5, do_sample=False, pad_token_id=0)
    expected = plain(model, ROWS, max_new_tokens=5, cache_implementation="hybrid")[0]
    assert call(model, cache_implementation="hybrid")[0, 12:].tolist() == expected
    assert model.generate(**padded(ROWS), generation_config=config, speculative=True)[0, 12:].tolist() == expected


def test_arguments_by_position_are_arguments_all_the_same():
    model, config = enabled(tiny_llama()), GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    ids = torch.tensor(ROWS)
    assert model.generate(ids, config, speculative=True)[0, 12:].tolist() == plain(model, ROWS, max_new_tokens=5)[0]
    config.cache_implementation = "paged"
    with refused(model, words=("cache_implementation='paged'",)):
        model.generate(ids, config, speculative=True)
    with pytest.raises(TypeError, match="generation_config"):
        model.generate(ids, config, generation_config=config, speculative=True)


def test_a_cache_that_the_model_s_own_config_asks_for_is_taken_away_there():
    model = enabled(tiny_llama())
    model.generation_config.cache_implementation = "paged"
    with refused(model, words=("cache_implementation='paged'", "model.generation_config.cache_implementation = None")):
        call(model)


def test_a_refused_cache_is_handed_back_as_it_was():
    model = enabled(tiny_llama())
    cache = filled(model)
    with refused(model, words=(CACHE,)):
        call(model, **{CACHE: cache})
    assert cache.get_seq_length() == 14 and all(not layer.keys.any() for layer in cache.layers)


# --- what a draft returns -----------------------------------------------------------------------------------------------


class BadDraft(Draft):
    """Proposes the right kind of thing for `good` rounds, and then what `make(batch, vocab)` makes."""

    name = "bad"

    def __init__(self, make, good: int = 0):
        self.make, self.good = make, good

    def propose(self, context, k):
        self.good -= 1
        if self.good >= 0:
            return Proposal.from_lists([[1] * min(own, 2) for own in k], context.device, self.name)
        return self.make(len(context.rows), context.vocab_size)


def tokens(batch: int, n: int = 3, value: int = 1) -> torch.Tensor:
    return torch.full((batch, n), value)


def laws(batch: int, vocab: int, n: int = 3) -> torch.Tensor:
    return torch.full((batch, n, vocab), 1 / vocab)


def spoiled(batch: int, vocab: int, value: float) -> torch.Tensor:
    probs = laws(batch, vocab)
    probs[-1, 1, 2] = value
    return probs


# name -> (batch, vocab) -> Proposal
BAD = {
    "an id that is V": lambda b, v: Proposal.chain(tokens(b, value=v)),
    "a negative id": lambda b, v: Proposal.chain(tokens(b, value=-1)),
    "nan": lambda b, v: Proposal.chain(tokens(b), spoiled(b, v, NAN)),
    "infinite": lambda b, v: Proposal.chain(tokens(b), spoiled(b, v, float("inf"))),
    "negative": lambda b, v: Proposal.chain(tokens(b), spoiled(b, v, -0.1)),
    "a row that sums to 1.02": lambda b, v: Proposal.chain(tokens(b), spoiled(b, v, 1 / v + 0.02)),
    "rows of zeros": lambda b, v: Proposal.chain(tokens(b), torch.zeros(b, 3, v)),
    "rows that sum to 2": lambda b, v: Proposal.chain(tokens(b), 2 * laws(b, v)),
    "logits": lambda b, v: Proposal.chain(tokens(b), torch.randn(b, 3, v)),
    "probs of another vocabulary": lambda b, v: Proposal.chain(tokens(b), laws(b, v + 1)),
    "probs of other nodes": lambda b, v: Proposal.chain(tokens(b), laws(b, v, 2)),
    "probs without batch": lambda b, v: Proposal.chain(tokens(b), laws(1, v)[0]),
    "too many rows": lambda b, v: Proposal.chain(tokens(b + 1)),
    "tokens of another tree": lambda b, v: Proposal(Tree((0, 0, 1, 1)), tokens(b), None, [3] * b),
    "too few sizes": lambda b, v: Proposal.chain(tokens(b), sizes=[3] * (b - 1)),
    "a size beyond N": lambda b, v: Proposal.chain(tokens(b), sizes=[4] * b),
    "a negative size": lambda b, v: Proposal.chain(tokens(b), sizes=[-1] * b),
    "int32": lambda b, v: Proposal.chain(tokens(b).int()),
    "float": lambda b, v: Proposal.chain(tokens(b).float()),
    "bool": lambda b, v: Proposal.chain(tokens(b).bool()),
    "nothing": lambda b, v: None,
    "a tensor": lambda b, v: tokens(b),
    "a token that its law cannot give": lambda b, v: Proposal.chain(tokens(b), torch.nn.functional.one_hot((tokens(b) + 1) % v, v).float()),
    "laws that are a list": lambda b, v: Proposal.chain(tokens(b), laws(b, v).tolist()),
    "sizes that are no ints": lambda b, v: Proposal.chain(tokens(b), sizes=[2.0] * b),
    "lists": lambda b, v: Proposal(Tree.chain(3), tokens(b).tolist(), None, [3] * b),
}


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_proposal_is_refused_before_the_target_sees_it(name, do_sample):
    model, rows = enabled(tiny_llama()), prompts(5, 3)
    with refused(model, words=("draft 'bad'", "a draft must return tokens", "sum to 1")):
        call(model, padded(rows), assistant_model=BadDraft(BAD[name]), num_assistant_tokens=3, do_sample=do_sample, max_new_tokens=9)


@pytest.mark.parametrize("name", ["an id that is V", "nan", "too many rows"])
def test_a_proposal_that_turns_bad_later_is_refused_too_and_the_next_call_is_exact(name):
    model, rows = enabled(tiny_llama()), prompts(5, 3)
    with left_alone(model), pytest.raises(ValueError, match="draft 'bad'"):
        call(model, padded(rows), assistant_model=BadDraft(BAD[name], good=3), num_assistant_tokens=3, max_new_tokens=20)
    assert generated(speculate(model, rows), rows) == plain(model, rows)


def test_what_is_not_meant_is_not_judged():
    """Places beyond a row's size may hold anything but ids out of range."""
    model, rows = tiny_llama(), prompts(5, 3)

    def padding_of_nan(batch, vocab):
        probs = laws(batch, vocab)
        probs[1, 1:] = NAN
        return Proposal.chain(tokens(batch), probs, [3, 1])

    out = speculate(model, rows, BadDraft(padding_of_nan), 3, do_sample=True, max_new_tokens=9, speculative={"seed": 0})
    assert out.speculation.new_tokens == [9, 9]


def test_more_tokens_than_were_asked_for_do_not_change_the_text():
    model, rows = tiny_llama(), prompts(5, 3)
    texts = [row + new for row, new in zip(rows, plain(model, rows, max_new_tokens=30))]

    class Eager(ScriptedDraft):
        def propose(self, context, k):
            return super().propose(context, [12] * len(k))

    out = speculate(model, rows, Eager.knowing(texts), 2, max_new_tokens=10)
    assert generated(out, rows) == plain(model, rows, max_new_tokens=10)


class Greedy(Draft):
    """Proposes the same proposal whatever it is asked for."""

    name = "greedy"

    def __init__(self, make):
        self.make = make

    def propose(self, context, k):
        return self.make(len(context.rows), context.vocab_size)


def bush(n: int) -> Tree:
    return Tree(tuple((node - 1) // 3 for node in range(1, n + 1)))


@pytest.mark.parametrize("tree", [Tree.chain(257), bush(300)], ids=["chain", "tree"])
def test_a_proposal_of_more_than_256_nodes_is_refused(tree):
    model = enabled(tiny_llama())
    draft = Greedy(lambda batch, vocab: Proposal(tree, tokens(batch, len(tree)), None, [len(tree)] * batch))
    with refused(model, words=("draft 'greedy'", f"{len(tree)} nodes", "at most 256", "Propose what `k` asks for")):
        call(model, assistant_model=draft, num_assistant_tokens=3, max_new_tokens=9)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", [Tree.chain(256), bush(256)], ids=["chain", "tree"])
def test_a_proposal_of_256_nodes_leaves_the_text_as_it_is(tree, do_sample, monkeypatch):
    model, rows, slots = tiny_llama(), prompts(5, 3), []
    draft = Greedy(lambda b, v: Proposal(tree, tokens(b, len(tree)), laws(b, v, len(tree)) if do_sample else None, [len(tree)] * b))
    lay = SlotPlan.lay
    monkeypatch.setattr(SlotPlan, "lay", lambda plan, *args: (lay(plan, *args), slots.append(plan.visible)))
    out = speculate(model, rows, draft, 2, seed=0, max_new_tokens=10, do_sample=do_sample)
    assert out.speculation.new_tokens == [10, 10]
    assert max(slots) <= 5 + 10 + (len(tree) if not tree.is_chain else 0)
    if not do_sample:
        assert generated(out, rows) == plain(model, rows, max_new_tokens=10)


def test_what_a_row_has_no_room_for_is_cut_off():
    chain, tree = Proposal.chain(tokens(2, 6), laws(2, 9, 6)), Proposal(Tree((0, 0, 1, 3, 2)), tokens(2, 5), None, [5, 4], "x")
    cut = chain.within([2, 4])
    assert (len(cut.tree), cut.sizes, cut.tokens.shape, cut.probs.shape) == (4, [2, 4], (2, 4), (2, 4, 9))
    cut = tree.within([1, 2])
    assert (cut.tree.parents, cut.sizes, cut.probs, cut.source) == ((0, 0, 1), [2, 3], None, "x")
    assert chain.within([6, 9]) is chain and tree.within([3, 3]) is tree
    assert tree.within([0, 0]).sizes == [0, 0] and tree.within([0, 0]).tokens.shape == (2, 0)


# --- Ctrl-C and exceptions ----------------------------------------------------------------------------------------------


STOPS = [KeyboardInterrupt, RuntimeError]
every_stop = pytest.mark.parametrize("error", STOPS, ids=lambda error: error.__name__)


@contextmanager
def breaking(monkeypatch, owner, method: str, error: type, after: int):
    """The method raises `error` at its call number `after`, counted from 0."""
    real, calls = getattr(owner, method), []

    def broken(*args, **kwargs):
        calls.append(None)
        if len(calls) > after:
            raise error("stopped")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, broken)
        yield
    assert len(calls) == after + 1


def drafts(target):
    corpus = [new + row for row, new in zip(repetitive(12, 9), plain(target, repetitive(12, 9)))]
    return {"model": ModelDraft(perturbed(target)), "prompt_lookup": PromptLookupDraft(), "uniform": UniformDraft(),
            "ngram": NGramDraft.from_tokens(corpus, order=3, vocab_size=VOCAB, min_order=1)}


@pytest.mark.share(1 / 6)
@every_stop
@pytest.mark.parametrize("method", ["propose", "commit", "evidence", "start"])
@pytest.mark.parametrize("name", ["model", "prompt_lookup", "ngram", "uniform"])
def test_an_exception_inside_a_draft_leaves_everything_as_it_was(name, method, error, monkeypatch):
    model, rows = enabled(tiny_llama()), repetitive(12, 9)
    draft = drafts(model)[name]
    models = [model, *([draft.model] if name == "model" else [])]
    with left_alone(*models), breaking(monkeypatch, draft, method, error, after=0 if method == "start" else 2):
        with pytest.raises(error, match="stopped"):
            call(model, padded(rows), assistant_model=draft, num_assistant_tokens=3, max_new_tokens=20)
    out = speculate(model, rows, draft, 3)
    assert generated(out, rows) == plain(model, rows)


@every_stop
@pytest.mark.parametrize("which", ["target", "draft"])
def test_an_exception_inside_a_forward_leaves_everything_as_it_was(which, error):
    model, rows = enabled(tiny_llama()), repetitive(12, 9)
    draft = perturbed(model)
    forwards = []

    def stop(*_):
        forwards.append(None)
        if len(forwards) == 3:
            raise error("stopped")

    hook = {"target": model, "draft": draft}[which].model.layers[1].register_forward_hook(stop)
    with left_alone(model, draft), pytest.raises(error, match="stopped"):
        call(model, padded(rows), assistant_model=draft, num_assistant_tokens=3, max_new_tokens=20)
    hook.remove()
    assert generated(speculate(model, rows, draft, 3), rows) == plain(model, rows)


@every_stop
def test_an_exception_inside_a_streamer_leaves_everything_as_it_was(error):
    model, rows = enabled(tiny_llama()), repetitive(12, 9)
    draft, seen = perturbed(model), []

    def streamer(row, new, drafted):
        seen.extend(new)
        if len(seen) > 6:
            raise error("stopped")

    with left_alone(model, draft), pytest.raises(error, match="stopped"):
        call(model, padded(rows), assistant_model=draft, streamer=streamer, max_new_tokens=20)
    assert generated(speculate(model, rows, draft, 3), rows) == plain(model, rows)


@every_stop
def test_an_exception_leaves_the_callers_cache_as_it_was(error, monkeypatch):
    model, row = enabled(tiny_llama()), ROWS[0]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([row[:-2]]), **{CACHE: cache}, use_cache=True)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    draft = PromptLookupDraft()
    with left_alone(model), breaking(monkeypatch, draft, "propose", error, after=2), pytest.raises(error, match="stopped"):
        call(model, assistant_model=draft, num_assistant_tokens=3, max_new_tokens=20, **{CACHE: cache})
    assert all(torch.equal(layer.keys, k) and torch.equal(layer.values, v) for layer, (k, v) in zip(cache.layers, before, strict=True))
    out = call(model, max_new_tokens=20, **{CACHE: cache})
    assert out[0, len(row):].tolist() == plain(model, ROWS)[0]


@every_stop
def test_an_exception_leaves_an_ngram_file_as_it_was(error, monkeypatch, tmp_path):
    model, path = enabled(tiny_llama()), tmp_path / "table.safetensors"
    drafts(model)["ngram"].save(path)
    before = hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir())
    draft = NGramDraft.load(path)
    with breaking(monkeypatch, draft, "propose", error, after=1), pytest.raises(error):
        call(model, assistant_model=draft, num_assistant_tokens=3, max_new_tokens=20)
    assert (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns, sorted(tmp_path.iterdir())) == before
    assert generated(speculate(model, ROWS, draft, 3), ROWS) == plain(model, ROWS)


@every_stop
def test_after_an_exception_the_draft_holds_no_cache(error, monkeypatch):
    model = enabled(tiny_llama())
    draft = ModelDraft(perturbed(model))
    with breaking(monkeypatch, draft, "commit", error, after=2), pytest.raises(error):
        call(model, assistant_model=draft, num_assistant_tokens=3, max_new_tokens=20)
    assert not draft.cached.cache.layers


def test_a_plain_call_after_a_refusal_and_an_interrupt_is_stock():
    model = tiny_llama()
    expected = plain(model, ROWS)
    with pytest.raises(ValueError):
        call(model, num_beams=2, do_sample=True, speculative={"seed": 1})
    with pytest.raises(KeyboardInterrupt):
        call(model, assistant_model=BadDraft(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt())), num_assistant_tokens=2)
    assert plain(model, ROWS) == expected


def test_a_compiled_model_is_enabled_before_it_is_compiled():
    import hf_specdec

    with pytest.raises(TypeError, match="before torch.compile"):
        hf_specdec.enable(torch.compile(tiny_llama()))
    with pytest.raises(TypeError, match="Enable the model inside it: enable\\(wrapped.module\\)"):
        hf_specdec.enable(torch.nn.DataParallel(tiny_llama()))


def test_a_draft_model_without_a_head_is_refused_before_any_work():
    classifier = LlamaForSequenceClassification(tiny_llama().config)
    for model in (tiny_llama().model, classifier):
        with pytest.raises(ValueError, match=f"assistant_model: {type(model).__name__} has no head that writes tokens.*AutoModelForCausalLM"):
            call(tiny_llama(), assistant_model=model)
        with pytest.raises(TypeError, match="no head that writes tokens"):
            integration.enable(model)


def test_a_draft_without_propose_is_named():
    from hf_specdec.drafts import Draft

    with pytest.raises(NotImplementedError, match="Own has no propose"):
        call(tiny_llama(), assistant_model=type("Own", (Draft,), {})())


def test_a_text_that_outgrows_the_table_of_positions_ends_in_an_error_that_says_so():
    gpt2 = build("gpt2", vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=20)
    ids = {"input_ids": torch.ones(1, 8, dtype=torch.long)}
    assert call(gpt2, ids, max_new_tokens=13, eos_token_id=None).shape == (1, 21)
    with pytest.raises(ValueError, match="max_new_tokens: a text has outgrown the 20 positions that .*may have 21 tokens at most"):
        call(gpt2, ids, max_new_tokens=14, eos_token_id=None)


def test_so_does_one_of_a_batch_whose_model_is_told_where_its_rows_begin():
    line = next(line for line in FAMILIES if line.name == "BART (its decoder)")
    bart = build(line.kind, **{**line.settings, "max_position_embeddings": 20})
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 4, 5, 6, 7, 8]])
    given = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    assert call(bart, given, max_new_tokens=13).shape == (2, 21)
    with pytest.raises(ValueError, match="max_new_tokens: a text has outgrown the 20 positions that .*may have 21 tokens at most"):
        call(bart, given, max_new_tokens=14)
