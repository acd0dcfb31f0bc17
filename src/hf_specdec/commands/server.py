"""transformers' server (`transformers serve`) with one model that is there already, and with requests, answers and errors as clients of the OpenAI API know them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from threading import Event, Thread
from time import time
from typing import Any

import torch
from transformers.cli.serving.utils import GenerateManager

from .. import compat
from ..config import SpeculativeConfig
from ..hints import many
from .gate import Gate, described, heeding
from .logprobs import Entry, Places, Tap, Words, of_chat, of_response, of_text, wanted
from .metrics import Report
from .replies import best, details, in_response, joined
from .requests import OURS, Grammars, best_of, check, check_input, check_messages, check_prompt, configured, predicted_of, processors_of, singles, stops_of
from .streams import Pieces, Raising, Streamed, before, finished, in_turn, with_logprobs
from .tools import THINK, calls_one, forgiving, form_of

ASKED: ContextVar[Asked] = ContextVar("asked")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request for one answer, and whether its client has gone. openai: of an API whose errors in streams `finished` writes; tap: where log-probabilities go, or None;
    told: what `Pieces` tells of them; cancel: what ends a streamed answer; report: what is known of the answer; predicted: tokens that it is likely to have, or None."""

    body: dict[str, Any]
    openai: bool = False
    gone: Event = dataclasses.field(default_factory=Event)
    tap: Tap | None = None
    told: deque = dataclasses.field(default_factory=deque)
    cancel: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    report: Report = dataclasses.field(default_factory=Report)
    predicted: list[int] | None = None

    @classmethod
    def of(cls, body: dict[str, Any], openai: bool, gone: Event, predicted: list[int] | None = None, chosen: bool = False) -> Asked:
        """chosen: whether the answer is one of several of which the likeliest are given."""
        top = wanted(body)
        return cls(body, openai, gone, None if top is None and not chosen else Tap(top or 0, bool(body.get("echo"))), predicted=predicted)

    @property
    def ids(self) -> list[int] | None:
        """A prompt of token ids."""
        return prompt if isinstance(prompt := self.body.get("prompt"), list) else None

    @property
    def text(self) -> dict[str, Any]:
        """As transformers' server, which takes no token ids, is told; `Manager.prepared` puts them into the place of this text's."""
        return self.body if self.ids is None else self.body | {"prompt": "a"}

    def leave(self) -> None:
        for cancel in self.cancel:
            cancel()


class Gone(Exception):
    """The client has closed the connection: nobody waits for the answer."""


class Around:
    """What is laid around transformers' `Serve` of the model `name`. speculation: the options that a request's seed is put into; door: a `Door`."""

    def __init__(self, name: str, answering, processor, speculation: SpeculativeConfig, door: Any):
        self.name, model = name, answering.model
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.template, self.speculation, self.words = processor.chat_template, speculation, Words(self.tokenizer)
        self.form = form_of(processor, model)
        self.tokenizer.parse_response = forgiving(self.tokenizer)
        traits = compat.traits_of(compat.unwrap(model), "model")
        self.size, grammars = traits.vocab_size, Grammars(model, self.tokenizer, self.form, THINK in str(self.template))
        self.manager = Manager(traits.max_positions, grammars, self.tokenizer, self.words, door.batch)
        self.answering, self.door, self.began = answering, door, int(time())

    def lay(self, serve: Any) -> None:
        from fastapi.exceptions import RequestValidationError
        from fastapi.middleware.cors import CORSMiddleware
        from starlette.exceptions import HTTPException

        chats, completions, responses = serve._chat_handler, serve._completion_handler, serve._response_handler
        for handler, check_own in ((chats, check_messages), (completions, partial(check_prompt, size=self.size)), (responses, check_input)):
            handler.handle_request = partial(self.answer, handler.handle_request, check_own, handler is not responses)
            handler._build_generation_config = partial(self.config_of, handler._build_generation_config)
        build = chats._build_completion  # of a text that may have been parsed anew
        chats._build_completion = lambda request, text, *args, **kwargs: build(request, before(text or "", stops_of(ASKED.get().body)), *args, **kwargs)
        serve._generation_state.get_manager = lambda model_id, use_cb=False: self.manager
        app = serve.server.config.app
        for path, answer in (("/v1/models", self.models), ("/v1/models/{name:path}", self.model)):  # before transformers' own
            app.add_api_route(path, answer, response_model=None)
            app.router.routes.insert(0, app.router.routes.pop())
        app.add_exception_handler(HTTPException, lambda request, error: refused(error.status_code, error.detail))
        app.add_exception_handler(RequestValidationError, lambda request, error: refused(400, no_json(error.errors()[0])))
        app.add_exception_handler(Exception, lambda request, error: refused(500, f"{type(error).__name__}: {error}"))
        gate = Gate(app, self.answering.metrics, self.door.key, self.door.batch, self.door.queue)
        running = self.answering.joint.seats
        self.answering.metrics.state = lambda: {"requests_running": len(running), "requests_waiting": max(gate.flying - len(running), 0)}
        serve.server.config.app = CORSMiddleware(gate, self.door.cors, allow_methods=["*"], allow_headers=["*"]) if self.door.cors else gate
        closing(serve.server, gate)

    def models(self) -> dict[str, Any]:
        """The list of the one model, as the API has it, with names of transformers', vLLM's and our own."""
        draft = self.answering.drafts[0].name if self.answering.drafts else self.speculation.draft
        owner = self.name.split("/")[0] if self.name.count("/") == 1 else ""
        return {"object": "list", "data": [{
            "id": self.name, "object": "model", "created": self.began, "owned_by": owner, "status": {"value": "loaded"}, "max_model_len": self.manager.context,
            "speculation": {"draft": draft, "num_assistant_tokens": self.speculation.num_assistant_tokens}}]}

    def model(self, name: str) -> Any:
        found = self.models()["data"][0]
        return found if name.strip("/") == self.name.strip("/") else refused(404, f"there is no model {name!r} here, {self.name} alone.")

    def config_of(self, build: Callable[..., Any], body: dict[str, Any], *args, **kwargs) -> Any:
        config = configured(build({name: value for name, value in body.items() if name not in OURS}, *args, **kwargs), body)
        changed = {} if body.get("seed") is None else {"seed": body["seed"] % 2**63}  # with which K "auto" leaves the clock aside
        changed |= {} if ASKED.get().predicted is None else {"draft": SpeculativeConfig.draft, "draft_options": {}, "draft_source": None}
        if changed:
            config.speculative = dataclasses.replace(self.speculation, **changed)
        return config

    async def answer(self, handle: Callable[..., Any], check_own: Callable[[dict], Any], openai: bool, body: dict[str, Any], request_id: str) -> Any:
        """The answer of a handler to a request that can be answered, or to several that one asks for."""
        from fastapi import HTTPException
        from fastapi.responses import StreamingResponse
        from pydantic import ValidationError

        async def single(asked: Asked) -> Any:
            ASKED.set(asked)
            return await handle(asked.text, request_id)

        askeds, gone = [], Event()
        try:
            check_own(body), check(body, self.template, self.form, self.size)
            said, many_of = predicted_of(body), best_of(body)
            predicted = None if said is None else self.tokenizer.encode(said, add_special_tokens=False)
            askeds += [Asked.of(each, openai, gone, predicted, many_of > (body.get("n") or 1)) for each in singles(body)]
            replies = await heeding(asyncio.gather(*map(single, askeds)), gone)
        except BaseException as error:
            gone.set()
            for asked in askeds:  # streams that have begun
                asked.leave()
            if isinstance(error, ValueError) and not isinstance(error, ValidationError):  # which is of the answer: none of the client's
                raise HTTPException(400, str(error)) from error
            if isinstance(error, Gone):
                raise HTTPException(499, "the client has gone.") from None
            raise
        if isinstance(replies[0], StreamingResponse):
            replies[0].body_iterator = self.streamed(replies, askeds, body, openai)
            return replies[0]
        return self.whole(replies, askeds, body)

    def whole(self, replies: list[Any], askeds: list[Asked], body: dict[str, Any]) -> Any:
        """One answer of transformers' server, or several in one, with what it leaves out."""
        from fastapi.responses import JSONResponse

        answers, n = [json.loads(reply.body) for reply in replies], body.get("n") or 1
        for answer, asked in zip(answers, askeds):
            for kind, said in details([asked], "input" in body).items():
                answer["usage"][kind] = (answer["usage"].get(kind) or {}) | said
            if "input" in body:
                in_response(answer, [] if asked.tap is None else of_response(asked.tap.answer, self.words))
                continue
            if asked.tap is not None and wanted(body) is not None:
                answer["choices"][0]["logprobs"] = self.logprobs(asked)([*asked.tap.prompt, *asked.tap.answer])
            if calls_one(body):
                answer["choices"][0]["message"] |= {"tool_calls": calls[:1]} if (calls := answer["choices"][0]["message"].get("tool_calls")) else {}
        if "input" in body:
            return JSONResponse(answers[0])
        kept = best([asked.tap and asked.tap.answer for asked in askeds], n, best_of(body))
        return JSONResponse(joined(answers, kept, best_of(body), details(askeds)))

    def streamed(self, replies: list[Any], askeds: list[Asked], body: dict[str, Any], openai: bool) -> Any:
        """The events of one answer as transformers' server makes them, or those of several, with what it leaves out."""
        stream, usage = replies[0].body_iterator, bool((body.get("stream_options") or {}).get("include_usage"))
        if not openai:
            return stream if askeds[0].tap is None else with_logprobs(stream, askeds[0].told, partial(of_response, words=self.words))
        if len(replies) > 1 or usage or askeds[0].tap is not None or calls_one(body):
            answers = [Streamed(reply.body_iterator, asked.told, asked.tap and self.logprobs(asked), asked.leave, calls_one(body))
                       for reply, asked in zip(replies, askeds)]
            stream = in_turn(answers, body.get("n") or 1, usage, lambda: details(askeds))
        return finished(stream, partial(described, 400))

    def logprobs(self, asked: Asked) -> Callable[[list[Entry]], dict[str, Any]]:
        """What tells those of an answer's next tokens as the API does that was asked."""
        return partial(of_text, places=Places(self.words)) if "prompt" in asked.body else partial(of_chat, words=self.words)


class Manager(GenerateManager):
    """Runs as many requests at a time as there are `lanes`. context: the longest text of the model, or None."""

    def __init__(self, context: int | None, grammars: Grammars, tokenizer: Any, words: Words, lanes: int = 1):
        super().__init__()
        for _ in range(lanes - 1):  # more threads that take from the same queue
            Thread(target=self._thread._run, daemon=True).start()
        self.context, self.grammars, self.tokenizer, self.words = context, grammars, tokenizer, words

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, **parsing):
        asked = ASKED.get()
        queue, streamer = super().generate_streaming(model, processor, self.prepared(inputs, gen_config), gen_config, request_id, **parsing)
        asked.cancel.append(streamer.cancel)
        return (Raising if asked.openai else Pieces)(queue, stops_of(asked.body), self.echo(asked), asked.told), streamer

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        asked = ASKED.get()
        watched = {"streamer": Watching(asked.gone)} if (gen_config.num_beams or 1) == 1 else {}  # with beams there is no streamer
        text, *rest = await super().generate_non_streaming(model, processor, self.prepared(inputs, gen_config) | watched, gen_config, request_id)
        kept = before(text, stops_of(asked.body))
        if asked.tap is not None and len(kept) < len(text):
            places = Places(self.words)(asked.tap.answer)
            asked.tap.answer = [entry for entry, place in zip(asked.tap.answer, places) if place < len(kept)]
        return self.echo(asked) + kept, *rest

    def echo(self, asked: Asked) -> str:
        """What an answer begins with: its prompt, where that is asked for."""
        if not asked.body.get("echo"):
            return ""
        return asked.body["prompt"] if asked.ids is None else self.tokenizer.decode(asked.ids, skip_special_tokens=True)

    def prepared(self, inputs: Any, config: Any) -> dict[str, Any]:
        """The arguments of `generate()`, and `Answering`'s; ValueError for a prompt that leaves no room for an answer, for which there is no more than the context has."""
        asked = ASKED.get()
        if asked.ids is not None:  # in their place, where the lengths of prompts are read
            ids = inputs["input_ids"].new_tensor([asked.ids])
            for name in list(inputs):
                inputs[name] = ids if name == "input_ids" else torch.full_like(ids, name == "attention_mask")
        prompt = inputs["input_ids"].shape[-1]
        if self.context:
            if (room := self.context - prompt) < 1:
                raise ValueError(f"the prompt has {many(prompt, 'token')}, and this model reads {self.context} with its answer. Shorten the prompt.")
            config.max_new_tokens = min(config.max_new_tokens or room, room)
        processors = processors_of(asked.body, inputs["input_ids"][0], self.grammars)
        given = {"logits_processor": processors or None, "tap": asked.tap, "predicted": asked.predicted, "report": asked.report}
        return {**inputs} | {name: value for name, value in given.items() if value is not None}


class Watching:
    """A streamer that ends a call whose client has gone."""

    def __init__(self, gone: Event):
        self.gone = gone

    def put(self, tokens: Any) -> None:
        if self.gone.is_set():
            raise Gone

    def end(self) -> None:
        pass


def closing(server: Any, gate: Gate) -> None:
    """At a SIGTERM the answers that have been begun end first, while new requests are told to come again; a second one, or Ctrl-C, ends the server at once."""
    ended = server.handle_exit

    def told(sig: int, frame: Any) -> None:
        if sig == signal.SIGTERM and gate.flying and not gate.closing:
            gate.closing, gate.empty = True, partial(ended, sig, None)
        else:
            ended(sig, frame)

    server.handle_exit = told


def no_json(found: dict[str, Any]) -> str:
    return f"the body of the request is no JSON object: {found.get('ctx', {}).get('error', found['msg'])}"


def refused(status: int, message: Any) -> Any:
    from fastapi.responses import JSONResponse

    return JSONResponse(described(status, message), status)
