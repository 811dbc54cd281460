"""Exchange over HTTP: sends requests to the router and writes the answer in OpenAI's format, whole
or as a stream of server-sent events.

Nothing is written before the first request is accepted, so that a refusal has its own status.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from opentelemetry import context as otel_context
from starlette.types import Send

from baton.errors import InvalidArgumentError
from baton.serving.deadline import Deadline
from baton.serving.telemetry.propagation import incoming
from baton.serving.telemetry.tracing import is_tracing
from baton.serving.tenant import Caller
from baton.v1 import inference_pb2 as pb
from baton_router.http.errors import Failure, failure_of
from baton_router.http.openai_responses import Json, Shape
from baton_router.http.sampling import in_openai_terms
from baton_router.http.schemas import GenerationRequest
from baton_router.http.sequence_reader import Reader, SequenceDelta
from baton_router.lifecycle.inference import Inference

logger = logging.getLogger(__name__)

# Events of several prompts not yet written; a full queue is backpressure on the workers.
_MAX_UNWRITTEN = 64

# Grace period in seconds for the router to report an expired deadline itself.
_ERROR_GRACE_SECONDS = 1.0

_Headers = list[tuple[bytes, bytes]]
Event = tuple[int, pb.GenerateResponse]
Extra = Callable[[Sequence[Reader]], Json]
"""Function that makes the answer's field `baton`, given its requests that have ended."""


class Exchange:
    """Exchange of one HTTP request and its answer; `write` is used once.

    Args:
        request_id: of the answer; the ids of its requests begin with it.
        requests: one for each prompt.
        readers: one for each request.
        extra: makes the answer's field `baton`; None: there is none.
    """

    def __init__(
        self,
        inference: Inference,
        caller: Caller,
        deadline: Deadline,
        body: GenerationRequest,
        request_id: str,
        requests: Sequence[pb.GenerateRequest],
        readers: Sequence[Reader],
        shape: Shape,
        extra: Extra | None = None,
    ) -> None:
        self._inference = inference
        self._caller = caller
        self._deadline = deadline
        self._body = body
        self._request_id = request_id
        self._requests = requests
        self._readers = readers
        self._shape = shape
        self._extra = extra
        self._created = int(time.time())

    async def write(self, send: Send) -> None:
        """Writes the answer. Raises if a request is refused, or if an answer that is not streamed
        fails; the failure of a stream is its last event."""
        with _in_trace_of(self._caller):
            await self._write(send)

    async def _write(self, send: Send) -> None:
        try:
            # A client that does not read holds no resources beyond its deadline.
            async with asyncio.timeout(self._deadline.remaining() + _ERROR_GRACE_SECONDS):
                await (self._stream(send) if self._body.stream else self._send_at_once(send))
        except InvalidArgumentError as error:
            raise in_openai_terms(error, self._body) from error

    async def _send_at_once(self, send: Send) -> None:
        updates: dict[int, list[SequenceDelta]] = {i: [] for r in self._readers for i in r.indices}
        async with aclosing(self._events()) as events:
            async for at, event in events:
                for update in self._readers[at].read(event):
                    updates[update.index].append(update)
        choices = [self._shape.whole(index, found) for index, found in updates.items()]
        answer = {**self._frame(self._shape.whole_name, choices), "usage": self._usage()}
        if self._extra is not None:
            answer["baton"] = self._extra(self._readers)
        content = _encoded(answer)
        headers = [(b"content-length", str(len(content)).encode())]
        await self._start(send, b"application/json", headers)
        await send({"type": "http.response.body", "body": content})

    async def _stream(self, send: Send) -> None:
        has_begun = False
        try:
            async with aclosing(self._events()) as events:
                async for at, event in events:
                    chunks = [] if has_begun else list(self._openings())
                    chunks += self._chunks(at, event)
                    if not has_begun:
                        headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
                        await self._start(send, b"text/event-stream; charset=utf-8", headers)
                        has_begun = True
                    if chunks:
                        body = b"".join(_event(chunk) for chunk in chunks)
                        await send({"type": "http.response.body", "body": body, "more_body": True})
            rest = b"".join(_event(chunk) for chunk in self._closings()) + b"data: [DONE]\n\n"
        except Exception as error:
            if not has_begun:
                raise
            rest = _event(self._failure(error).body)
        await send({"type": "http.response.body", "body": rest})

    def _failure(self, error: BaseException) -> Failure:
        if isinstance(error, InvalidArgumentError):
            error = in_openai_terms(error, self._body)
        failure = failure_of(error)
        if failure.is_bug:
            logger.error("a stream failed", exc_info=error)
        return failure

    async def _start(self, send: Send, media_type: bytes, headers: _Headers) -> None:
        own = [(b"content-type", media_type), (b"x-request-id", self._request_id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": own + headers})

    # Writing.

    def _frame(self, name: str, choices: list[Json]) -> Json:
        return {
            "id": self._shape.id_prefix + self._request_id,
            "object": name,
            "created": self._created,
            "model": self._inference.card.name,
            "choices": choices,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        frame = self._frame(self._shape.chunk_name, choices)
        options = self._body.stream_options
        if options is not None and options.continuous_usage_stats and choices:
            frame["usage"] = self._usage()
        elif options is not None and options.include_usage:
            frame["usage"] = None
        return frame

    def _openings(self) -> Iterator[Json]:
        for reader in self._readers:
            for index in reader.indices:
                choice = self._shape.opening(index)
                if choice is not None:
                    yield self._chunk([choice])

    def _chunks(self, at: int, event: pb.GenerateResponse) -> Iterator[Json]:
        for update in self._readers[at].read(event):
            choice = self._shape.part(update)
            if choice is not None:
                yield self._chunk([choice])

    def _closings(self) -> Iterator[Json]:
        options = self._body.stream_options
        if self._extra is not None:
            yield {**self._chunk([]), "baton": self._extra(self._readers)}
        if options is not None and options.include_usage:
            yield {**self._chunk([]), "usage": self._usage()}

    def _usage(self) -> Json:
        """Returns the usage of all prompts so far."""
        usages = [reader.finished.usage for reader in self._readers if reader.finished is not None]
        num_prompt = sum(reader.num_prompt_tokens for reader in self._readers)
        num_output = sum(reader.num_output_tokens for reader in self._readers)
        num_reasoning = sum(reader.num_reasoning_tokens for reader in self._readers)
        details = {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {
                "cached_tokens": sum(usage.num_cached_prompt_tokens for usage in usages)
            },
            **(details if num_reasoning else {}),
        }

    # Reading.

    async def _events(self) -> AsyncGenerator[Event, None]:
        """Yields the events of all requests in any order, each with its request's index."""
        if len(self._requests) > 1:
            async with aclosing(self._mixed()) as mixture:
                async for event in mixture:
                    yield event
            return
        async with aclosing(self._generate(self._requests[0])) as responses:
            async for response in responses:
                yield 0, response

    async def _mixed(self) -> AsyncGenerator[Event, None]:
        queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue(_MAX_UNWRITTEN)

        async def read(at: int, request: pb.GenerateRequest) -> None:
            try:
                async with aclosing(self._generate(request)) as responses:
                    async for response in responses:
                        await queue.put((at, response))
            except Exception as error:
                await queue.put(error)
            await queue.put(None)

        readings = [asyncio.create_task(read(*one)) for one in enumerate(self._requests)]
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

    def _generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        return self._inference.generate(request, self._caller, self._deadline)


@contextmanager
def _in_trace_of(caller: Caller) -> Iterator[None]:
    """Continues the trace of the caller in the block."""
    if not is_tracing():
        yield
        return
    token = otel_context.attach(incoming(caller.invocation_metadata() or ()))
    try:
        yield
    finally:
        otel_context.detach(token)


def _encoded(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _event(content: Json) -> bytes:
    return b"data: " + _encoded(content) + b"\n\n"
