"""Tools that a request makes a model call, as transformers' server reads them."""

import inspect
import json
from importlib.util import find_spec

import pytest
import torch
from transformers import LogitsProcessorList, Qwen2Config, Qwen2ForCausalLM

import hf_specdec
from hf_specdec.commands import tools
from hf_specdec.commands.requests import Grammars, check, processors_of
from hf_specdec.commands.tools import form_of, forced, tag_of

from ..bench.conftest import byte_tokenizer, tiny_model
from .test_serve import TEMPLATE

SHOWN = TEMPLATE + "{{ tools }}"


def tool(name: str, **properties) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}}}


WEATHER, CLOCK = tool("weather", city={"enum": ["Bern", "Oslo"]}, days={"enum": [1, 2]}), tool("clock", zone={"enum": ["UTC"]})
NAMED = {"type": "function", "function": {"name": "clock"}}
FLAT = [{"type": "function"} | each["function"] for each in (WEATHER, CLOCK)]  # of responses


def qwen() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                                        eos_token_id=256, pad_token_id=256, bos_token_id=None, initializer_range=0.2)).eval()


def test_whose_calls_can_be_forced():
    tokenizer, model = byte_tokenizer(), qwen()
    assert form_of(tokenizer, model) == "json" and form_of(tokenizer, tiny_model()) is None
    model.config.model_type = "qwen3_5"
    assert form_of(tokenizer, model) == "xml"


@pytest.mark.parametrize("said, form, message", [
    ({"tool_choice": "required"}, None, "tool_choice: 'auto' or 'none'"), ({"tool_choice": "any"}, "json", "tool_choice: \"none\""), ({"tool_choice": {"type": "function"}}, "json", "tool_choice"),
    ({"tool_choice": {"function": 5}}, "json", "tool_choice"), ({"tool_choice": {"function": {"name": ["f"]}}}, "json", "tool_choice"), ({"tool_choice": {"function": {"name": "rain"}}}, "json", "'rain' is none of the tools, which are 'weather', 'clock'"),
    ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "json", "tools: a forced call"), ({"tool_choice": "required", "tools": ["weather"]}, "json", "tools: a forced call"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "json", "leave out response_format"),
    ({"input": "a", "parallel_tool_calls": False}, "json", "parallel_tool_calls")], ids=str)
def test_what_cannot_be_forced_is_refused_by_name(said, form, message):
    pytest.importorskip("xgrammar")
    with pytest.raises(ValueError, match=message):
        check({"tools": [WEATHER, CLOCK]} | said, SHOWN, form)


def test_forcing_needs_xgrammar(monkeypatch):
    monkeypatch.setattr(tools, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install xgrammar"):
        check({"tools": [CLOCK], "tool_choice": "required"}, SHOWN, "json")


def test_what_is_not_forced_needs_nothing():
    for choice in (None, "auto", "none"):
        check(said := {"tools": [{}], "tool_choice": choice}, SHOWN)
        assert forced(said) is None and tag_of(said, "json", "", False, 2) is None
    assert forced({"tool_choice": "required"}) is None  # of no tools


@pytest.mark.skipif(find_spec("xgrammar") is None, reason="needs xgrammar")
@pytest.mark.parametrize("form", ["json", "xml"])
@pytest.mark.parametrize("said", [{"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": NAMED}, {"tool_choice": {"type": "function", "name": "weather"}, "tools": FLAT}],
                         ids=["required", "named", "responses"])
def test_a_forced_call_is_read_as_one_of_the_tool_and_is_plain_generates(said, form):
    utils = pytest.importorskip("transformers.cli.serving.utils")
    tokenizer, model, body = byte_tokenizer(), hf_specdec.enable(qwen()), {"tools": [WEATHER, CLOCK], "frequency_penalty": 2.0} | said  # no whitespace without end
    inputs = tokenizer("<|im_start|>assistant\n", return_tensors="pt")
    prompt = inputs["input_ids"].shape[1]
    grammars = Grammars(model, tokenizer, form)
    out, plain = (model.generate(**inputs, max_new_tokens=200, do_sample=False, logits_processor=LogitsProcessorList(processors_of(body, inputs["input_ids"][0], grammars)), **each)
                  for each in ({"speculative": True, "num_assistant_tokens": 3}, {}))
    assert torch.equal(out, plain) and out[0, -1] == 256
    text = tokenizer.decode(out[0, prompt:], skip_special_tokens=True)
    assert text.startswith("<tool_call>\n") and text.endswith("\n</tool_call>") and text.count("<tool_call>") == 1
    if hasattr(utils, "parse_assistant_message"):
        model.config.model_type = {"json": "qwen2", "xml": "qwen3_5"}[form]
        more = {"tools": [WEATHER, CLOCK]} if "tools" in inspect.signature(utils.parse_assistant_message).parameters else {}  # from 5.22 or so
        content, _, calls = utils.parse_assistant_message(tokenizer, model, out[0, prompt:-1], inputs["input_ids"], **more)
        assert not content and len(calls) == 1
        found = {"weather": {"city", "days"}, "clock": {"zone"}}
        assert set(json.loads(calls[0].arguments)) == found[calls[0].name] and (said["tool_choice"] != NAMED or calls[0].name == "clock")


def test_an_answer_that_ends_in_a_call_is_text():
    utils = pytest.importorskip("transformers.cli.serving.utils")
    if not hasattr(utils, "parse_assistant_message"):
        pytest.skip("this transformers reads calls otherwise")
    tokenizer, model = byte_tokenizer(), qwen()
    prompt, whole, cut = (tokenizer(text)["input_ids"] for text in ("<|im_start|>assistant\n", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', '<tool_call>\n{"name'))
    with pytest.raises(ValueError):
        utils.parse_assistant_message(tokenizer, model, cut, prompt)
    tokenizer.parse_response = tools.forgiving(tokenizer)
    assert utils.parse_assistant_message(tokenizer, model, cut, prompt)[::2] == ('<tool_call>\n{"name', None)
    assert utils.parse_assistant_message(tokenizer, model, whole, prompt)[2][0].name == "f"


@pytest.mark.skipif(find_spec("xgrammar") is None, reason="needs xgrammar")
@pytest.mark.parametrize("begun, thinks, text, other", [
    ("a:", False, '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>', "hello"),
    ("a:", True, '<think>what time</think>\n\n<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>', "<think>what time</think>\n\nhello"),
    ("<think>\n", True, 'what time</think>\n\n<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>', "what time</think>\n\nhello")],
                         ids=["at once", "thinking", "thinking already"])
def test_a_model_may_think_before_it_calls(begun, thinks, text, other):
    import xgrammar

    tokenizer = byte_tokenizer()
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=257, stop_token_ids=256))
    for many, count in ((None, 2), (False, 1)):
        tag = tag_of({"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": many}, "json", begun, thinks, 2)
        matchers = [xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag)) for _ in range(3)]
        call = text[text.index("<tool_call>") :]
        assert matchers[0].accept_string(text) and not matchers[1].accept_string(other)
        assert matchers[2].accept_string(f"{text}\n{call}") == (count == 2)
