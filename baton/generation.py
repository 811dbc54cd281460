"""A running generation, to iterate over or to await: the stream behind `Client.generate`."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Protocol, Self

import grpc

from baton.client_types import Accepted, Chunk, Finished
from baton.client_wire import accepted_of, chunk_of, finished_of
from baton.errors import BatonError, CancelledError, InternalError
from baton.rpc_errors import error_of
from baton.v1 import inference_pb2 as pb


class Generation(Iterator[Chunk]):
    """A running generation: iterate over its chunks. Leaving its `with` block early cancels it."""

    def __init__(self, call: "_Call") -> None:
        self._call = call
        self._progress = _Progress()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __next__(self) -> Chunk:
        while not self._progress.unread:
            self._read_event()
        return self._progress.unread.popleft()

    @property
    def accepted(self) -> Accepted:
        """Waits for the router to admit the request."""
        while self._progress.accepted is None:
            self._read_event()
        return self._progress.accepted

    @property
    def finished(self) -> Finished | None:
        """How it ended; None until the last chunk has been read."""
        return self._progress.finished

    def text(self) -> str:
        """Waits for the end and returns all text, that of chunks already read included."""
        self._drain()
        return "".join(self._progress.texts)

    def token_ids(self) -> list[int]:
        """Waits for the end and returns all tokens, those of chunks already read included."""
        self._drain()
        return list(self._progress.token_ids)

    def cancel(self) -> None:
        """Ends it now; reading on raises `CancelledError`. Idempotent, and harmless at the end."""
        self._call.cancel()

    def _drain(self) -> None:
        for _ in self:
            pass

    def _read_event(self) -> None:
        try:
            self._progress.add(next(self._call))
        except StopIteration:
            self._progress.check_complete()
            raise
        except grpc.RpcError as error:
            raise error_of(error) from error


class AsyncGeneration(AsyncIterator[Chunk]):
    """A running generation: `async for` over its chunks, once.

    Leaving its `async with` block early cancels it, and so does cancelling a task that reads it.
    """

    def __init__(self, call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"):
        self._call = call
        self._events = aiter(call)
        self._progress = _Progress()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    async def __anext__(self) -> Chunk:
        while not self._progress.unread:
            await self._read_event()
        return self._progress.unread.popleft()

    @property
    def accepted(self) -> Accepted | None:
        """Known before the first chunk; None until then. `wait_accepted` waits for it."""
        return self._progress.accepted

    @property
    def finished(self) -> Finished | None:
        """How it ended; None until the last chunk has been read."""
        return self._progress.finished

    async def wait_accepted(self) -> Accepted:
        """Waits for the router to admit the request."""
        while self._progress.accepted is None:
            await self._read_event()
        return self._progress.accepted

    async def text(self) -> str:
        """Waits for the end and returns all text, that of chunks already read included."""
        await self._drain()
        return "".join(self._progress.texts)

    async def token_ids(self) -> list[int]:
        """Waits for the end and returns all tokens, those of chunks already read included."""
        await self._drain()
        return list(self._progress.token_ids)

    def cancel(self) -> None:
        """Ends it now; reading on raises `CancelledError`. Idempotent, and harmless at the end."""
        self._call.cancel()

    async def _drain(self) -> None:
        async for _ in self:
            pass

    async def _read_event(self) -> None:
        self._progress.check_not_failed()
        try:
            self._progress.add(await anext(self._events))
        except StopAsyncIteration:
            self._progress.check_complete()
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # grpc.aio says so when the call, not the task, was cancelled.
            raise self._progress.fail(CancelledError("the generation was cancelled")) from None
        except grpc.RpcError as error:
            raise self._progress.fail(error_of(error)) from error


class _Progress:
    """What the events of one stream have added up to. Waits for nothing."""

    def __init__(self) -> None:
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self.unread: deque[Chunk] = deque()
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self._failure: BatonError | None = None

    def add(self, event: pb.GenerateResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self.accepted = accepted_of(event.accepted)
        elif self.accepted is None:
            raise InternalError(f"the stream began with {kind}, not with accepted")
        elif kind == "tokens":
            self._add_chunk(chunk_of(event.tokens))
        elif kind == "finished":
            self.finished = finished_of(event.finished)

    def check_complete(self) -> None:
        """At the end of the stream: raises `InternalError` where it was cut."""
        if self.finished is None:
            raise InternalError("the stream ended before the generation did")

    def fail(self, error: BatonError) -> BatonError:
        """Remembers the error, for whoever reads on."""
        self._failure = error
        return error

    def check_not_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _add_chunk(self, chunk: Chunk) -> None:
        self.unread.append(chunk)
        self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)


class _Call(Protocol):
    """A stream of events as `grpc` gives it."""

    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> object: ...
