"""The life of one request across two workers: opened, watched and ended in one place.

The decode worker is asked first; once it has admitted the request, the prefill worker is. Both
calls are read at once. However the request ends, both calls are cancelled, which makes both workers
give back all they hold; so there is no moment in which nobody owns the blocks.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any

import grpc

from baton.errors import (
    BatonError,
    CancelledError,
    DataLossError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from baton.rpc_errors import error_of
from baton.serving.deadline import Deadline
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.v1 import inference_pb2 as pb
from router import wire
from router.answer import Answer
from router.fleet import Fleet
from router.intake import Request
from router.model_card import ModelCard
from router.placement import Placement, place, why_none

# Messages read from the workers and not yet given to the client; beyond, the workers wait.
_MAX_UNREAD = 64

# Seconds that the end of a lease waits for the reason of it.
_SOURCE_PATIENCE = 1.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """What ended a call, or is to end the request."""

    error: BatonError
    of_prefill: bool = False


_Event = prefill_pb2.PrefillResponse | decode_pb2.DecodeGenerateResponse | _Failure


@dataclass(frozen=True, slots=True)
class _Opened:
    """A request that both workers have admitted. `prefill_load` is closed at the prefill's end."""

    placement: Placement
    prefill_call: Any
    prefill_load: ExitStack
    decode_call: Any


class _RefusalError(Exception):
    """A worker did not admit the request."""

    def __init__(self, worker: str, error: BatonError) -> None:
        super().__init__(f"{worker}: {error}")
        self.worker = worker
        self.error = error


class Saga:
    """One request. `run` is used once; `abort` may be called meanwhile."""

    def __init__(
        self, request: Request, fleet: Fleet, card: ModelCard, deadline: Deadline, arrived: float
    ) -> None:
        self.request = request
        self._fleet = fleet
        self._deadline = deadline
        self._answer = Answer(request, card, arrived)
        self._events: asyncio.Queue[_Event] = asyncio.Queue(_MAX_UNREAD)
        self._aborted = asyncio.Event()

    def abort(self) -> None:
        """Ends the request; `run` raises `CancelledError`."""
        self._aborted.set()

    async def run(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The events of the request, `accepted` to the last `finished`. Raises what ended it
        otherwise."""
        async with AsyncExitStack() as stack:
            opened = await self._open(stack)
            self._answer.admitted()
            self._prefill_load = opened.prefill_load
            self._start_readers(stack, opened)
            yield wire.accepted(self.request, opened.placement)
            while not self._answer.is_complete:
                for response in self._handle(await self._events.get()):
                    yield response

    # Opening.

    async def _open(self, stack: AsyncExitStack) -> _Opened:
        """Places the request and has both workers admit it, trying others where one refuses."""
        refusals: dict[str, BatonError] = {}
        while True:
            placement = self._place(refusals)
            attempt = await stack.enter_async_context(AsyncExitStack())
            try:
                return await self._admit(placement, attempt)
            except _RefusalError as refusal:
                await attempt.aclose()
                if not isinstance(refusal.error, OverloadedError | UnavailableError):
                    raise refusal.error from refusal
                refusals[refusal.worker] = refusal.error

    def _place(self, refusals: dict[str, BatonError]) -> Placement:
        """Raises the last refusal if it leaves nobody, else `UnavailableError`."""
        candidates = [
            c for c in self._fleet.candidates(self.request.token_ids) if c.worker not in refusals
        ]
        placement = place(self.request.request_id, len(self.request.token_ids), candidates)
        if placement is not None:
            return placement
        if refusals:
            raise list(refusals.values())[-1]
        raise UnavailableError(why_none(candidates))

    async def _admit(self, placement: Placement, stack: AsyncExitStack) -> _Opened:
        """Opens both calls and waits for their admissions.

        The prefill worker is asked as soon as the decode worker has admitted, so that prompts are
        computed in the order of admission, lest two requests wait for each other's blocks.
        """
        prefill = self._fleet.member(placement.prefill)
        decode = self._fleet.member(placement.decode)
        lease_id = wire.new_lease_id()
        hashes = self._fleet.block_hashes(prefill, self.request.token_ids)
        handle = wire.handle(prefill, lease_id, self.request, hashes)
        stack.enter_context(decode.loaded(num_sequences=self.request.params.num_sequences))
        decode_call = decode_pb2_grpc.DecodeStub(self._fleet.channel(decode)).Generate(
            wire.decode_request(self.request, handle), timeout=self._deadline.forward()
        )
        stack.callback(decode_call.cancel)
        await _admission(decode_call, placement.decode)
        prefill_load = stack.enter_context(ExitStack())
        prefill_load.enter_context(prefill.loaded(num_tokens=len(self.request.token_ids)))
        prefill_call = prefill_pb2_grpc.PrefillStub(self._fleet.channel(prefill)).Prefill(
            wire.prefill_request(self.request, lease_id, placement.decode),
            timeout=self._deadline.forward(),
        )
        stack.callback(prefill_call.cancel)
        await _admission(prefill_call, placement.prefill)
        return _Opened(placement, prefill_call, prefill_load, decode_call)

    def _start_readers(self, stack: AsyncExitStack, opened: _Opened) -> None:
        """Reads both workers, and the order to abort, from now on."""
        prefill_reader = asyncio.create_task(self._read(opened.prefill_call))
        decode_reader = asyncio.create_task(self._read(opened.decode_call, prefill_reader))
        abort_watcher = asyncio.create_task(self._watch_abort(opened))
        for task in (prefill_reader, decode_reader, abort_watcher):
            stack.push_async_callback(_ended, task)

    async def _read(self, call: Any, source: "asyncio.Task[None] | None" = None) -> None:
        """Passes one worker's messages on, and what ended them if it was an error.

        Args:
            source: reads the worker whose lease this one claims. That the lease is over is news of
                the other worker, who tells it better: its prompt ended with its first token, or why
                it failed. So it is heard first.
        """
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                await self._events.put(message)
            await call.code()
        except grpc.aio.AioRpcError as error:
            if source is not None and error.code() is grpc.StatusCode.NOT_FOUND:
                await asyncio.wait([source], timeout=_SOURCE_PATIENCE)
            await self._events.put(_Failure(error_of(error), of_prefill=source is None))

    async def _watch_abort(self, opened: _Opened) -> None:
        """Ends both calls at once, whether or not the client is still reading."""
        await self._aborted.wait()
        opened.prefill_call.cancel()
        opened.decode_call.cancel()
        await self._events.put(_Failure(self._abort_error()))

    def _abort_error(self) -> CancelledError:
        return CancelledError(f"request {self.request.request_id} was aborted")

    # Watching.

    def _handle(self, event: _Event) -> list[pb.GenerateResponse]:
        """Books one event; returns what the client is to see of it."""
        if isinstance(event, _Failure):
            if self._aborted.is_set():
                raise self._abort_error()
            if event.of_prefill and not self._answer.needs_prefill:
                return []
            raise _as_seen_by_client(event.error)
        if isinstance(event, decode_pb2.DecodeGenerateResponse):
            return self._answer.on_decode(event)
        if event.HasField("result"):
            self._prefill_load.close()
        return self._answer.on_prefill(event)


async def _admission(call: Any, worker: str) -> None:
    """Reads a worker's first message, which is `admitted`. Raises `_RefusalError`."""
    try:
        response = await call.read()
    except grpc.aio.AioRpcError as error:
        raise _RefusalError(worker, error_of(error)) from error
    assert response is not grpc.aio.EOF, "admitted, or an error"
    assert response.WhichOneof("event") == "admitted", "what comes first"


async def _ended(task: "asyncio.Task[None]") -> None:
    """Cancels a task and waits until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _as_seen_by_client(error: BatonError) -> BatonError:
    """A handoff that failed is no fault of the client's: another try may go well."""
    if isinstance(error, NotFoundError | DataLossError):
        return UnavailableError(f"the handoff failed: {error}")
    return error
