"""Running generation, to iterate over or to await: the stream that `Client.generate` returns."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, Self, TypeAlias, TypeVar

import grpc

from baton.client.progress import Progress
from baton.client.resume import CallAttempt, Resumption
from baton.client.types import Accepted, Chunk, Completion, Finished, TokenLogprobs
from baton.errors import CancelledError
from baton.rpc.cancellation import is_task_cancelled
from baton.rpc.errors import error_of
from baton.v1 import inference_pb2 as pb

_CANCELLED = "the generation was cancelled"


class Call(Protocol):
    """Stream of events as `grpc` returns it."""

    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> object: ...


AsyncCall: TypeAlias = "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"
_AnyCall = TypeVar("_AnyCall", bound="Call | AsyncCall")
_Event = TypeVar("_Event", threading.Event, asyncio.Event)


@dataclass(frozen=True, slots=True)
class Calls(Generic[_AnyCall]):
    """Calls of one generation, one after the other. `open` begins one of them."""

    resumption: Resumption
    open: Callable[[CallAttempt], _AnyCall]


class _BaseGeneration(Generic[_AnyCall, _Event]):
    """State of a generation in either client, which adds the reading of its calls."""

    _event_type: type[_Event]
    _cancelled: _Event

    def __init__(
        self, call: _AnyCall, num_sequences: int = 1, calls: Calls[_AnyCall] | None = None
    ) -> None:
        """Takes `calls`, which replaces a lost call; None: the loss ends the generation."""
        self._call = call
        self._calls = calls
        self._cancelled = self._event_type()
        self._progress = Progress(num_sequences)

    @property
    def finished(self) -> Finished | None:
        """End of the generation; None until the last chunk has been read. With several sequences,
        that of the last to end, whose usage and timings are the whole request's."""
        return self._progress.finished

    @property
    def num_resumed(self) -> int:
        """Number of times that it resumed after a loss, on another router or on the same one."""
        return max(0, self._progress.num_accepted - 1)

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt's tokens from the second one on, if requested: all of
        them once the first chunk has been read."""
        return self._progress.prompt_logprobs

    def cancel(self) -> None:
        """Cancels it; reading on raises `CancelledError`. Idempotent, and harmless at the end."""
        self._cancelled.set()
        self._call.cancel()

    def _next_call(self, error: grpc.RpcError) -> tuple[float, Callable[[], _AnyCall]]:
        """Returns what replaces the call that `error` ended: a pause in seconds, and a function
        that opens the next one. Raises the error if nothing does."""
        calls = None if self._cancelled.is_set() else self._calls
        attempt = None if calls is None else calls.resumption.next_attempt(error, self._progress)
        if calls is None or attempt is None:
            raise self._progress.fail(error_of(error)) from error
        return attempt.pause, partial(calls.open, attempt)

    def _reopen(self, open_call: Callable[[], _AnyCall]) -> None:
        """Opens the next call. Raises `CancelledError` if the client was closed meanwhile."""
        try:
            self._call = open_call()
        except CancelledError as error:
            self._progress.fail(error)
            raise


class Generation(_BaseGeneration[Call, threading.Event], Iterator[Chunk]):
    """Running generation: iterate over its chunks. Leaving its `with` block early cancels it.

    Chunks of several sequences are interleaved in any order.
    """

    _event_type = threading.Event

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

    def text(self) -> str:
        """Waits for the end and returns all text, including that of chunks already read. With
        several sequences, that of the first, which is the best if they are ranked."""
        return self._complete().text_of(0)

    def token_ids(self) -> list[int]:
        """Waits for the end and returns all tokens, of the same sequence as `text`."""
        return self._complete().token_ids_of(0)

    def texts(self) -> list[str]:
        """Waits for the end and returns the text of each sequence."""
        return [completion.text for completion in self.completions()]

    def completions(self) -> list[Completion]:
        """Waits for the end and returns each sequence."""
        return self._complete().completions()

    def _complete(self) -> Progress:
        """Reads to the end."""
        for _ in self:
            pass
        return self._progress

    def _read_event(self) -> None:
        self._progress.check_not_failed()
        try:
            self._progress.add(next(self._call))
        except StopIteration:
            self._progress.check_complete()
            raise
        except grpc.RpcError as error:
            pause, open_call = self._next_call(error)
            if self._cancelled.wait(pause):
                raise self._progress.fail(CancelledError(_CANCELLED)) from error
            self._reopen(open_call)
            if self._cancelled.is_set():  # by another thread meanwhile
                self._call.cancel()


class AsyncGeneration(_BaseGeneration[AsyncCall, asyncio.Event], AsyncIterator[Chunk]):
    """Running generation: `async for` over its chunks, once.

    Leaving its `async with` block early cancels it, and so does cancelling a task that reads it.
    Chunks of several sequences are interleaved in any order.
    """

    _event_type = asyncio.Event

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
        """Router's acceptance, known before the first chunk; None until then (`wait_accepted`)."""
        return self._progress.accepted

    async def wait_accepted(self) -> Accepted:
        """Waits for the router to admit the request."""
        while self._progress.accepted is None:
            await self._read_event()
        return self._progress.accepted

    async def text(self) -> str:
        """Waits for the end and returns all text, as `Generation.text`."""
        return (await self._complete()).text_of(0)

    async def token_ids(self) -> list[int]:
        """Waits for the end and returns all tokens, of the same sequence as `text`."""
        return (await self._complete()).token_ids_of(0)

    async def texts(self) -> list[str]:
        """Waits for the end and returns the text of each sequence."""
        return [completion.text for completion in await self.completions()]

    async def completions(self) -> list[Completion]:
        """Waits for the end and returns each sequence."""
        return (await self._complete()).completions()

    async def _complete(self) -> Progress:
        """Reads to the end."""
        async for _ in self:
            pass
        return self._progress

    async def _read_event(self) -> None:
        self._progress.check_not_failed()
        try:
            self._progress.add(await anext(aiter(self._call)))
        except StopAsyncIteration:
            self._progress.check_complete()
            raise
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            raise self._progress.fail(CancelledError(_CANCELLED)) from None
        except grpc.RpcError as error:
            pause, open_call = self._next_call(error)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._cancelled.wait()
            if self._cancelled.is_set():
                raise self._progress.fail(CancelledError(_CANCELLED)) from error
            self._reopen(open_call)
