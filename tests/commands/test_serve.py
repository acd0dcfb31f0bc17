"""`hf-specdec serve`: transformers' own server with an enabled model, and conversations that are not read twice."""

import json
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner

import hf_specdec
from hf_specdec.cli import app
from hf_specdec.commands import serve
from hf_specdec.commands.serve import Answering

from ..architectures import FAMILIES, reference
from ..bench import conftest as saved
from ..bench.conftest import byte_tokenizer, tiny_model
from ..helpers import perturbed

target_folder = saved.target_folder
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def answering(model, keep: int = 2, said: list | None = None, **speculation) -> Answering:
    lines = [] if said is None else said
    return Answering(hf_specdec.enable(model, speculative={"num_assistant_tokens": 3, **speculation}), keep, lines.append)


def ids_of(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens])


def call(answer, ids: torch.Tensor, new: int = 8) -> torch.Tensor:
    return answer(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None)


def plain(model, ids: torch.Tensor, new: int = 8) -> torch.Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, speculative=False)


def tokens_read(model) -> list[int]:
    """The width of every pass, as they come."""
    widths = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: widths.append(args[0].shape[1]))
    return widths


# --- conversations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_every_turn_is_plain_generates_and_reads_what_is_new_alone(turns):
    model, said = tiny_model(), []
    answer = answering(model, said=said)
    text = ids_of(*range(20, 60), 5, 6, 7, 5, 6, 7)
    for turn in range(turns):
        wanted = plain(model, text)
        widths = tokens_read(model)
        assert torch.equal(out := call(answer, text), wanted)
        new = text.shape[1] if turn == 0 else 1 + 4  # the last token of the text before, and what was added to it
        assert new <= widths[0] <= new + 3  # and what was drafted
        text = torch.cat([out, ids_of(11, 12 + turn, 13, 14)], 1)
    assert [("known" in line) for line in said] == [False] + [True] * (turns - 1)
    assert all("block efficiency" in line for line in said)


def test_a_text_that_leaves_the_one_before_keeps_what_they_share():
    model, said = tiny_model(), []
    answer = answering(model, said=said)
    call(answer, ids_of(*range(20, 60)))
    other = ids_of(*range(20, 55), 9, 9, 9)
    assert torch.equal(call(answer, other), plain(model, other))
    assert "(35 of them known)" in said[1] and len(answer.kept) == 1


def test_the_same_text_again_reads_its_last_token_alone():
    model = tiny_model()
    answer, text = answering(model), ids_of(*range(20, 60))
    wanted, widths = call(answer, text), tokens_read(model)
    assert torch.equal(call(answer, text), wanted) and widths[0] <= 1 + 3


def test_two_conversations_in_turns_keep_their_own_texts():
    model, said = tiny_model(), []
    answer = answering(model, said=said)
    texts = [ids_of(*range(20, 50)), ids_of(*range(120, 160))]
    for turn in range(3):
        for which, text in enumerate(texts):
            out = call(answer, text)
            assert torch.equal(out, plain(model, text))
            texts[which] = torch.cat([out, ids_of(1, 2, 3)], 1)
    assert ["known" in line for line in said] == [False, False, True, True, True, True] and len(answer.kept) == 2


def test_a_short_beginning_in_common_costs_no_conversation():
    model, said = tiny_model(), []
    answer = answering(model, said=said)
    first = call(answer, ids_of(*range(20, 60)))
    call(answer, ids_of(20, 21, 22, 9, 9, 9))
    call(answer, torch.cat([first, ids_of(1)], 1))
    assert ["known" in line for line in said] == [False, False, True]


@pytest.mark.parametrize("keep", [0, 1])
def test_no_more_conversations_are_kept_than_asked(keep):
    model, said = tiny_model(), []
    answer = answering(model, keep, said)
    first = call(answer, ids_of(*range(20, 60)))
    call(answer, ids_of(*range(120, 160)))
    assert torch.equal(call(answer, first), plain(model, first))
    assert len(answer.kept) == keep and not any("known" in line for line in said)


@pytest.mark.parametrize("family", ["Mistral", "Gemma 2", "Qwen3-Next"])  # windows, windows in every other layer, states
def test_layers_that_cannot_be_cut_serve_texts_that_go_on(family):
    if all(each.name != family for each in FAMILIES):
        pytest.skip(f"this transformers has no {family}")
    model, said = reference(family, "eager")[0], []
    answer = answering(model, said=said)
    text = ids_of(*range(20, 40))
    out = call(answer, text)
    longer, other = torch.cat([out, ids_of(3, 4)], 1), torch.cat([out[:, :-5], ids_of(3, 4)], 1)
    assert torch.equal(call(answer, longer), plain(model, longer)) and "known" in said[-1]
    assert torch.equal(call(answer, other), plain(model, other)) and "known" not in said[-1]
    hf_specdec.disable(model)


@pytest.mark.parametrize("speculative", [True, False])
def test_a_call_that_breaks_off_leaves_what_was_known_of_its_conversation(speculative):
    model, said = tiny_model(), []
    answer, text = answering(model, said=said), ids_of(*range(20, 60))

    class Gone:
        def put(self, tokens):
            if tokens.dim() < 2:
                raise RuntimeError("the client has gone")

        def end(self):
            pass

    call(answer, text)
    with pytest.raises(RuntimeError, match="the client has gone"):
        answer(input_ids=text, max_new_tokens=8, do_sample=False, streamer=Gone(), **({} if speculative else {"speculative": False}))
    assert len(answer.kept) == 1
    longer = torch.cat([text, ids_of(7, 8, 9)], dim=1)
    assert torch.equal(call(answer, longer), plain(model, longer)) and "(39 of them known)" in said[-1]


def test_a_call_that_is_refused_is_answered_without_speculation():
    said = []
    answer = answering(tiny_model(), said=said)
    with pytest.warns(UserWarning, match="without speculation"):
        answer(input_ids=ids_of(1, 2, 3), max_new_tokens=4, do_sample=False, num_beams=2, guidance_scale=2.0)
    assert said == ["4 tokens to a prompt of 3, without speculation"]


@pytest.mark.parametrize("family", ["Mamba", "Mamba 2", "Falcon-Mamba"])
def test_states_alone_which_do_not_say_what_they_have_read_are_not_kept(family):
    if all(each.name != family for each in FAMILIES):
        pytest.skip(f"this transformers has no {family}")
    model, said = reference(family, "eager")[0], []
    answer = answering(model, said=said)
    first = call(answer, ids_of(*range(20, 40)))
    for text in (torch.cat([first, ids_of(3, 4)], 1), ids_of(20, *range(3, 14)), ids_of(*range(20, 40))):
        assert torch.equal(call(answer, text), plain(model, text))
    assert not any("known" in line or "without speculation" in line for line in said) and not answer.kept
    hf_specdec.disable(model)


@pytest.mark.parametrize("of_the_model", [False, True], ids=["asked", "the model's own"])
@pytest.mark.parametrize("asked", [{"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}, {"use_cache": False}, {"cache_implementation": "static"},
                                   {"prompt_lookup_num_tokens": 4}], ids=str)
def test_requests_of_another_kind_neither_take_nor_leave_a_cache(asked, of_the_model):
    model, said, text = tiny_model(), [], ids_of(*range(20, 60))
    answer = answering(model, said=said)
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=256, pad_token_id=256, **({} if of_the_model else asked))
    first, own = call(answer, text), model.generation_config
    model.generation_config = GenerationConfig(**asked) if of_the_model else own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for text in (torch.cat([first, ids_of(3, 4, 5, 3, 4)], 1), first):
            assert torch.equal(answer(input_ids=text, generation_config=config), model.generate(text, generation_config=config, speculative=False))
    model.generation_config = own
    longer = torch.cat([first, ids_of(3)], 1)
    assert torch.equal(call(answer, longer), plain(model, longer))
    assert ["known" in line for line in said] == [False, False, False, True]


def test_a_config_is_left_as_it_was_and_nothing_of_it_is_passed_beside_it():
    answer, passed = answering(tiny_model()), []
    generate = answer.generate
    answer.generate = lambda **kwargs: passed.append(kwargs) or generate(**kwargs)
    config = GenerationConfig(max_new_tokens=4, do_sample=False)
    before = config.to_dict()
    answer(input_ids=ids_of(1, 2, 3), generation_config=config)
    assert set(passed[0]) == {"input_ids", "generation_config"} and config.to_dict() == before


def test_a_draft_of_its_own_is_kept_between_calls():
    model = tiny_model()
    draft = perturbed(tiny_model(0))
    answer = Answering(hf_specdec.enable(model, speculative={"num_assistant_tokens": 3}, assistant_model=draft), 2, lambda line: None)
    text = ids_of(*range(20, 60))
    for _ in range(3):
        out = call(answer, text)
        assert torch.equal(out, plain(model, text))
        text = torch.cat([out, ids_of(7, 8)], 1)


def test_lines_that_nobody_reads_cost_nothing(monkeypatch):
    def closed(*args, **kwargs):
        raise BrokenPipeError

    monkeypatch.setattr(serve.typer, "echo", closed)
    serve.say("an answer")


# --- the server -------------------------------------------------------------------------------------------------------


def asked(port: int, path: str, body: dict | None = None) -> str:
    request = Request(f"http://localhost:{port}{path}", json.dumps(body).encode() if body else None, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as reply:
        return reply.read().decode()


@contextmanager
def serving(folder: str, *more: str):
    """(port, process) of a server that answers."""
    with socket.create_server(("localhost", 0)) as own:
        port = own.getsockname()[1]
    command = [sys.executable, "-m", "hf_specdec", "serve", folder, "--port", str(port), "--k", "3", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for _ in range(600):
            try:
                asked(port, "/health")
                break
            except OSError:
                assert process.poll() is None, process.stdout.read()
                time.sleep(0.1)
        yield port, process
    finally:
        process.kill()


def body(model: str, *contents: str, **more) -> dict:
    messages = [{"role": "user" if place % 2 == 0 else "assistant", "content": text} for place, text in enumerate(contents)]
    return {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0.0, **more}


def content(answer: str) -> str:
    return json.loads(answer)["choices"][0]["message"]["content"]


def streamed(events: str) -> str:
    pieces = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"])


def test_a_server_answers_as_plain_generate_does_until_ctrl_c(tmp_path):
    pytest.importorskip("fastapi")
    tokenizer, model, name = byte_tokenizer(), tiny_model(0), str(tmp_path)
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(name), tokenizer.save_pretrained(name)

    def wanted(*contents: str) -> str:
        inputs = tokenizer.apply_chat_template(body(name, *contents)["messages"], add_generation_prompt=True, return_dict=True, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    with serving(name) as (port, process):
        assert content(asked(port, "/v1/chat/completions", body(name, "abcabcabc"))) == wanted("abcabcabc")
        turns = ("abcabcabc", "abc", "and then?")
        assert streamed(asked(port, "/v1/chat/completions", body(name, *turns, stream=True))).rstrip("\ufffd") == wanted(*turns).rstrip("\ufffd")
        assert content(asked(port, "/v1/chat/completions", body(name, *turns))) == wanted(*turns)
        completed = asked(port, "/v1/completions", {"model": name, "prompt": "abcabcabc", "max_tokens": 8, "temperature": 0.0})
        assert json.loads(completed)["usage"]["completion_tokens"] == 8
        with pytest.raises(HTTPError, match="400"):
            asked(port, "/v1/chat/completions", body("other/model", "abc"))
        assert "this server has" in asked(port, "/load_model", {"model": "other/model"})
        asked(port, "/reset", {"all": True})
        assert content(asked(port, "/v1/chat/completions", body(name, "xyzxyz"))) == wanted("xyzxyz")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and said.count("Traceback") == 1, said  # of what /load_model was refused
    assert f"serving {name} at http://localhost:{port}/v1" in said and said.count("block efficiency") == 5 and "of them known" in said


# --- bad input --------------------------------------------------------------------------------------------------------


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2 and "Loading" not in result.stderr, result.output
    return " ".join(result.stderr.split())


@pytest.fixture
def installed(monkeypatch):
    """The server's packages, as far as refusals go: the tests' own environment may lack them."""
    monkeypatch.setattr(serve, "NEEDED", ())


def test_a_port_in_use_is_refused_before_anything_is_loaded(target_folder, installed):
    with socket.create_server(("localhost", 0)) as own:
        port = str(own.getsockname()[1])
        assert f"--port {port}: no server can listen there on localhost" in refused(target_folder, "--port", port)


def test_a_host_that_is_not_this_machine_is_refused(target_folder, installed):
    assert "name another one, or another --host" in refused(target_folder, "--host", "192.0.2.1")


def test_a_host_may_be_of_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as own:
            port = own.getsockname()[1]
            with pytest.raises(OSError, match="no server can listen there on ::1"):
                serve.check_port("::1", port)
    except OSError:
        pytest.skip("this machine has no IPv6")
    serve.check_port("::1", port)


def test_what_is_not_installed_is_named(target_folder, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name in ("fastapi", "openai") else name)
    assert "serve needs fastapi and openai, which are not installed: pip install 'hf-specdec[serve]'" in refused(target_folder)


def test_compiled_passes_are_a_cpus_alone(target_folder, monkeypatch, installed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "--compile: on a CPU alone" in refused(target_folder, "--compile")


@pytest.mark.parametrize("option, value, message", [("--k", "0", "--k"), ("--mx", "mxfp5", "--mx"), ("--k", "many", "must be an int in 1..64 or auto")])
def test_options_that_mean_nothing_are_refused_first(target_folder, option, value, message):
    assert message in refused(target_folder, option, value)
