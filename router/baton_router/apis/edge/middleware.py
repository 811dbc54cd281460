"""Middleware of every route: errors in the format of the API, requests counted."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.serving.bounds import BoundsError
from baton.serving.telemetry.serving import PATH as METRICS_PATH
from baton_router.apis.edge.body.structure import StructureError
from baton_router.apis.edge.body.unknown_fields import IGNORED_FIELDS
from baton_router.apis.edge.caller import HttpCaller
from baton_router.apis.edge.errors import BodyOverloadError, BodyTooLargeError, Failure, failure_of
from baton_router.apis.edge.headers import IGNORED
from baton_router.telemetry.call_observer import CallObserver

logger = logging.getLogger(__name__)

ErrorFormat = Callable[[Failure], Mapping[str, Any]]
"""Function that makes the body of an error response."""

REQUEST_ID = "baton.request_id"
"""Key of a request's scope: its id, which is that of the router's request if it makes one."""
ID_HEADERS = ("x-request-id", "request-id")

# Routes that probes and scrapers call.
_UNOBSERVED = ("/health", "/ping", METRICS_PATH)

# Seconds and bytes for which a refused body is still read: otherwise a client that is still writing
# would find the connection broken before it has read the error.
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 * 2**20

# Errors before the end of the body.
_WHILE_READING = (BodyOverloadError, BodyTooLargeError, BoundsError, StructureError)

# A browser must not guess another content type.
_HEADERS = [(b"content-type", b"application/json"), (b"x-content-type-options", b"nosniff")]


class InFlight:
    """Counter of requests in flight, for a graceful shutdown to wait for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Returns once no request is in flight."""
        await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_requests += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_requests -= 1
            if self.num_requests == 0:
                self._idle.set()


class AnswerHeaders:
    """Middleware that adds headers to every answer: the request's id, under the names that the
    clients of OpenAI and of Anthropic read, and the fields that were ignored."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[REQUEST_ID] = secrets.token_hex(8)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), scope[REQUEST_ID].encode()) for name in ID_HEADERS]
                headers = [*message["headers"], *own]
                if IGNORED_FIELDS in scope:
                    headers = _with_ignored(headers, scope[IGNORED_FIELDS])
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _with_ignored(headers: list[tuple[bytes, bytes]], fields: str) -> list[tuple[bytes, bytes]]:
    """Returns the headers with these fields named before those that the answer names itself."""
    name = IGNORED.encode()
    own = [value for key, value in headers if key == name]
    others = [header for header in headers if header[0] != name]
    return [*others, (name, b", ".join([fields.encode(), *own]))]


class Observed:
    """Middleware that has every request observed, with the error that it ends with."""

    def __init__(self, app: ASGIApp, observer: CallObserver) -> None:
        self._app = app
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._observer.observing(HttpCaller(Request(scope)), "http") as call:

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    call.status = message["status"]
                await send(message)

            try:
                await self._app(scope, receive, watched)
            except Exception as error:
                if call.status is None:
                    call.status = _failure_of(error).status
                raise
            finally:
                call.method = _method_of(scope)


def _method_of(scope: Scope) -> str:
    """Returns method and route of a request, without what a client may write into its path; empty
    for those that are not observed."""
    route = getattr(scope.get("route"), "path", "unknown route")
    return "" if route in _UNOBSERVED else f"{scope['method']} {route}"


class Failures:
    """Error handler of the routes. An error after the answer has begun cuts the answer off.

    Args:
        format_of: returns the format of the error bodies of a request; None: OpenAI's.
    """

    def __init__(
        self, app: ASGIApp, format_of: Callable[[Scope], ErrorFormat | None] | None = None
    ) -> None:
        self._app = app
        self._format_of = format_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = has_body = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        async def receiving() -> Message:
            nonlocal has_body
            message = await receive()
            has_body = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, receiving, watched)
        except ClientDisconnect:
            # Without a traceback, which clients could fill the log with.
            logger.info("%s %s: the client disconnected", scope["method"], scope["path"])
        except Exception as error:
            failure = _failure_of(error)
            if failure.is_bug:
                logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            if not has_begun:
                may_be_writing = isinstance(error, _WHILE_READING) and not has_body
                form = None if self._format_of is None else self._format_of(scope)
                body = failure.body if form is None else form(failure)
                await _answer(failure, body, send, receive if may_be_writing else None)


def _failure_of(error: Exception) -> Failure:
    if not isinstance(error, HTTPException):
        return failure_of(error)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    headers = dict(error.headers or {})
    kind = "invalid_request_error"
    return Failure(error.status_code, str(error.detail), kind, code, headers=headers)


async def _answer(
    failure: Failure, body: Mapping[str, Any], send: Send, unread: Receive | None
) -> None:
    content = json.dumps(body).encode()
    headers = [(name.lower().encode(), value.encode()) for name, value in failure.headers.items()]
    headers += [*_HEADERS, (b"content-length", str(len(content)).encode())]
    if unread is not None:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": failure.status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": True})
    if unread is not None:
        await _linger(unread)
    await send({"type": "http.response.body", "body": b""})


async def _linger(receive: Receive) -> None:
    """Reads and drops the rest of the body that the client is still sending."""
    num_bytes, until = 0, time.monotonic() + _LINGER_SECONDS
    try:
        async with asyncio.timeout(_LINGER_SECONDS):
            while num_bytes < _LINGER_BYTES and time.monotonic() < until:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body"):
                    return
    except TimeoutError:
        return


async def disconnected(receive: Receive) -> None:
    """Waits until the client disconnects. The body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
