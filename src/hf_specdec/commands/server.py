"""transformers' server (`transformers serve`) with one model that is there already, and with requests, answers and errors as clients of the OpenAI API know them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from threading import Event
from typing import Any

import torch
from transformers.cli.serving.utils import GenerateManager

from .. import compat
from ..hints import many
from .logprobs import Entry, Places, Tap, Words, of_chat, of_text, wanted
from .requests import OURS, Grammars, check, check_input, check_messages, check_prompt, configured, processors_of, singles, stops_of
from .streams import Pieces, Raising, Streamed, before, finished, in_turn
from .tools import THINK, calls_one, forgiving, form_of

RECEIVE: ContextVar[Any] = ContextVar("receive")  # of the connection whose request is answered
ASKED: ContextVar[Asked] = ContextVar("asked")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request for one answer, and whether its client has gone. openai: of an API whose errors in streams `finished` writes; tap: where log-probabilities go, or None;
    told: what `Pieces` tells of them; cancel: what ends a streamed answer."""

    body: dict[str, Any]
    openai: bool = False
    gone: Event = dataclasses.field(default_factory=Event)
    tap: Tap | None = None
    told: deque = dataclasses.field(default_factory=deque)
    cancel: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, body: dict[str, Any], openai: bool) -> Asked:
        top = wanted(body)
        return cls(body, openai, tap=None if top is None else Tap(top, bool(body.get("echo"))))

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
    """What is laid around transformers' `Serve` of one model. speculation: the options that a request's seed is put into."""

    def __init__(self, model, processor, speculation: Any):
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.template, self.speculation, self.words = processor.chat_template, speculation, Words(self.tokenizer)
        self.form = form_of(processor, model)
        self.tokenizer.parse_response = forgiving(self.tokenizer)
        traits = compat.traits_of(compat.unwrap(model), "model")
        self.size, grammars = traits.vocab_size, Grammars(model, self.tokenizer, self.form, THINK in str(self.template))
        self.manager = Manager(traits.max_positions, grammars, self.tokenizer, self.words)

    def lay(self, serve: Any) -> None:
        from fastapi.exceptions import RequestValidationError
        from starlette.exceptions import HTTPException

        chats, completions, responses = serve._chat_handler, serve._completion_handler, serve._response_handler
        for handler, check_own in ((chats, check_messages), (completions, partial(check_prompt, size=self.size)), (responses, check_input)):
            handler.handle_request = partial(self.answer, handler.handle_request, check_own, handler is not responses)
            handler._build_generation_config = partial(self.config_of, handler._build_generation_config)
        build = chats._build_completion  # of a text that may have been parsed anew
        chats._build_completion = lambda request, text, *args, **kwargs: build(request, before(text or "", stops_of(ASKED.get().body)), *args, **kwargs)
        serve._generation_state.get_manager = lambda model_id, use_cb=False: self.manager
        app = serve.server.config.app
        app.add_exception_handler(HTTPException, lambda request, error: refused(error.status_code, error.detail))
        app.add_exception_handler(RequestValidationError, lambda request, error: refused(400, no_json(error.errors()[0])))
        app.add_exception_handler(Exception, lambda request, error: refused(500, f"{type(error).__name__}: {error}"))
        serve.server.config.app = heard(app)

    def config_of(self, build: Callable[..., Any], body: dict[str, Any], *args, **kwargs) -> Any:
        config = configured(build({name: value for name, value in body.items() if name not in OURS}, *args, **kwargs), body)
        if body.get("seed") is not None:  # with which K "auto" leaves the clock aside
            config.speculative = dataclasses.replace(self.speculation, seed=body["seed"] % 2**63)
        return config

    async def answer(self, handle: Callable[..., Any], check_own: Callable[[dict], Any], openai: bool, body: dict[str, Any], request_id: str) -> Any:
        """The answer of a handler to a request that can be answered, or to several that one asks for."""
        from fastapi import HTTPException
        from fastapi.responses import JSONResponse, StreamingResponse
        from pydantic import ValidationError

        askeds: list[Asked] = []
        try:
            check_own(body), check(body, self.template, self.form, self.size)
            askeds += [Asked.of(single, openai) for single in singles(body)]
            replies = []
            for asked in askeds:
                ASKED.set(asked)
                replies.append(await heeding(handle(asked.text, request_id), asked.gone))
        except BaseException as error:
            for asked in askeds:  # streams that wait for their turn
                asked.leave()
            if isinstance(error, ValueError) and not isinstance(error, ValidationError):  # which is of the answer: none of the client's
                raise HTTPException(400, str(error)) from error
            if isinstance(error, Gone):
                raise HTTPException(499, "the client has gone.") from None
            raise
        if isinstance(replies[0], StreamingResponse):
            replies[0].body_iterator = self.streamed(replies, askeds, body) if openai else replies[0].body_iterator
            return replies[0]
        if len(replies) == 1 and askeds[0].tap is None and not calls_one(body):
            return replies[0]
        answers = [json.loads(reply.body) for reply in replies]
        for answer, asked in zip(answers, askeds):
            if asked.tap is not None:
                answer["choices"][0]["logprobs"] = self.logprobs(asked)([*asked.tap.prompt, *asked.tap.answer])
            if calls_one(body):
                answer["choices"][0]["message"] |= {"tool_calls": calls[:1]} if (calls := answer["choices"][0]["message"].get("tool_calls")) else {}
        return JSONResponse(joined(answers, body.get("n") or 1))

    def streamed(self, replies: list[Any], askeds: list[Asked], body: dict[str, Any]) -> Any:
        """The events of one answer as transformers' server makes them, or those of several, with what it leaves out."""
        stream, usage = replies[0].body_iterator, bool((body.get("stream_options") or {}).get("include_usage"))
        if len(replies) > 1 or usage or askeds[0].tap is not None or calls_one(body):
            answers = [Streamed(reply.body_iterator, asked.told, asked.tap and self.logprobs(asked), asked.leave, calls_one(body))
                       for reply, asked in zip(replies, askeds)]
            stream = in_turn(answers, body.get("n") or 1, usage)
        return finished(stream, partial(described, 400))

    def logprobs(self, asked: Asked) -> Callable[[list[Entry]], dict[str, Any]]:
        """What tells those of an answer's next tokens as the API does that was asked."""
        return partial(of_text, places=Places(self.words)) if "prompt" in asked.body else partial(of_chat, words=self.words)


class Manager(GenerateManager):
    """Runs one request after the other. context: the longest text of the model, or None."""

    def __init__(self, context: int | None, grammars: Grammars, tokenizer: Any, words: Words):
        super().__init__()
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
        return {**inputs} | ({"logits_processor": processors} if processors else {}) | ({} if asked.tap is None else {"tap": asked.tap})


class Watching:
    """A streamer that ends a call whose client has gone."""

    def __init__(self, gone: Event):
        self.gone = gone

    def put(self, tokens: Any) -> None:
        if self.gone.is_set():
            raise Gone

    def end(self) -> None:
        pass


def heard(app: Callable[..., Any]) -> Callable[..., Any]:
    """An ASGI app whose requests know their connection."""

    async def called(scope, receive, send):
        RECEIVE.set(receive)
        await app(scope, receive, send)

    return called


async def heeding(answer: Any, gone: Event) -> Any:
    """What `answer` returns; `gone` is set if the client leaves before."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    receive, working = RECEIVE.get(), asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(left())
    await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    if leaving.done():
        gone.set()
    leaving.cancel()
    return await working


def joined(answers: list[dict[str, Any]], of_a_prompt: int) -> dict[str, Any]:
    """One answer with the choices of all."""
    usage = {"prompt_tokens": sum(each["usage"]["prompt_tokens"] for each in answers[::of_a_prompt]),
             "completion_tokens": sum(each["usage"]["completion_tokens"] for each in answers)}
    choices = [choice | {"index": place} for place, each in enumerate(answers) for choice in each["choices"]]
    return answers[0] | {"choices": choices, "usage": usage | {"total_tokens": sum(usage.values())}}


def described(status: int, message: Any) -> dict[str, Any]:
    return {"error": {"message": str(message), "type": "invalid_request_error" if status < 500 else "server_error", "param": None, "code": None}}


def no_json(found: dict[str, Any]) -> str:
    return f"the body of the request is no JSON object: {found.get('ctx', {}).get('error', found['msg'])}"


def refused(status: int, message: Any) -> Any:
    from fastapi.responses import JSONResponse

    return JSONResponse(described(status, message), status)
