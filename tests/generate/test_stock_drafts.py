"""Drafts that a call asks for in the words of transformers' own assisted generation: the same draft, in the loop of this package."""

import warnings

import pytest
import torch
from transformers import GenerationConfig

import hf_specdec
from hf_specdec import SpeculativeDecoder
from hf_specdec.drafts.early_exit import EarlyExitDraft
from tests.helpers import enabled, padded, perturbed, plain, repetitive, tiny_llama

ROWS = repetitive(11, 7)
OPTIONS = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, return_dict_in_generate=True)


def asked(model, rows=ROWS, **options):
    out = model.generate(**padded(rows), **{**OPTIONS, **options})
    assert [row[len(out.sequences[0]) - 12:] for row in out.sequences.tolist()] == plain(model, rows, max_new_tokens=12)
    return out.speculation


@pytest.mark.parametrize("by_config", [False, True], ids=["keyword", "config"])
@pytest.mark.parametrize(("word", "value", "draft", "k"), [("prompt_lookup_num_tokens", 3, "prompt_lookup", 3), ("assistant_early_exit", 1, "early_exit", "auto")])
def test_the_draft_is_the_one_asked_for(word, value, draft, k, by_config):
    model, said = enabled(tiny_llama()), {word: value}
    config = GenerationConfig(**OPTIONS, **said)
    trace = asked(model, speculative=True, **dict(generation_config=config) if by_config else said)
    assert trace.config["draft"] == draft and trace.config["num_assistant_tokens"] == k
    assert not by_config or getattr(config, word) == value  # the caller's own is left alone


@pytest.mark.parametrize("said", [dict(speculative={"draft": "suffix_automaton", "draft_options": {"branches": 2}, "num_assistant_tokens": 5}),
                                  dict(speculative=True, assistant_model=perturbed(tiny_llama(), 0.02))], ids=["config", "model"])  # fmt: skip
def test_it_takes_the_place_of_what_enable_was_told(said):
    model = hf_specdec.enable(tiny_llama(), **said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = asked(model, prompt_lookup_num_tokens=2)
    assert trace.config["draft"] == "prompt_lookup" and trace.config["num_assistant_tokens"] == 2 and not trace.draft_calls


def test_options_beside_it_hold():
    model = enabled(tiny_llama())
    assert asked(model, speculative={"record_probs": True, "num_assistant_tokens": 4}, assistant_early_exit=1).config["num_assistant_tokens"] == 4
    assert asked(model, speculative={"draft": "prompt_lookup"}, prompt_lookup_num_tokens=4).config["num_assistant_tokens"] == 4
    assert asked(model, speculative=hf_specdec.SpeculativeConfig(draft="uniform", num_assistant_tokens=2), prompt_lookup_num_tokens=4).config["draft"] == "prompt_lookup"


def test_a_value_that_asks_for_nothing_leaves_the_call_as_it_is():
    trace = asked(enabled(tiny_llama()), speculative={"draft": "uniform", "num_assistant_tokens": 2}, prompt_lookup_num_tokens=None, assistant_early_exit=None)
    assert trace.config["draft"] == "uniform"


@pytest.mark.parametrize(("options", "words"), [
    (dict(prompt_lookup_num_tokens=3, assistant_early_exit=1), "prompt_lookup_num_tokens=3 and assistant_early_exit=1 are two drafts. Pass one"),
    (dict(prompt_lookup_num_tokens=3, assistant_model=tiny_llama()), "prompt_lookup_num_tokens=3 and assistant_model=LlamaForCausalLM are two drafts"),
    (dict(prompt_lookup_num_tokens=3, speculative={"draft": "mixture"}), 'prompt_lookup_num_tokens=3 and speculative={"draft": \'mixture\'} are two drafts'),
    (dict(prompt_lookup_num_tokens=3, num_assistant_tokens=4), "prompt_lookup_num_tokens=3 and num_assistant_tokens=4 contradict"),
    (dict(prompt_lookup_num_tokens=65), "prompt_lookup_num_tokens=65 .*1..64"),
    (dict(prompt_lookup_num_tokens=0.5), "prompt_lookup_num_tokens=0.5 .*1..64"),
    (dict(assistant_early_exit=3), "assistant_early_exit=3: layers=3 must be an int in 1..2"),
    (dict(use_mtp=True), "speaks of no prediction module"),
], ids=lambda value: "" if isinstance(value, str) else " ".join(value))  # fmt: skip
def test_two_drafts_and_numbers_out_of_range_are_refused(options, words):
    model = enabled(tiny_llama())
    with pytest.raises(ValueError, match=words):
        model.generate(**padded(ROWS), **{**OPTIONS, "speculative": True, **options})


def test_the_hook_takes_its_draft_itself():
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens=3"):
        tiny_llama().generate(**padded(ROWS), **OPTIONS, prompt_lookup_num_tokens=3, custom_generate=SpeculativeDecoder())


def test_the_layers_are_those_of_this_model():
    model = enabled(tiny_llama())
    torch.manual_seed(0)
    ours, by_hand = (asked(model, speculative={"num_assistant_tokens": 3}, **options) for options in (dict(assistant_early_exit=1), dict(assistant_model=EarlyExitDraft(model, 1))))
    assert ours.rounds == by_hand.rounds and ours.proposed
