"""A running generation, to iterate over or to await: the stream behind `Client.generate`."""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

import grpc

from baton.client_types import Accepted, Chunk, Completion, Finished, TokenLogprobs
from baton.client_wire import accepted_of, chunk_of, finished_of, prompt_logprobs_of
from baton.errors import BatonError, CancelledError, InternalError
from baton.rpc_errors import error_of
from baton.v1 import inference_pb2 as pb


class Generation(Iterator[Chunk]):
    """A running generation: iterate over its chunks. Leaving its `with` block early cancels it.

    Where several sequences were asked for, their chunks come in any mixture.
    """

    def __init__(self, call: "_Call", num_sequences: int = 1) -> None:
        self._call = call
        self._progress = _Progress(num_sequences)

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
        """How it ended; None until the last chunk has been read. Of several sequences, how the one
        that ended last did: its usage and timings are the whole request's."""
        return self._progress.finished

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Of the prompt's tokens from the second one on, if asked for: all of them once the first
        chunk has been read."""
        return self._progress.prompt_logprobs

    def text(self) -> str:
        """Waits for the end and returns all text, that of chunks already read included. Of several
        sequences, that of the first; it is the best where they were ranked."""
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
    Where several sequences were asked for, their chunks come in any mixture.
    """

    def __init__(
        self,
        call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]",
        num_sequences: int = 1,
    ) -> None:
        self._call = call
        self._events = aiter(call)
        self._progress = _Progress(num_sequences)

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
        """How it ended; None until the last chunk has been read. Of several sequences, how the one
        that ended last did: its usage and timings are the whole request's."""
        return self._progress.finished

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Of the prompt's tokens from the second one on, if asked for: all of them once the first
        chunk has been read."""
        return self._progress.prompt_logprobs

    async def wait_accepted(self) -> Accepted:
        """Waits for the router to admit the request."""
        while self._progress.accepted is None:
            await self._read_event()
        return self._progress.accepted

    async def text(self) -> str:
        """Waits for the end and returns all text, that of chunks already read included. Of several
        sequences, that of the first; it is the best where they were ranked."""
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


@dataclass(slots=True)
class _SequenceProgress:
    """What the chunks of one sequence have added up to."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Mapping[int, float]] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, chunk: Chunk) -> None:
        self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.top_logprobs.extend(chunk.top_logprobs)

    def completion(self) -> Completion:
        assert self.finished is not None, "a stream that was not complete"
        return Completion(
            "".join(self.texts),
            tuple(self.token_ids),
            tuple(self.logprobs),
            tuple(self.top_logprobs),
            self.finished,
        )


class _Progress:
    """What the events of one stream have added up to. Waits for nothing."""

    def __init__(self, num_sequences: int) -> None:
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.unread: deque[Chunk] = deque()
        self._num_unfinished = num_sequences
        self._sequences: defaultdict[int, _SequenceProgress] = defaultdict(_SequenceProgress)
        self._failure: BatonError | None = None

    def add(self, event: pb.GenerateResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self.accepted = accepted_of(event.accepted)
        elif self.accepted is None:
            raise InternalError(f"the stream began with {kind}, not with accepted")
        elif kind == "prompt_logprobs":
            self.prompt_logprobs += prompt_logprobs_of(event.prompt_logprobs)
        elif kind == "tokens":
            chunk = chunk_of(event.tokens)
            self.unread.append(chunk)
            self._sequences[chunk.sequence_index].add(chunk)
        elif kind == "finished":
            self._finish(finished_of(event.finished))

    def text_of(self, index: int) -> str:
        return "".join(self._sequences[index].texts)

    def token_ids_of(self, index: int) -> list[int]:
        return list(self._sequences[index].token_ids)

    def completions(self) -> list[Completion]:
        """The sequences in the order of their indices. Valid once the stream was complete."""
        return [self._sequences[index].completion() for index in sorted(self._sequences)]

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

    def _finish(self, finished: Finished) -> None:
        self._sequences[finished.sequence_index].finished = finished
        self._num_unfinished -= 1
        if self._num_unfinished == 0:
            self.finished = finished


class _Call(Protocol):
    """A stream of events as `grpc` gives it."""

    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> object: ...
