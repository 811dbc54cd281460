"""One attempt at a request: its calls to a prefill and a decode worker, from admission to end.

The decode worker is called first. Once it has admitted the request, the prefill worker is called,
unless the decode worker computes the prompt itself: then there is one call. Tasks read both calls
concurrently; after the handoff, the consumer of the events reads the remaining call itself, because
a task in between costs as much as all other work per message. However the attempt ends, all its
calls are cancelled, so that the workers release all they hold and blocks always have an owner;
later messages are ignored. Knows nothing of the client, nor of other attempts.

Live migration: a draining decode worker suspends the request and keeps its blocks; until another
one, called to resume it, has the blocks, the suspended call replaces the prefill call.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc

from baton.errors import (
    BatonError,
    DeadlineExceededError,
    InternalError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from baton.rpc_errors import error_of, has_ended, is_loss
from baton.serving.coalescer import Coalescer
from baton.serving.deadline import Deadline
from baton.serving.telemetry.propagation import outgoing
from baton.serving.telemetry.stages import stage
from baton.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from baton_router.failure import AttemptFailure, FailureKind
from baton_router.fleet.fleet import Fleet, Member
from baton_router.lifecycle import worker_wire
from baton_router.lifecycle.prefix_lease import PrefixLease
from baton_router.lifecycle.return_cost import ReturnCost, return_cost
from baton_router.placement.placement import Placement
from baton_router.request import Work

logger = logging.getLogger(__name__)

Event = prefill_pb2.PrefillResponse | decode_pb2.DecodeGenerateResponse

# Messages read from the workers and not yet consumed; a full queue is backpressure on the workers.
_MAX_UNREAD = 64

# Timeout of `Decode.EndSequence` in seconds; it is not retried.
_END_SECONDS = 2.0

# Seconds to wait for the source's reason after the decode worker found the lease ended.
_SOURCE_PATIENCE = 1.0

# Timeout of `Decode.HandOver` in seconds.
_HAND_OVER_SECONDS = 2.0


class _Reading(NamedTuple):
    """Call and the task that reads it to its end."""

    call: Any
    task: "asyncio.Task[None]"


class Attempt:
    """Attempt at a request. Use: `async with`, `admit`, `next_events`; `cancel` at any time.

    Args:
        may_return: the decode worker may give the request back if it preempts its sequence.

    Attributes:
        placement: the workers it runs on; a migration changes the decode worker.
    """

    def __init__(
        self,
        work: Work,
        fleet: Fleet,
        placement: Placement,
        deadline: Deadline,
        coalescer: Coalescer,
        *,
        may_return: bool = False,
    ) -> None:
        self.placement = placement
        self._may_return = may_return
        self._coalescer = coalescer
        self._work = work
        self._fleet = fleet
        self._deadline = deadline
        self._prefill = fleet.member(placement.prefill) if placement.prefill else None
        self._decode = fleet.member(placement.decode)
        self._source = self._prefill  # holds the blocks that the decode worker fetches
        self._prefill_load = ExitStack()
        self._decode_load = ExitStack()
        self._prefix_lease: PrefixLease | None = None
        self._offers: dict[bytes, Member] = {}
        self._hashes: list[bytes] = []
        self._calls: list[Any] = []
        self._decode_request: decode_pb2.DecodeGenerateRequest | None = None
        self._giving: _Reading | None = None
        self._taking: _Reading | None = None
        self._last_call: Any = None  # the only call left, if no task reads it
        self._is_computing_alone = self._prefill is None
        self._events: asyncio.Queue[Event | AttemptFailure] = asyncio.Queue(_MAX_UNREAD)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    @property
    def decode_worker(self) -> str:
        """Id of the decode worker that serves the request now."""
        return self._decode.record.id

    def cancel(self) -> None:
        """Cancels all calls immediately, even while they are being read."""
        for call in self._calls:
            call.cancel()

    async def admit(self) -> None:
        """Opens both calls and waits for their admissions. Raises `AttemptFailure`.

        Counts the load of both workers before the first await, so that each of several concurrent
        requests sees the load of those placed before it.

        Calls the prefill worker as soon as the decode worker has admitted, so that prompts are
        computed in the order of admission and no two requests wait for each other's blocks.
        """
        work, lease_id = self._work, worker_wire.new_lease_id()
        num_uncached = max(0, len(work.token_ids) - self.placement.num_cached_tokens)
        self._hashes = self._block_hashes()
        self._stack.enter_context(self._prefill_load)
        self._prefill_load.enter_context(
            self._decode.loaded(num_sequences=0, num_tokens=num_uncached)
            if self._prefill is None
            else self._prefill.loaded(num_tokens=num_uncached)
        )
        computing = self.placement.prefill or self.placement.decode
        self._prefill_load.enter_context(self._fleet.pending.pending(computing, self._hashes))
        self._stack.enter_context(self._decode_load)
        self._prefix_lease = self._borrow()
        decode_call = await self._open_decode(lease_id)
        if self._prefill is not None:
            source = None if self._prefix_lease is None else await self._prefix_lease.source()
            prefill_stub = prefill_pb2_grpc.PrefillStub(self._channel_to(self._prefill))
            asked = worker_wire.prefill_request(work, lease_id, self.placement.decode, source)
            timeout = self._deadline.forward()
            prefill_call = prefill_stub.Prefill(asked, timeout=timeout, metadata=outgoing())
            await self._open(self._prefill, prefill_call)
            self._giving = self._start(prefill_call, self._read_prefill(prefill_call))
        self._taking = self._start_taking(decode_call)

    async def hand_over(self, decode: str) -> None:
        """Asks the decode worker to suspend the request for the worker `decode` to resume. The
        worker answers with the event `suspended`; if it refuses, it continues with the request."""
        assert self._decode_request is not None, "a request that was not sent"
        lease_id = worker_wire.new_lease_id()
        self._offers[lease_id] = self._fleet.member(decode)
        tenant = self._work.request.tenant.name
        request = worker_wire.hand_over_request(self._decode_request, lease_id, decode, tenant)
        stub = decode_pb2_grpc.DecodeStub(self._channel_to(self._decode))
        try:
            await stub.HandOver(request, timeout=min(_HAND_OVER_SECONDS, self._deadline.forward()))
        except grpc.aio.AioRpcError as error:
            logger.info("no live migration from %s: %s", self.decode_worker, error_of(error))

    async def move(self, work: Work, lease_id: bytes) -> None:
        """Resumes the request with `work` on the worker that it was suspended for, which fetches
        the blocks under `lease_id` from the former worker. Raises `AttemptFailure`."""
        taker = self._offers.get(lease_id)
        if taker is None:
            error = InternalError(
                "the decode worker suspended the request under an unknown lease id"
            )
            raise self._made(FailureKind.BROKEN, error, self._decode)
        if self._giving is not None:
            self._giving.task.cancel()  # the former source sends nothing more
        if self._last_call is not None:
            self._read_in_task()
        self._giving, self._source = self._taking, self._decode
        self._work, self._decode = work, taker
        self.placement = replace(self.placement, decode=taker.record.id)
        self._hashes = self._block_hashes()
        self._decode_load.close()
        logger.info("live migration from %s to %s", self._source.record.id, self.decode_worker)
        self._taking = self._start_taking(await self._open_decode(lease_id))

    async def next_events(self) -> list[Event | AttemptFailure]:
        """Returns the next events of both workers in order of arrival, with a failure where a
        stream broke. Events that arrive within the coalescing window are returned together."""
        if self._last_call is not None and self._events.empty():
            gathered = [await self._hear_last()]
        else:
            gathered = [await self._events.get()]
        if self._coalescer.seconds:
            if self._last_call is not None and self._coalescer.wait > 0:
                self._read_in_task()
            await self._coalescer.turn()
            while not self._events.empty():
                gathered.append(self._events.get_nowait())
        for event in gathered:
            if not isinstance(event, AttemptFailure):
                self._note(event)
        return gathered

    def end_sequence(self, index: int) -> None:
        """Asks the decode worker, best effort, to end sequence `index` of several, whose further
        tokens are not needed."""
        task = asyncio.create_task(self._end_sequence(index))
        self._stack.push_async_callback(_ended, task)

    async def _end_sequence(self, index: int) -> None:
        assert self._decode_request is not None, "a sequence of a request that was not sent"
        request = worker_wire.end_sequence_request(self._decode_request, self._decode, index)
        stub = decode_pb2_grpc.DecodeStub(self._channel_to(self._decode))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.EndSequence(request, timeout=_END_SECONDS)

    def _note(self, event: Event) -> None:
        """Records what the event tells of the workers: load, cached blocks, latencies."""
        kind = event.WhichOneof("event")
        if isinstance(event, prefill_pb2.PrefillResponse):
            if kind == "started" and self._prefix_lease is not None:
                self._prefix_lease.end()  # its fetch is over, successful or not
            elif kind == "result":
                assert self._prefill is not None, "a result without a prefill worker"
                self._prefill_load.close()
                self._fleet.note_held(self._prefill, self._hashes)
                self._prefill.model.worked(worker_wire.work_done(event.result.work_done))
        elif kind == "kv_ready":
            self._fleet.note_held(self._decode, self._hashes)
            self._decode.model.worked(worker_wire.work_done(event.kv_ready.work_done))
            self._decode.model.received(*worker_wire.received(event.kv_ready, self._decode))
        elif kind == "prefill_started":
            self._decode.model.worked(worker_wire.work_done(event.prefill_started.work_done))
        elif self._is_computing_alone:
            # The first tokens, or the end of ranked sequences: the prompt is computed.
            self._is_computing_alone = False
            self._prefill_load.close()
            self._fleet.note_held(self._decode, self._hashes)

    def succeed(self) -> None:
        """Ends the load on both workers and records a success in their circuit breakers."""
        self._prefill_load.close()
        self._decode_load.close()
        if self._prefill is not None:
            self._prefill.circuit.record_success()
        self._decode.circuit.record_success()

    def _channel_to(self, member: Member) -> grpc.aio.Channel:
        return self._stack.enter_context(self._fleet.channel_to(member))

    def _borrow(self) -> PrefixLease | None:
        """Requests a prefix lease if the placement names a source for the prompt's beginning. At
        least one token is left to compute, for the token that follows it."""
        if not self.placement.source:
            return None
        holder, token_ids = self._fleet.member(self.placement.source), self._work.token_ids
        hashes = self._hashes[: (len(token_ids) - 1) // holder.record.block_size]
        tenant = self._work.request.tenant.name
        prefix_lease = PrefixLease(
            holder, self._channel_to(holder), hashes, self.placement.prefill, tenant
        )
        self._stack.callback(prefix_lease.end)
        return prefix_lease

    def _block_hashes(self) -> list[bytes]:
        salt = self._work.request.tenant.salt
        return self._fleet.block_hashes(self._decode, self._work.token_ids, salt)

    async def _open_decode(self, lease_id: bytes) -> Any:
        """Calls the decode worker to resume after the tokens that the source holds under
        `lease_id`; without a source, to compute the prompt itself."""
        work = self._work
        self._decode_load.enter_context(
            self._decode.loaded(num_sequences=work.num_sequences, num_held_tokens=work.num_tokens)
        )
        handle = (
            None
            if self._source is None
            else worker_wire.handle(self._source, lease_id, work, self._hashes)
        )
        cost = self._return_cost()
        request = self._decode_request = worker_wire.decode_request(work, lease_id, handle, cost)
        stub = decode_pb2_grpc.DecodeStub(self._channel_to(self._decode))
        call = stub.Generate(request, timeout=self._deadline.forward(), metadata=outgoing())
        await self._open(self._decode, call)
        return call

    def _return_cost(self) -> ReturnCost | None:
        """Returns None if the decode worker shall not give the request back: of several sequences
        it can preempt one and keep the others, and a prompt that it computed itself is cached on no
        prefill worker."""
        if self._prefill is None or not self._may_return or self._work.params.num_sequences > 1:
            return None
        prefill, decode = (scored.candidate for scored in self.placement.chosen)
        return return_cost(prefill, decode, len(self._work.token_ids))

    async def _open(self, member: Member, call: Any) -> None:
        """Reads a worker's first message, which is `admitted`. Raises `AttemptFailure`."""
        self._calls.append(call)
        self._stack.callback(call.cancel)
        try:
            with stage("admit", {"baton.worker": member.record.id}):
                response = await call.read()
        except grpc.aio.AioRpcError as error:
            raise self._failure(member, error, FailureKind.REFUSED) from error
        except asyncio.CancelledError:
            raise self._cut(member) from None
        assert response is not grpc.aio.EOF, "admitted, or an error"
        assert response.WhichOneof("event") == "admitted", "what comes first"

    def _start(self, call: Any, reading: Coroutine[Any, Any, None]) -> "_Reading":
        task = asyncio.create_task(reading)
        self._stack.push_async_callback(_ended, task)
        return _Reading(call, task)

    def _start_taking(self, call: Any) -> "_Reading":
        self._last_call = None
        return self._start(call, self._read_decode(self._decode, call, self._giving))

    def _read_in_task(self) -> None:
        """Starts a task that reads the last call while its events are not awaited."""
        call, self._last_call = self._last_call, None
        self._taking = self._start(call, self._read_decode(self._decode, call, None))

    async def _read_prefill(self, call: Any) -> None:
        """Queues the prefill worker's messages, and the failure that ended them, if any."""
        assert self._prefill is not None, "a prefill call without a prefill worker"
        while (heard := await self._hear(self._prefill, call)) is not None:
            await self._events.put(heard)
            if isinstance(heard, AttemptFailure):
                return

    async def _read_decode(self, member: Member, call: Any, giving: "_Reading | None") -> None:
        """Queues the decode worker's messages and their failure, unless the request migrated.

        If the lease that it claims has ended, the source knows the reason: the prompt ended with
        its first token, or the source failed. So the source's events come first; and after a
        failure here no worker waits for the source's blocks any more, so its call is cancelled.

        Returns early once this is the only call left and its stream is slower than the coalescing
        window, so that no events accumulate while the client is served.
        """
        while not isinstance(heard := await self._hear(member, call), AttemptFailure | None):
            await self._events.put(heard)
            is_last = giving is None or giving.task.done()
            if is_last and member is self._decode and self._coalescer.wait <= 0:
                self._last_call = call
                return
        if heard is None:
            if member is not self._decode:
                return
            if giving is not None:
                await asyncio.wait([giving.task])
            heard = self._incomplete()
        elif isinstance(heard.error, NotFoundError) and giving is not None:
            await asyncio.wait([giving.task], timeout=_SOURCE_PATIENCE)
        if giving is not None:
            giving.call.cancel()
        await self._events.put(heard)

    async def _hear_last(self) -> Event | AttemptFailure:
        """Returns the next message of the last call, or the failure that ended it."""
        return await self._hear(self._decode, self._last_call) or self._incomplete()

    async def _hear(self, member: Member, call: Any) -> Event | AttemptFailure | None:
        """Returns the next message, or the failure that ended the stream; None after status OK."""
        try:
            message: Any = await call.read()
            if message is not grpc.aio.EOF:
                is_end = message.WhichOneof("event") == "preempted"
                return self._given_back(member) if is_end else message
            await call.code()
        except grpc.aio.AioRpcError as error:
            return self._failure(member, error, FailureKind.BROKEN)
        except asyncio.CancelledError:
            return self._cut(member)
        return None

    def _incomplete(self) -> AttemptFailure:
        error = InternalError("the decode worker ended its answer before it was complete")
        return self._made(FailureKind.BROKEN, error, self._decode)

    def _given_back(self, member: Member) -> AttemptFailure:
        """Returns the failure for a request given back; `BROKEN` if that was not permitted."""
        assert self._decode_request is not None, "given back by who was not asked"
        name = member.record.id
        if member is self._decode and self._decode_request.HasField("return_cost"):
            error: BatonError = OverloadedError(f"{name} had no room for the request any more")
            return self._made(FailureKind.PREEMPTED, error, member)
        return self._made(FailureKind.BROKEN, InternalError(f"{name} gave up the request"), member)

    def _failure(
        self, member: Member, error: grpc.aio.AioRpcError, kind: FailureKind
    ) -> AttemptFailure:
        """Classifies a failed call. The worker is lost if the error is not its own (`is_loss`) or
        says that it has failed internally. It is not lost if the deadline may have ended the call
        on the worker's side, which looks like a lost worker from here."""
        cause = error_of(error)
        if self._deadline.may_have_ended():
            cause = DeadlineExceededError("the request's deadline has passed")
        elif is_loss(error):
            kind = FailureKind.LOST if has_ended(error) else FailureKind.SILENT
            cause = UnavailableError(f"{member.record.id} is lost: {cause}")
            self._fleet.report_loss(member)
        elif isinstance(cause, InternalError):
            kind = FailureKind.LOST
            self._fleet.report_failure(member)
        return self._made(kind, cause, member)

    def _cut(self, member: Member) -> AttemptFailure:
        """Returns the failure of a call cancelled here; raises if this task was cancelled."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        error = UnavailableError(f"the call to {member.record.id} was cancelled")
        return self._made(FailureKind.BROKEN, error, member)

    def _made(self, kind: FailureKind, error: BatonError, member: Member) -> AttemptFailure:
        pair = ("" if self._source is None else self._source.record.id, self.decode_worker)
        return AttemptFailure(kind, error, member.record.id, pair)


async def _ended(task: "asyncio.Task[None]") -> None:
    """Cancels a task and waits until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
