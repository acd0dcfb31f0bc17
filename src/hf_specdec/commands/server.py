"""transformers' server (`transformers serve`) with one model that is there already, and with requests, answers and errors as clients of the OpenAI API know them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from threading import Event
from typing import Any

from transformers.cli.serving.utils import GenerateManager

from .. import compat
from ..hints import many
from .requests import OURS, Grammars, Pieces, before, check, check_messages, check_prompt, configured, processors_of, singles, stops_of

RECEIVE: ContextVar[Any] = ContextVar("receive")  # of the connection whose request is answered
ASKED: ContextVar[Asked] = ContextVar("asked")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request, and whether its client has gone."""

    body: dict[str, Any]
    streams_errors: bool = False  # in the API's form, which `finished` writes
    gone: Event = dataclasses.field(default_factory=Event)

    @property
    def echo(self) -> str:
        return self.body["prompt"] if self.body.get("echo") else ""


class Gone(Exception):
    """The client has closed the connection: nobody waits for the answer."""


class Failed(Exception):
    """An answer that breaks off while it is streamed."""


class Around:
    """What is laid around transformers' `Serve` of one model. speculation: the options that a request's seed is put into."""

    def __init__(self, model, processor, speculation: Any):
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.template, self.speculation = processor.chat_template, speculation
        self.manager = Manager(compat.traits_of(compat.unwrap(model), "model").max_positions, Grammars(model, self.tokenizer))

    def lay(self, serve: Any) -> None:
        from fastapi.exceptions import RequestValidationError
        from starlette.exceptions import HTTPException

        chats, completions, responses = serve._chat_handler, serve._completion_handler, serve._response_handler
        for handler, check_input in ((chats, check_messages), (completions, check_prompt), (responses, lambda body: body.setdefault("stream", False))):
            handler.handle_request = partial(self.answer, handler.handle_request, check_input, handler is not responses)
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

    async def answer(self, handle: Callable[..., Any], check_input: Callable[[dict], Any], openai: bool, body: dict[str, Any], request_id: str) -> Any:
        """The answer of a handler to a request that can be answered, or to several that one asks for."""
        from fastapi import HTTPException
        from fastapi.responses import JSONResponse, StreamingResponse
        from pydantic import ValidationError

        try:
            check_input(body), check(body, self.template)
            replies = []
            for single in singles(body):
                ASKED.set(asked := Asked(single, openai))
                replies.append(await heeding(handle(single, request_id), asked.gone))
        except ValidationError:  # of the answer: a ValueError, but none of the client's
            raise
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        except Gone:
            raise HTTPException(499, "the client has gone.") from None
        if isinstance(replies[0], StreamingResponse) and openai:
            replies[0].body_iterator = finished(replies[0].body_iterator)
        return replies[0] if len(replies) == 1 else JSONResponse(joined([json.loads(reply.body) for reply in replies], body.get("n") or 1))


class Manager(GenerateManager):
    """Runs one request after the other. context: the longest text of the model, or None."""

    def __init__(self, context: int | None, grammars: Grammars):
        super().__init__()
        self.context, self.grammars = context, grammars

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, **parsing):
        asked = ASKED.get()
        queue, streamer = super().generate_streaming(model, processor, self.prepared(inputs, gen_config), gen_config, request_id, **parsing)
        return (Raising if asked.streams_errors else Pieces)(queue, stops_of(asked.body), asked.echo), streamer

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        asked = ASKED.get()
        watched = {"streamer": Watching(asked.gone)} if (gen_config.num_beams or 1) == 1 else {}  # with beams there is no streamer
        text, *rest = await super().generate_non_streaming(model, processor, self.prepared(inputs, gen_config) | watched, gen_config, request_id)
        return asked.echo + before(text, stops_of(asked.body)), *rest

    def prepared(self, inputs: Any, config: Any) -> dict[str, Any]:
        """The arguments of `generate()`; ValueError for a prompt that leaves no room for an answer, for which there is no more than the context has."""
        prompt = inputs["input_ids"].shape[-1]
        if self.context:
            if (room := self.context - prompt) < 1:
                raise ValueError(f"the prompt has {many(prompt, 'token')}, and this model reads {self.context} with its answer. Shorten the prompt.")
            config.max_new_tokens = min(config.max_new_tokens or room, room)
        processors = processors_of(ASKED.get().body, prompt, self.grammars)
        return {**inputs} | ({"logits_processor": processors} if processors else {})


class Watching:
    """A streamer that ends a call whose client has gone."""

    def __init__(self, gone: Event):
        self.gone = gone

    def put(self, tokens: Any) -> None:
        if self.gone.is_set():
            raise Gone

    def end(self) -> None:
        pass


class Raising(Pieces):
    def take(self, item: Any) -> None:
        if type(item).__name__ == "_StreamError":
            raise Failed(item.msg)
        super().take(item)


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


async def finished(stream: AsyncIterator[str]) -> AsyncIterator[str]:
    """A stream of events that ends as the API's do, if need be with an error that clients can read."""
    async with aclosing(stream):
        try:
            async for event in stream:
                yield event
        except Failed as error:
            yield f"data: {json.dumps(described(400, str(error)))}\n\n"
        yield "data: [DONE]\n\n"


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
