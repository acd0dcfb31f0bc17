"""Who is let in to `hf-specdec serve`, what it counts, and how it closes."""

import asyncio
import json
import re
import signal
import threading
import time
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from hf_specdec.commands.gate import Gate
from hf_specdec.commands.metrics import Metrics, Report
from hf_specdec.commands.replies import best, details, of_prediction
from hf_specdec.commands.logprobs import Entry
from hf_specdec.commands.requests import best_of, predicted_of, singles
from hf_specdec.commands.server import closing

from ..bench.conftest import byte_tokenizer, tiny_model
from .test_serve import TEMPLATE, asked, body, content, refused, serving, streamed, target_folder  # noqa: F401

CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


# --- who is let in ----------------------------------------------------------------------------------------------------


async def passed(gate: Gate, path: str, key: str | None = None, method: str = "POST"):
    """(status, headers, body) of a request."""
    sent = []

    async def send(message):
        sent.append(message)

    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    await gate({"type": "http", "path": path, "method": method, "headers": headers}, None, send)
    return sent[0]["status"], dict(sent[0].get("headers", ())), b"".join(each.get("body", b"") for each in sent)


def gate(hold: asyncio.Event | None = None, **more) -> Gate:
    async def app(scope, receive, send):
        if hold is not None:
            await hold.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    return Gate(app, Metrics(), **{"key": None, "lanes": 1, "queue": 1} | more)


@pytest.mark.parametrize("key, path, method, status", [
    ("secret", CHATS, "POST", 200), (None, CHATS, "POST", 401), ("secre", CHATS, "POST", 401), ("secret2", "/v1/models", "GET", 401), ("", "/load_model", "POST", 401), ("sécret", CHATS, "POST", 401),
    (None, "/health", "GET", 200), (None, "/metrics", "GET", 200), (None, CHATS, "OPTIONS", 200)])
def test_without_its_key_a_server_says_no_more_than_how_it_is(key, path, method, status):
    got, headers, raw = asyncio.run(passed(gate(key="secret"), path, key, method))
    assert got == status
    if status == 401:
        assert headers[b"www-authenticate"] == b"Bearer" and json.loads(raw)["error"]["code"] == "invalid_api_key"


def test_more_requests_than_may_wait_are_told_when_to_come_again():
    async def several():
        hold = asyncio.Event()
        one = gate(hold)
        waiting = [asyncio.ensure_future(passed(one, CHATS)) for _ in range(2)]
        await asyncio.sleep(0)
        status, headers, raw = await passed(one, COMPLETIONS)
        assert status == 429 and int(headers[b"retry-after"]) >= 1 and json.loads(raw)["error"]["type"] == "rate_limit_error"
        hold.set()
        assert [each[0] for each in await asyncio.gather(*waiting)] == [200, 200] and (await passed(one, COMPLETIONS))[0] == 200
        assert f'hf_specdec_requests_total{{path="{COMPLETIONS}",status="429"}} 1' in one.metrics.text()

    asyncio.run(several())


def test_a_server_that_closes_ends_what_it_has_begun_and_begins_nothing():
    async def several():
        hold, ended = asyncio.Event(), []
        one, server = gate(hold), SimpleNamespace(handle_exit=lambda sig, frame: ended.append(sig))
        closing(server, one)
        running = asyncio.ensure_future(passed(one, CHATS))
        await asyncio.sleep(0)
        server.handle_exit(signal.SIGTERM, None)
        assert not ended and one.closing
        status, headers, _ = await passed(one, CHATS)
        assert status == 503 and b"retry-after" in headers and (await passed(one, "/health", method="GET"))[0] == 503 and not ended
        hold.set()
        assert (await running)[0] == 200 and ended == [signal.SIGTERM]
        server.handle_exit(signal.SIGTERM, None)  # and at once, where nothing runs, or at the second time
        assert len(ended) == 2

    asyncio.run(several())


@pytest.mark.parametrize("option, value, message", [("--max-batch", "0", "--max-batch"), ("--max-queue", "-1", "--max-queue"), ("--api-key", "", "--api-key: expected printable"),
                                                    ("--api-key", "schlüssel", "--api-key"), ("--cors", "example.org", "--cors example.org: an origin is http")])
def test_options_that_mean_nothing_are_refused(target_folder, option, value, message, monkeypatch):  # noqa: F811
    monkeypatch.setattr("hf_specdec.commands.serve.NEEDED", ())
    assert message in refused(target_folder, option, value)


# --- what is counted --------------------------------------------------------------------------------------------------


def test_metrics_are_in_the_form_that_prometheus_reads():
    metrics = Metrics()
    metrics.state = lambda: {"requests_running": 2, "requests_waiting": 1}
    metrics.requested(CHATS, 200), metrics.requested(CHATS, 400)
    report = Report(came=0.0, begun=0.02, first=0.3, done=2.0, prompt=10, known=4, tokens=[1] * 6)
    metrics.answered(report, SimpleNamespace(proposed=8, accepted=4, target_calls=2))
    text = metrics.text()
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) hf_specdec_\w+ .+|hf_specdec_\w+(\{\w+=\"[^\"]*\"(,\w+=\"[^\"]*\")*\})? [0-9.e+-]+", line), line
    said = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert said['hf_specdec_requests_total{path="/v1/chat/completions",status="400"}'] == "1" and said["hf_specdec_cached_prompt_tokens_total"] == "4"
    assert said["hf_specdec_acceptance_rate"] == "0.5" and said["hf_specdec_block_efficiency"] == "3.0" and said["hf_specdec_requests_running"] == "2"
    buckets = [(float(name.split('"')[1]), int(value)) for name, value in said.items() if name.startswith("hf_specdec_first_token_seconds_bucket")]
    assert [count for _, count in buckets] == sorted(count for _, count in buckets) and dict(buckets)[0.25] == 0 and dict(buckets)[0.5] == dict(buckets)[float("inf")] == 1
    assert said["hf_specdec_request_seconds_sum"] == "2.0" and said["hf_specdec_request_seconds_count"] == "1"


def test_predicted_tokens_are_in_the_answer_or_not():
    assert of_prediction([1, 2, 3, 4, 5], [1, 2, 9, 4, 5, 6]) == 4 and of_prediction([1, 2], []) == 0 and of_prediction([], [1]) == 0
    report = Report(known=3, tokens=[1, 2, 9])
    found = details([SimpleNamespace(report=report, predicted=[1, 2, 3])])
    assert found == {"prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1}}
    assert details([SimpleNamespace(report=report, predicted=None)], response=True) == {"input_tokens_details": {"cached_tokens": 3}}


def test_the_likeliest_answers_are_given():
    likely = [[Entry(1, value, [], False)] * size for value, size in ((-2.0, 1), (-0.5, 9), (-1.0, 2), (-3.0, 1))]
    assert best(likely, 2, 4) == [1, 2] and best(likely, 1, 2) == [1, 2] and best(likely, 2, 2) == [0, 1, 2, 3]  # per token, not per text
    assert best_of({"best_of": 3}) == 3 and best_of({"n": 2}) == 2 and len(singles({"prompt": ["a", "b"], "n": 1, "best_of": 3})) == 6
    assert predicted_of({"messages": [], "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}}) == "ab"


# --- the server -------------------------------------------------------------------------------------------------------


def test_a_server_writes_several_answers_at_a_time_until_it_is_told_to_close(tmp_path):
    pytest.importorskip("fastapi")
    tokenizer, model, name = byte_tokenizer(), tiny_model(0), str(tmp_path)
    tokenizer.chat_template = TEMPLATE
    model.generation_config.eos_token_id = None
    model.save_pretrained(name), tokenizer.save_pretrained(name)
    with serving(name, "--max-batch", "3", "--cors", "https://example.org") as (port, process):
        alone = [content(asked(port, CHATS, body(name, text, max_tokens=180))) for text in ("abcabc", "xyzxyz")]
        ended, found = [], {}

        def ask(key: str, said: dict) -> None:
            found[key] = asked(port, CHATS, said)
            ended.append(key)

        threads = [threading.Thread(target=ask, args=(key, body(name, text, max_tokens=size))) for key, text, size in
                   (("long", "abcabc", 180), ("other", "xyzxyz", 180), ("short", "abcabc", 2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ended) == 3 and [content(found["long"]), content(found["other"])] == alone
        predicted(port, name, alone[0]), chosen(port, name), of_responses(port, name)
        with urlopen(Request(f"http://localhost:{port}/v1/models", headers={"Origin": "https://example.org"})) as reply:
            listed = json.loads(reply.read())["data"]
            assert reply.headers["access-control-allow-origin"] == "https://example.org" and listed[0]["max_model_len"] == model.config.max_position_embeddings
        assert json.loads(asked(port, f"/v1/models/{name}")) == listed[0] and listed[0]["speculation"]["num_assistant_tokens"] == 3
        with pytest.raises(HTTPError, match="404"):
            asked(port, "/v1/models/another")
        said = asked(port, "/metrics")
        assert f'hf_specdec_requests_total{{path="{CHATS}",status="200"}}' in said and "hf_specdec_requests_running 0" in said
        thread = threading.Thread(target=ask, args=("last", body(name, "abcabc", max_tokens=180, stream=True)))
        thread.start()
        while "hf_specdec_requests_running 1" not in asked(port, "/metrics") and thread.is_alive():
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        thread.join(30)
        assert streamed(found["last"]).rstrip("\ufffd") == alone[0].rstrip("\ufffd") and process.wait(30) is not None


def predicted(port: int, name: str, whole: str) -> None:
    """A predicted text, right or wrong, changes no answer, and the right one saves passes."""
    told = []
    for text in (whole, "q" * 60):
        answer = json.loads(asked(port, CHATS, body(name, "abcabc", max_tokens=180, prediction={"type": "content", "content": text})))
        assert answer["choices"][0]["message"]["content"] == whole
        told.append(answer["usage"]["completion_tokens_details"])
    assert told[0]["accepted_prediction_tokens"] > 20 and told[1] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 60}
    events = asked(port, CHATS, body(name, "abcabc", stream=True, stream_options={"include_usage": True}, prediction={"type": "content", "content": whole}))
    assert json.loads(events.splitlines()[-4].removeprefix("data: "))["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 5


def chosen(port: int, name: str) -> None:
    """Of three sampled answers the one whose tokens are likeliest."""
    said = {"model": name, "prompt": "abcabc", "max_tokens": 6, "temperature": 2.0, "seed": 4, "logprobs": 0}
    three = json.loads(asked(port, COMPLETIONS, said | {"n": 3}))
    one = json.loads(asked(port, COMPLETIONS, said | {"best_of": 3}))
    likeliest = max(three["choices"], key=lambda choice: sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["tokens"]))
    assert [choice["text"] for choice in one["choices"]] == [likeliest["text"]] and one["usage"]["completion_tokens"] == three["usage"]["completion_tokens"]


def of_responses(port: int, name: str) -> None:
    """Log-probabilities of a response: those of the chat, streamed, too."""
    said = {"model": name, "input": "abcabc", "max_output_tokens": 8, "temperature": 0.0, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    try:
        part = json.loads(asked(port, RESPONSES, said))["output"][0]["content"][0]
    except HTTPError:  # transformers 5.10 beside an openai package that is newer
        return
    chat = json.loads(asked(port, CHATS, body(name, "abcabc", max_tokens=8, logprobs=True, top_logprobs=2)))["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in part["logprobs"]] == [each["token"] for each in chat] and len(part["logprobs"][0]["top_logprobs"]) == 2
    assert [each["logprob"] for each in part["logprobs"]] == pytest.approx([each["logprob"] for each in chat], abs=1e-4)
    events = [json.loads(line.removeprefix("data: ")) for line in asked(port, RESPONSES, said | {"stream": True}).splitlines() if line.startswith("data: {")]
    done = next(each for each in events if each["type"] == "response.output_text.done")
    pieces = [one for each in events if each["type"] == "response.output_text.delta" for one in each["logprobs"]]
    assert [each["token"] for each in done["logprobs"]] == [each["token"] for each in part["logprobs"]] and done["logprobs"][: len(pieces)] == pieces
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == done["logprobs"]
