"""Running generation, to iterate over or to await: the stream that `Client.generate` returns."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Generic, Protocol, Self, TypeAlias, TypeVar

import grpc

from baton.client.progress import Progress
from baton.client.resume import CallAttempt, Resumption
from baton.client.types import Accepted, Chunk, Completion, Finished, TokenLogprobs
from baton.errors import CancelledError
from baton.rpc_errors import error_of
from baton.v1 import inference_pb2 as pb


class Call(Protocol):
    """Stream of events as `grpc` returns it."""

    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> object: ...


AsyncCall: TypeAlias = "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"
_AnyCall = TypeVar("_AnyCall")


class Calls(Generic[_AnyCall]):
    """Calls of one generation, one after the other. `open` begins one of them."""

    def __init__(
        self, resumption: Resumption, open_attempt: Callable[[CallAttempt], _AnyCall]
    ) -> None:
        self.after = resumption.next_attempt
        self.open = open_attempt


class Generation(Iterator[Chunk]):
    """Running generation: iterate over its chunks. Leaving its `with` block early cancels it.

    Chunks of several sequences are interleaved in any order.
    """

    def __init__(
        self, call: "Call", num_sequences: int = 1, calls: "Calls[Call] | None" = None
    ) -> None:
        """Takes `calls`, which replaces a lost call; None: the loss ends the generation."""
        self._call = call
        self._calls = calls
        self._cancelled = threading.Event()
        self._progress = Progress(num_sequences)

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

    def text(self) -> str:
        """Waits for the end and returns all text, including that of chunks already read. With
        several sequences, that of the first, which is the best if they are ranked."""
        self._drain()
        return self._progress.text_of(0)

    def token_ids(self) -> list[int]:
        """Waits for the end and returns all tokens, of the same sequence as `text`."""
        self._drain()
        return self._progress.token_ids_of(0)

    def texts(self) -> list[str]:
        """Waits for the end and returns the text of each sequence."""
        self._drain()
        return [completion.text for completion in self._progress.completions()]

    def completions(self) -> list[Completion]:
        """Waits for the end and returns each sequence."""
        self._drain()
        return self._progress.completions()

    def cancel(self) -> None:
        """Cancels it; reading on raises `CancelledError`. Idempotent, and harmless at the end."""
        self._cancelled.set()
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
            self._resume(error)

    def _resume(self, error: grpc.RpcError) -> None:
        """Resumes on another call, or raises the error that ended this one."""
        calls = None if self._cancelled.is_set() else self._calls
        attempt = None if calls is None else calls.after(error, self._progress)
        if calls is None or attempt is None:
            raise error_of(error) from error
        if self._cancelled.wait(attempt.pause):
            raise CancelledError("the generation was cancelled")
        self._call = calls.open(attempt)
        if self._cancelled.is_set():  # by another thread meanwhile
            self._call.cancel()


class AsyncGeneration(AsyncIterator[Chunk]):
    """Running generation: `async for` over its chunks, once.

    Leaving its `async with` block early cancels it, and so does cancelling a task that reads it.
    Chunks of several sequences are interleaved in any order.
    """

    def __init__(
        self, call: "AsyncCall", num_sequences: int = 1, calls: "Calls[AsyncCall] | None" = None
    ) -> None:
        """Takes `calls`, which replaces a lost call; None: the loss ends the generation."""
        self._call = call
        self._calls = calls
        self._cancelled = asyncio.Event()
        self._events = aiter(call)
        self._progress = Progress(num_sequences)

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

    async def wait_accepted(self) -> Accepted:
        """Waits for the router to admit the request."""
        while self._progress.accepted is None:
            await self._read_event()
        return self._progress.accepted

    async def text(self) -> str:
        """Waits for the end and returns all text, including that of chunks already read. With
        several sequences, that of the first, which is the best if they are ranked."""
        await self._drain()
        return self._progress.text_of(0)

    async def token_ids(self) -> list[int]:
        """Waits for the end and returns all tokens, of the same sequence as `text`."""
        await self._drain()
        return self._progress.token_ids_of(0)

    async def texts(self) -> list[str]:
        """Waits for the end and returns the text of each sequence."""
        await self._drain()
        return [completion.text for completion in self._progress.completions()]

    async def completions(self) -> list[Completion]:
        """Waits for the end and returns each sequence."""
        await self._drain()
        return self._progress.completions()

    def cancel(self) -> None:
        """Cancels it; reading on raises `CancelledError`. Idempotent, and harmless at the end."""
        self._cancelled.set()
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
            # Raised by grpc.aio when the call, not the task, was cancelled.
            raise self._progress.fail(CancelledError("the generation was cancelled")) from None
        except grpc.RpcError as error:
            await self._resume(error)

    async def _resume(self, error: grpc.RpcError) -> None:
        """Resumes on another call, or raises the error that ended this one."""
        calls = None if self._cancelled.is_set() else self._calls
        attempt = None if calls is None else calls.after(error, self._progress)
        if calls is None or attempt is None:
            raise self._progress.fail(error_of(error)) from error
        if await self._is_cancelled_within(attempt.pause):
            raise self._progress.fail(CancelledError("the generation was cancelled"))
        self._call = calls.open(attempt)
        self._events = aiter(self._call)

    async def _is_cancelled_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._cancelled.wait()
        except TimeoutError:
            return False
