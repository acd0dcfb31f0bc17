"""Before `hf-specdec serve` answers: who may ask, how many may wait, and what is said when there is no room or the server closes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextvars import ContextVar
from hmac import compare_digest
from math import ceil
from threading import Event
from typing import Any

from .metrics import KIND, Metrics

RECEIVE: ContextVar[Any] = ContextVar("receive")  # of the connection whose request is answered
OPEN = ("/health", "/metrics")  # to everybody, also where there is a key
ASKS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # what is answered by the model


class Gate:
    """An ASGI app around another one, whose requests know their connection. key: without which nothing but OPEN is answered, or None; lanes: answers that
    are written at a time; queue: requests that may wait beside these."""

    def __init__(self, app: Callable[..., Any], metrics: Metrics, key: str | None, lanes: int, queue: int):
        self.app, self.metrics, self.key, self.lanes, self.queue = app, metrics, key, lanes, queue
        self.flying, self.closing, self.empty = 0, False, lambda: None

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        RECEIVE.set(receive)
        path, status = scope["path"], 500

        async def sent(message: dict) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        asks, refusal = path in ASKS, self.refusal(scope, path)
        self.flying += asks
        try:
            if refusal is not None:
                await said(sent, *refusal)
            elif path == "/metrics":
                await said(sent, 200, self.metrics.text(), kind=KIND)
            elif path == "/health" and self.closing:
                await said(sent, 503, {"status": "closing"})
            else:
                await self.app(scope, receive, sent)
        finally:
            if asks:
                self.flying -= 1
                self.metrics.requested(path, status)
                if self.closing and not self.flying:
                    self.empty()

    def refusal(self, scope: dict, path: str) -> tuple[int, Any, dict] | None:
        """Status, body and headers, for a request that is not let in."""
        if self.key is not None and path not in OPEN and scope["method"] != "OPTIONS":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not compare_digest(given, b"Bearer " + self.key.encode()):
                return 401, described(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY.", "invalid_api_key"), {"WWW-Authenticate": "Bearer"}
        if path not in ASKS:
            return None
        if self.closing:
            return 503, described(503, "the server is closing: it ends the answers that it has begun, and begins none."), {"Retry-After": "5"}
        if self.flying >= self.lanes + self.queue:
            message = f"{self.flying} requests are being answered or waiting already; try again later."
            return 429, described(429, message, "rate_limit_exceeded"), {"Retry-After": str(self.wait())}
        return None

    def wait(self) -> int:
        """Seconds until a place may be free: what an answer has taken so far, of all lanes."""
        counts = self.metrics.counts
        return max(1, min(60, ceil(self.metrics.sums["request_seconds"] / max(counts["answers"], 1) / self.lanes)))


async def said(send: Any, status: int, body: Any, headers: dict[str, str] | None = None, kind: str = "application/json") -> None:
    raw = (body if isinstance(body, str) else json.dumps(body)).encode()
    found = {"content-type": kind, "content-length": str(len(raw))} | (headers or {})
    await send({"type": "http.response.start", "status": status, "headers": [(name.lower().encode(), value.encode()) for name, value in found.items()]})
    await send({"type": "http.response.body", "body": raw})


def described(status: int, message: Any, code: str | None = None) -> dict[str, Any]:
    """An error as the API has it."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": str(message), "type": kind, "param": None, "code": code}}


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
