"""What clients of the OpenAI API ask `hf-specdec serve` for, and what they are told."""

import asyncio
import json
import socket
import time
from importlib.util import find_spec
from urllib.error import HTTPError

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

import hf_specdec
from hf_specdec.commands import requests
from hf_specdec.commands.requests import Grammars, Penalties, bias_of, check, check_input, check_messages, check_prompt, configured, processors_of, schema_of, singles
from hf_specdec.commands.streams import Pieces, before

from ..bench.conftest import byte_tokenizer, tiny_model
from .test_serve import TEMPLATE, asked, body, content, serving, streamed

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


# --- bad requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said, message", [
    ({"max_tokens": 0}, "max_tokens: expected a number of 1 or more, got 0"), ({"max_completion_tokens": "many"}, "max_completion_tokens"), ({"max_tokens": True}, "max_tokens"),
    ({"n": 0}, "n: expected"), ({"stream_options": 5}, "stream_options"), ({"best_of": 3}, "best_of"), ({"best_of": 1, "n": 2, "prompt": "a"}, "best_of: it is at least n"), ({"best_of": 3, "prompt": "a", "stream": True}, "best_of: .*without a stream"),
    ({"prediction": "a", "messages": []}, "prediction: "), ({"prediction": {"type": "content", "content": [5]}, "messages": []}, "prediction: "), ({"prediction": {"type": "content", "content": "a"}, "prompt": "a"}, "prediction: of chat"),
    ({"temperature": -1}, "temperature: expected a number of 0 or more"), ({"top_p": 1.5}, "top_p: expected a number from 0 to 1"), ({"presence_penalty": 3}, "from -2 to 2"),
    ({"seed": "one"}, "seed: expected an int"), ({"stop": [""]}, "stop"), ({"stop": 5}, "stop"), ({"stop": {"a": 1}}, "stop"), ({"logit_bias": {"the": 1}}, "logit_bias"), ({"logit_bias": [5]}, "logit_bias"),
    ({"suffix": "."}, "suffix"), ({"functions": [{}]}, "functions: this server does not do that: say tools"),
    ({"previous_response_id": "1"}, "send the whole conversation"), ({"tools": [{}]}, "tools: the chat template of this model"),
    ({"response_format": {"type": "xml"}}, "response_format"), ({"response_format": "json"}, "response_format"), ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format"),
    ({"stop": ["a" * 500, "b" * 501]}, "stop: texts of 1001 characters"), ({"n": 129}, "n: 129 answers"), ({"n": 10**9, "stream": True}, "n: "), ({"n": 3, "prompt": ["a"] * 700}, "n: 3 answers to each of 700 prompts"),
    ({"text": "a"}, "text: expected an object"), ({"tools": 5}, "tools: expected a list"), ({"include": 5}, "include"), ({"instructions": 5}, "instructions"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"), ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs: tokenize is said by the server"),
    ({"generation_config": 5}, "generation_config"), ({"generation_config": "["}, "generation_config"), ({"generation_config": "[]"}, "generation_config: expected a JSON object"),
    ({"seed": 2**63}, "seed: expected an int of 64 bits"), ({"temperature": 1e-320}, "temperature"), ({"temperature": 10**400}, "temperature"), ({"prompt": "a\ud83d"}, "half a character"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias: .*finite"), ({"logit_bias": {"5": 10**400}}, "logit_bias"), ({"logit_bias": {"300": 1}}, "logit_bias: token id 300 is not from 0 to 256")], ids=lambda each: str(each)[:50])
def test_what_cannot_be_done_is_refused_by_name(said, message):
    with pytest.raises(ValueError, match=message):
        check(said, TEMPLATE, size=257)


@pytest.mark.parametrize("said", [
    {}, {"tools": None, "text": None, "chat_template_kwargs": None, "generation_config": None}, {"n": 128, "prompt": ["a"] * 16}, {"chat_template_kwargs": {"thinking": True}, "generation_config": "{}"},
    {"seed": -(2**63), "temperature": 1e-9, "logit_bias": {"256": -100}}, {"n": 1, "logprobs": False, "top_logprobs": 0, "suffix": None, "stop": None, "stream": True, "seed": 0, "logit_bias": None, "response_format": None, "text": None, "best_of": 1},
    {"temperature": 0, "top_p": 1, "presence_penalty": -2, "frequency_penalty": 2.0, "max_tokens": 1, "stop": "a", "logit_bias": {"5": -100}, "response_format": {"type": "text"}},
    {"tools": [{}], "tool_choice": "none"}, {"tools": [], "tool_choice": "required"}, {"n": 3, "stream": False}], ids=str)
def test_what_means_nothing_or_can_be_done_is_not(said):
    check(said, TEMPLATE)


def test_tools_are_for_templates_that_show_them():
    check({"tools": [{}], "tool_choice": "auto"}, TEMPLATE + "{{ tools }}")
    check({"tools": [{}]}, {"default": TEMPLATE})  # several templates: which one is meant is not known


@pytest.mark.parametrize("messages", [None, [], "hello", ["hello"], [{"content": "hello"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [{"text": "hello"}]}], [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}], [{"role": "assistant", "tool_calls": 5}], [{"role": "assistant", "tool_calls": ["f"]}],
                                      [{"role": "assistant", "tool_calls": [{"id": "1"}]}], [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]], ids=str)
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(ValueError, match="messages: "):
        check_messages({"messages": messages})


@pytest.mark.parametrize("prompt", [None, "", [], [""], [[]], [5, "a"], [[5], "a"], [[5], 6], [True], [5, 8], [[5], [-1]], [5.0], {"a": 1}], ids=str)
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match="prompt: "):
        check_prompt({"prompt": prompt}, 8)


@pytest.mark.parametrize("said", [None, "", [], 5, ["hello"], [{"role": "user", "content": 5}]], ids=str)
def test_what_is_no_input_is_refused(said):
    with pytest.raises(ValueError, match="input: "):
        check_input({"input": said})


def test_conversations_and_prompts_pass():
    check_input({"input": "a"}), check_input({"input": [{"role": "user", "content": "a"}]})
    check_messages({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": said}} for said in ("{}", {})]}]})
    check_messages({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]})
    for prompt in ("a", ["a", "b"], [0, 7], [[5], [6, 7]]):
        check_prompt({"prompt": prompt}, 8)


def test_json_needs_xgrammar(monkeypatch):
    monkeypatch.setattr(requests, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install xgrammar"):
        schema_of({"response_format": {"type": "json_object"}})


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said, samples", [({"temperature": 0.5}, True), ({"top_p": 0.5}, True), ({"temperature": 0}, False), ({"temperature": 0, "top_p": 0.5}, False), ({"top_p": 1.0}, False), ({}, False)], ids=str)
def test_a_temperature_samples(said, samples):
    assert configured(GenerationConfig(do_sample=False), said).do_sample is samples
    assert configured(GenerationConfig(do_sample=not said or samples), said).do_sample is (samples or not said)  # of what a request leaves out the model says


def test_one_request_for_every_answer():
    assert singles({"n": 2, "prompt": ["a", "b"], "seed": 5}) == [{"prompt": text, "seed": seed} for text in "ab" for seed in (5, 6)]
    assert singles({"messages": [1], "n": 1}) == [{"messages": [1]}] and singles({"prompt": "a", "n": None}) == [{"prompt": "a"}]


def test_biases_are_numbers():
    assert bias_of({"logit_bias": {"5": -100, 6: 1.5}}) == {(5,): -100.0, (6,): 1.5} and bias_of({"logit_bias": {}}) == {}


def test_penalties_are_those_of_the_api():
    logits, ids = torch.randn(1, 8), torch.tensor([[1, 1, 2, 3, 3, 3]])
    wanted = logits.clone()
    wanted[0, 2] -= 0.5 + 0.25
    wanted[0, 3] -= 0.5 + 3 * 0.25
    torch.testing.assert_close(Penalties(2, 0.5, 0.25)(ids, logits), wanted)  # the first two are the prompt


@pytest.mark.parametrize("said", [{"presence_penalty": 1.5}, {"frequency_penalty": 2.0}, {"frequency_penalty": -0.5, "presence_penalty": 0.5}], ids=str)
def test_penalties_give_plain_generates_text_and_another_than_without(said):
    model, ids = hf_specdec.enable(tiny_model()), torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    processors = LogitsProcessorList(processors_of(said, ids[0], None))
    out = model.generate(ids, speculative=True, num_assistant_tokens=3, logits_processor=processors, **arguments)
    assert torch.equal(out, model.generate(ids, logits_processor=processors, **arguments)) and not torch.equal(out, model.generate(ids, **arguments))


@pytest.mark.skipif(find_spec("xgrammar") is None, reason="needs xgrammar")
@pytest.mark.parametrize("said", [{"response_format": OF_SCHEMA}, {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}], ids=["chat", "responses"])
def test_an_answer_follows_a_schema_and_is_plain_generates(said):
    tokenizer, model = byte_tokenizer(), hf_specdec.enable(tiny_model(0))
    inputs = tokenizer("abcabc", return_tensors="pt")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    grammars = Grammars(model, tokenizer)
    out, plain = (model.generate(**inputs, max_new_tokens=120, do_sample=False, logits_processor=LogitsProcessorList(processors_of(said, inputs["input_ids"][0], grammars)), **each)
                  for each in ({"speculative": True, "num_assistant_tokens": 3}, {}))
    text = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert torch.equal(out, plain) and text.replace(" ", "").replace("\n", "").startswith('{"n":')
    with pytest.raises(ValueError, match="response_format: xgrammar makes no grammar"):
        grammars.of_schema('{"type": "frob"}')


@pytest.mark.parametrize("stops", [["cab"], ["abx", "bcabc"], ["zz"], ["abcabcab"], ["a"], []], ids=str)
def test_streamed_texts_end_before_the_first_stop_string_however_they_are_cut(stops):
    text = "abcabxcabcabcabz"
    for width in (1, 2, 3, 16):
        queue = asyncio.Queue()
        for piece in [text[place : place + width] for place in range(0, len(text), width)] + [None]:
            queue.put_nowait(piece)
        pieces, got = Pieces(queue, stops), []
        while (item := pieces.get_nowait()) is not None:
            got.append(item)
        assert "".join(got) == before(text, stops) == text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]
        assert stops or len(got) == -(-len(text) // width)  # without stop strings nothing is held back


def test_what_is_no_text_passes_behind_what_was_held_back():
    queue = asyncio.Queue()
    for item in ("ab", 5, "c", None):
        queue.put_nowait(item)
    pieces = Pieces(queue, ["abc"], echo="first")
    assert [asyncio.run(pieces.get())] + [pieces.get_nowait() for _ in range(4)] == ["first", "ab", 5, "c", None]
    with pytest.raises(asyncio.QueueEmpty):
        pieces.get_nowait()


# --- the server -------------------------------------------------------------------------------------------------------


def told(port: int, path: str, said: dict) -> str:
    """What a request that is refused is told."""
    with pytest.raises(HTTPError, match="400") as refused:
        asked(port, path, said)
    return json.loads(refused.value.read())["error"]["message"]


def test_a_server_does_what_clients_of_the_api_expect(tmp_path):
    pytest.importorskip("fastapi")
    tokenizer, model, name = byte_tokenizer(), tiny_model(0), str(tmp_path)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(name), tokenizer.save_pretrained(name)
    context, chats, completions = model.config.max_position_embeddings, "/v1/chat/completions", "/v1/completions"
    with serving(name) as (port, process):
        whole = content(asked(port, chats, body(name, "abcabcabc")))
        stop = whole[5:7]
        assert content(asked(port, chats, body(name, "abcabcabc", stop=stop))) == before(whole, [stop]) != whole
        events = asked(port, chats, body(name, "abcabcabc", stop=[stop], stream=True))
        assert streamed(events) == before(whole, [stop]) and events.endswith("data: [DONE]\n\n")
        sampled = body(name, "abcabcabc", temperature=1.0, seed=3, n=3)
        first, again = (json.loads(asked(port, chats, sampled)) for _ in range(2))
        texts = [choice["message"]["content"] for choice in first["choices"]]
        assert texts == [choice["message"]["content"] for choice in again["choices"]] and len(set(texts)) == 3
        assert first["usage"]["total_tokens"] == again["usage"]["total_tokens"]
        assert [choice["index"] for choice in first["choices"]] == [0, 1, 2] and first["usage"]["completion_tokens"] > first["usage"]["prompt_tokens"]
        two = json.loads(asked(port, completions, {"prompt": ["abc", "abcd"], "echo": True, "max_tokens": 4, "temperature": 0.0}))
        assert [choice["text"][:4] for choice in two["choices"]][1] == "abcd" and two["usage"]["completion_tokens"] == 8
        streams_of_several(port, name, texts, sampled), log_probabilities(port, name, model, tokenizer)
        assert "messages: " in told(port, chats, {"messages": []}) and "max_tokens" in told(port, chats, body(name, "abc", max_tokens=0) | {"stream": True})
        assert f"and this model reads {context} with its answer" in told(port, completions, {"prompt": "a" * (context + 1)})
        filled = json.loads(asked(port, completions, {"prompt": "a" * (context - 5), "max_tokens": 500, "temperature": 0.0}))
        assert filled["usage"]["total_tokens"] <= context and filled["choices"][0]["finish_reason"] == "length"
        try:  # no stream, where none is asked for
            assert "object" in json.loads(asked(port, "/v1/responses", {"input": "abc", "max_output_tokens": 3}))
        except HTTPError as error:  # transformers 5.10 beside an openai package that is newer
            assert error.code == 500 and "cache_write_tokens" in json.loads(error.read())["error"]["message"]
        else:
            assert "Traceback" not in end(process)


def events_of(answer: str) -> list[dict]:
    assert answer.endswith("data: [DONE]\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: {")]


def streams_of_several(port: int, name: str, texts: list[str], sampled: dict) -> None:
    """Choices with their own index, text and end, and what all took once, where it is asked for."""
    events = events_of(asked(port, "/v1/chat/completions", sampled | {"stream": True, "stream_options": {"include_usage": True}}))
    choices = [choice for each in events for choice in each["choices"]]
    for place, text in enumerate(texts):
        own = [choice for choice in choices if choice["index"] == place]
        assert "".join(choice["delta"].get("content") or "" for choice in own).rstrip("\ufffd") == text.rstrip("\ufffd")
        assert [bool(choice.get("finish_reason")) for choice in own] == [False] * (len(own) - 1) + [True]
    assert ["usage" in each for each in events] == [False] * (len(events) - 1) + [True] and events[-1]["choices"] == [] and events[-1]["usage"]["total_tokens"] > 3


def log_probabilities(port: int, name: str, model, tokenizer) -> None:
    """Those of a plain forward, of a prompt of token ids, too, and in streams those of answers that are not streamed."""
    ids = tokenizer("abcabc")["input_ids"]
    said = {"model": name, "prompt": [ids, ids[:3]], "max_tokens": 4, "temperature": 0.0, "logprobs": 1}
    answer = json.loads(asked(port, "/v1/completions", said | {"echo": True}))
    found = answer["choices"][0]["logprobs"]
    text = torch.tensor([ids + tokenizer(answer["choices"][0]["text"][6:])["input_ids"]])
    assert len(found["tokens"]) == 10 and found["tokens"][:6] == list("abcabc") and found["text_offset"][:7] == list(range(7)) and answer["usage"]["prompt_tokens"] == 9
    with torch.no_grad():
        law = model(text).logits[0, :5].log_softmax(-1).gather(1, text[0, 1:6, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found["token_logprobs"][1:6]), law, rtol=0, atol=1e-4)
    events = events_of(asked(port, "/v1/completions", said | {"stream": True}))
    for place, whole in enumerate(answer["choices"]):
        pieces = [choice["logprobs"] for each in events for choice in each["choices"] if choice["index"] == place and "logprobs" in choice]
        of_prompt = len(said["prompt"][place])
        assert [each for piece in pieces for each in piece["tokens"]] == whole["logprobs"]["tokens"][of_prompt:]
        assert [each for piece in pieces for each in piece["token_logprobs"]] == pytest.approx(whole["logprobs"]["token_logprobs"][of_prompt:], abs=1e-4)
        assert [at + of_prompt for each in pieces for at in each["text_offset"]] == whole["logprobs"]["text_offset"][of_prompt:]
    chat = body(name, "abcabcabc", logprobs=True, top_logprobs=2)
    whole = json.loads(asked(port, "/v1/chat/completions", chat))["choices"][0]["logprobs"]["content"]
    pieces = [choice["logprobs"]["content"] for each in events_of(asked(port, "/v1/chat/completions", chat | {"stream": True})) for choice in each["choices"] if "logprobs" in choice]
    streamed_ = [each for piece in pieces for each in piece]
    assert [each["token"] for each in streamed_] == [each["token"] for each in whole] and len(whole) == 24 and all(len(each["top_logprobs"]) == 2 for each in whole)
    assert "token id 257" in told(port, "/v1/completions", said | {"prompt": [257]}) and "logprobs" in told(port, "/v1/completions", said | {"logprobs": 50})


def end(process) -> str:
    process.kill()
    return process.communicate()[0]


def test_a_client_that_goes_keeps_nobody_waiting(tmp_path):
    pytest.importorskip("fastapi")
    tokenizer, model, name = byte_tokenizer(), tiny_model(0), str(tmp_path)
    tokenizer.chat_template = TEMPLATE
    model.config.max_position_embeddings = 100_000
    model.save_pretrained(name), tokenizer.save_pretrained(name)
    said = json.dumps({"prompt": "abc", "max_tokens": 50_000, "temperature": 1.0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(said)}\r\n\r\n".encode()
    with serving(name) as (port, process):
        with socket.create_connection(("localhost", port)) as client:
            client.sendall(head + said)
            time.sleep(2)
        asked(port, "/v1/completions", {"prompt": "abc", "max_tokens": 3, "temperature": 0.0})  # in less than a minute
        assert "50000 tokens" not in end(process)
