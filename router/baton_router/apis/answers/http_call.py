"""Call over HTTP: sends requests to the router and writes the answer, whole or as a stream of
server-sent events.

Nothing is written before the first request is accepted, so that a refusal has its own status. Only
a stream that is silent for too long begins before: while its images are read, the first workers are
awaited or its requests are queued.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from functools import partial

from opentelemetry import context as otel_context
from starlette.types import Send

from baton.errors import InvalidArgumentError
from baton.serving.deadline import Deadline
from baton.serving.telemetry.propagation import incoming
from baton.serving.telemetry.tracing import is_tracing
from baton.serving.tenant import Caller
from baton_router.apis.answers.answer_writer import AnswerWriter, encoded
from baton_router.apis.answers.keep_alive import KeepAlive
from baton_router.apis.answers.sequence_reader import Reader, SequenceDelta
from baton_router.apis.edge.body.field_names import InTerms
from baton_router.apis.edge.errors import Failure, failure_of
from baton_router.apis.edge.headers import CLAMPED, IGNORED
from baton_router.call.generate_call import GenerateCall
from baton_router.lifecycle.events import Accepted, ClientEvent
from baton_router.lifecycle.inference import Inference
from baton_router.telemetry import call_observer

logger = logging.getLogger(__name__)

# Events of several prompts not yet written; a full queue is backpressure on the workers.
_MAX_UNWRITTEN = 64

# Grace period in seconds for the router to report an expired deadline itself.
ERROR_GRACE_SECONDS = 1.0

# Seconds for which a stream is silent at most. Proxies close connections after 60, clients later.
MAX_SILENCE = 10.0

_Headers = list[tuple[bytes, bytes]]
_EVENT_STREAM = b"text/event-stream; charset=utf-8"
_STREAM: _Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
Event = tuple[int, ClientEvent]
Held = AbstractAsyncContextManager[object]
"""What a request holds of its body's budget until its requests are made."""


class HttpCall:
    """Call over HTTP: one request and its answer; `write` is used once.

    Args:
        request_id: of the answer; the ids of its requests begin with it.
        prepare: makes the requests, one for each prompt; it may wait for images and workers.
        readers: one for each of them.
        ignored: fields without effect on this model, by the router's paths.
        max_silence: seconds after which a stream has at least a piece without content, also before
            its requests are admitted; a refusal after that is its last event.
    """

    def __init__(
        self,
        inference: Inference,
        caller: Caller,
        deadline: Deadline,
        request_id: str,
        prepare: Callable[[], Awaitable[Sequence[GenerateCall]]],
        readers: Sequence[Reader],
        writer: AnswerWriter,
        *,
        is_stream: bool,
        ignored: Sequence[str] = (),
        max_silence: float = MAX_SILENCE,
    ) -> None:
        self._inference = inference
        self._caller = caller
        self._deadline = deadline
        self.request_id = request_id
        self._prepare = prepare
        self._readers = readers
        self._writer = writer
        self._is_stream = is_stream
        self._ignored = ignored
        self._max_silence = max_silence

    async def write(self, send: Send, in_terms: InTerms, body: Held) -> None:
        """Writes the answer. Raises if a request is refused, or if an answer that is not streamed
        fails; the failure of a stream that has begun is its last event, `in_terms` of its API.
        `body` is left once the requests are made of it, or with the reason that they are not."""
        # A client that does not read holds no resources beyond its deadline.
        with in_trace_of(self._caller):
            async with self._deadline.limit(ERROR_GRACE_SECONDS):
                if self._is_stream:
                    await self._stream(send, in_terms, body)
                else:
                    await self._send_at_once(send, in_terms, body)

    async def _send_at_once(self, send: Send, in_terms: InTerms, body: Held) -> None:
        updates: list[SequenceDelta] = []
        async with body:
            calls = await self._prepare()
        async with aclosing(self._events(calls)) as events:
            async for at, event in events:
                updates += self._readers[at].read(event)
        content = encoded(await self._writer.whole(updates))
        headers = [(b"content-length", str(len(content)).encode())]
        await self._start(send, in_terms, b"application/json", headers)
        await send({"type": "http.response.body", "body": content})

    async def _stream(self, send: Send, in_terms: InTerms, body: Held) -> None:
        start = partial(self._start, send, in_terms, _EVENT_STREAM, _STREAM)
        alive = KeepAlive(send, start, self._writer.keep_alive, self._max_silence)
        is_open = False
        held: list[SequenceDelta] = []
        try:
            async with alive:
                async with body:
                    calls = await self._prepare()
                async with aclosing(self._events(calls)) as events:
                    async for at, event in events:
                        updates = self._readers[at].read(event)
                        piece = b""
                        if not is_open:
                            await alive.begin()
                            alive.has_sent = True
                            held += updates
                            if self._writer.opens_with_usage and isinstance(event, Accepted):
                                continue
                            is_open, updates, piece = True, held, self._writer.opening()
                        piece += b"".join(map(self._writer.part, updates))
                        if piece:
                            await send(
                                {"type": "http.response.body", "body": piece, "more_body": True}
                            )
                            alive.has_sent = True
            rest = await self._writer.closing()
        except Exception as error:
            if not alive.has_begun:
                raise
            call_observer.failed(error)
            if isinstance(error, InvalidArgumentError):
                error = in_terms(error)
            rest = self._writer.failed(_failure(error))
        await send({"type": "http.response.body", "body": rest})

    async def _start(
        self, send: Send, in_terms: InTerms, media_type: bytes, headers: _Headers
    ) -> None:
        notes = self._notes(in_terms)
        own = [(name.encode(), value.encode()) for name, value in notes.items()]
        own.append((b"content-type", media_type))
        await send({"type": "http.response.start", "status": 200, "headers": own + headers})

    def _notes(self, in_terms: InTerms) -> dict[str, str]:
        """Returns headers about fields that are not followed as they were given."""
        notes = {}
        if self._ignored:
            notes[IGNORED] = ", ".join(_name(field, in_terms) for field in self._ignored)
        bounds = [reader.clamped_to for reader in self._readers if reader.clamped_to is not None]
        if bounds:
            notes[CLAMPED] = f"{_name('sampling.max_tokens', in_terms)}={min(bounds)}"
        return notes

    async def _events(self, calls: Sequence[GenerateCall]) -> AsyncGenerator[Event, None]:
        """Yields the events of all requests in any order, each with its request's index."""
        if len(calls) > 1:
            async with aclosing(self._mixed(calls)) as mixture:
                async for event in mixture:
                    yield event
            return
        async with aclosing(self._generate(0, calls[0])) as responses:
            async for response in responses:
                yield 0, response

    async def _mixed(self, calls: Sequence[GenerateCall]) -> AsyncGenerator[Event, None]:
        queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue(_MAX_UNWRITTEN)

        async def read(at: int, call: GenerateCall) -> None:
            try:
                async with aclosing(self._generate(at, call)) as responses:
                    async for response in responses:
                        await queue.put((at, response))
            except Exception as error:
                await queue.put(error)
            await queue.put(None)

        readings = [asyncio.create_task(read(*one)) for one in enumerate(calls)]
        try:
            num_left = len(readings)
            while num_left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_left -= 1
                else:
                    yield item
        finally:
            for reading in readings:
                reading.cancel()
            await asyncio.gather(*readings, return_exceptions=True)

    def _generate(self, at: int, call: GenerateCall) -> AsyncGenerator[ClientEvent, None]:
        # So that the headers have the bound of a request that is still queued.
        note = self._readers[at].note_request
        return self._inference.generate(call, self._caller, self._deadline, note)


def _name(field: str, in_terms: InTerms) -> str:
    """Returns the name of a field in the API of the request."""
    return in_terms(InvalidArgumentError(field, "")).field


def _failure(error: Exception) -> Failure:
    failure = failure_of(error)
    if failure.is_bug:
        logger.error("a stream failed", exc_info=error)
    return failure


@contextmanager
def in_trace_of(caller: Caller) -> Iterator[None]:
    """Continues the trace of the caller in the block."""
    if not is_tracing():
        yield
        return
    token = otel_context.attach(incoming(caller.invocation_metadata() or ()))
    try:
        yield
    finally:
        otel_context.detach(token)
