"""One try at a request on two workers: their calls, from their admission to their end.

The decode worker is asked first; once it has admitted the request, the prefill worker is, unless
the decode worker computes the prompt itself: then there is one call. Both calls are read at once,
each by a task; the one that is left when the prompt is handed over is read by whoever takes the
events, message by message, for a task in between costs as much as all else that is done with one.
However the attempt ends, all its calls are cancelled, which makes the workers give back all they
hold; so there is no moment in which nobody owns the blocks. What they say after that is heard by
nobody. Knows nothing of the client, nor of other attempts.

A decode worker that drains hands the request over: it stops it and keeps its blocks, another one is
asked to go on from there, and until that one has them its call takes the place of the prefill's.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack, ExitStack
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
from baton_router.lifecycle import wire
from baton_router.lifecycle.prefix_lease import PrefixLease
from baton_router.lifecycle.return_cost import ReturnCost, return_cost
from baton_router.placement.placement import Placement
from baton_router.request import Work

logger = logging.getLogger(__name__)

Event = prefill_pb2.PrefillResponse | decode_pb2.DecodeGenerateResponse

# Messages read from the workers and not yet given to the client; beyond, the workers wait.
_MAX_UNREAD = 64

# Seconds after which a worker that does not hear that a sequence is over is told no more.
_END_SECONDS = 2.0

# Seconds that the end of a lease waits for the reason of it.
_SOURCE_PATIENCE = 1.0

# Seconds in which a worker says that it will hand a request over.
_HAND_OVER_SECONDS = 2.0


class _Reading(NamedTuple):
    """A call, and the task that reads it to its end."""

    call: Any
    task: "asyncio.Task[None]"


class Attempt:
    """Use: `async with`, `admit`, then `next_events`. `cancel` may be called at any time.

    Args:
        may_return: the decode worker may give the request back where it has to make room.

    Attributes:
        placement: the workers it runs on.
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
        self._source = self._prefill  # who has the blocks that the decode worker wants
        self._prefill_load = ExitStack()
        self._decode_load = ExitStack()
        self._prefix_lease: PrefixLease | None = None
        self._offers: dict[bytes, Member] = {}
        self._hashes: list[bytes] = []
        self._calls: list[Any] = []
        self._decode_request: decode_pb2.DecodeGenerateRequest | None = None
        self._giving: _Reading | None = None
        self._taking: _Reading | None = None
        self._last_call: Any = None  # the only one with something to say, if no task reads it
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
        """Where it runs now."""
        return self._decode.record.id

    def cancel(self) -> None:
        """Ends all calls at once, whether or not anybody is still reading."""
        for call in self._calls:
            call.cancel()

    async def admit(self) -> None:
        """Opens both calls and waits for their admissions. Raises `AttemptFailure`.

        Both workers' load is counted before anything is awaited, so that of requests that come at
        once each sees what those before it were given.

        The prefill worker is asked as soon as the decode worker has admitted, so that prompts are
        computed in the order of admission, lest two requests wait for each other's blocks.
        """
        work, lease_id = self._work, wire.new_lease_id()
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
            asked = wire.prefill_request(work, lease_id, self.placement.decode, source)
            timeout = self._deadline.forward()
            prefill_call = prefill_stub.Prefill(asked, timeout=timeout, metadata=outgoing())
            await self._open(self._prefill, prefill_call)
            self._giving = self._start(prefill_call, self._read_prefill(prefill_call))
        self._taking = self._start_taking(decode_call)

    async def hand_over(self, decode: str) -> None:
        """Has the decode worker stop the request for another one to go on with it. It says
        `suspended` when it has; if it does not, it goes on with it."""
        assert self._decode_request is not None, "a request that was not sent"
        lease_id = wire.new_lease_id()
        self._offers[lease_id] = self._fleet.member(decode)
        tenant = self._work.request.tenant.name
        request = wire.hand_over_request(self._decode_request, lease_id, decode, tenant)
        stub = decode_pb2_grpc.DecodeStub(self._channel_to(self._decode))
        try:
            await stub.HandOver(request, timeout=min(_HAND_OVER_SECONDS, self._deadline.forward()))
        except grpc.aio.AioRpcError as error:
            logger.info("%s does not hand over: %s", self.decode_worker, error_of(error))

    async def move(self, work: Work, lease_id: bytes) -> None:
        """The request has stopped, and goes on with `work` on the worker that it was stopped for,
        who fetches its blocks from where it was, under this lease. Raises `AttemptFailure`."""
        taker = self._offers.get(lease_id)
        if taker is None:
            error = InternalError("the decode worker has stopped the request for nobody")
            raise self._made(FailureKind.BROKEN, error, self._decode)
        if self._giving is not None:
            self._giving.task.cancel()  # who had the blocks before has no more to say
        if self._last_call is not None:
            self._read_in_task()
        self._giving, self._source = self._taking, self._decode
        self._work, self._decode = work, taker
        self._hashes = self._block_hashes()
        self._decode_load.close()
        logger.info("%s hands over to %s", self._source.record.id, self.decode_worker)
        self._taking = self._start_taking(await self._open_decode(lease_id))

    async def next_events(self) -> list[Event | AttemptFailure]:
        """What either worker says next, in the order in which it comes; a setback where one says no
        more. What gathers before the pace allows another message comes together."""
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
        """Has the decode worker end one of several sequences, if it hears of it; it would only go
        on in vain."""
        task = asyncio.create_task(self._end_sequence(index))
        self._stack.push_async_callback(_ended, task)

    async def _end_sequence(self, index: int) -> None:
        assert self._decode_request is not None, "a sequence of a request that was not sent"
        request = wire.end_sequence_request(self._decode_request, self._decode, index)
        stub = decode_pb2_grpc.DecodeStub(self._channel_to(self._decode))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.EndSequence(request, timeout=_END_SECONDS)

    def _note(self, event: Event) -> None:
        """Counts what it says of the workers: their load, what they hold, how long things take."""
        kind = event.WhichOneof("event")
        if isinstance(event, prefill_pb2.PrefillResponse):
            if kind == "started" and self._prefix_lease is not None:
                self._prefix_lease.end()  # the prefill worker has got the blocks, or it has not
            elif kind == "result":
                assert self._prefill is not None, "a result of nobody"
                self._prefill_load.close()
                self._fleet.note_held(self._prefill, self._hashes)
                self._prefill.model.worked(wire.work_done(event.result.work_done))
        elif kind == "kv_ready":
            self._fleet.note_held(self._decode, self._hashes)
            self._decode.model.worked(wire.work_done(event.kv_ready.work_done))
            self._decode.model.received(*wire.received(event.kv_ready, self._decode))
        elif kind == "prefill_started":
            self._decode.model.worked(wire.work_done(event.prefill_started.work_done))
        elif self._is_computing_alone:
            # The first tokens, or the end of those that are ranked: the prompt is computed.
            self._is_computing_alone = False
            self._prefill_load.close()
            self._fleet.note_held(self._decode, self._hashes)

    def succeed(self) -> None:
        """The request has got all it needed of its workers, and is no load any more."""
        self._prefill_load.close()
        self._decode_load.close()
        if self._prefill is not None:
            self._prefill.circuit.record_success()
        self._decode.circuit.record_success()

    def _channel_to(self, member: Member) -> grpc.aio.Channel:
        return self._stack.enter_context(self._fleet.channel_to(member))

    def _borrow(self) -> PrefixLease | None:
        """Asks for the beginning of the prompt where the placement says that it is to be had. One
        token at least is left to be computed, for what follows it."""
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
        """Asks the decode worker to go on behind what the source has under this lease; where there
        is no source, to compute it."""
        work = self._work
        self._decode_load.enter_context(
            self._decode.loaded(num_sequences=work.num_sequences, num_held_tokens=work.num_tokens)
        )
        handle = (
            None
            if self._source is None
            else wire.handle(self._source, lease_id, work, self._hashes)
        )
        cost = self._return_cost()
        request = self._decode_request = wire.decode_request(work, lease_id, handle, cost)
        stub = decode_pb2_grpc.DecodeStub(self._channel_to(self._decode))
        call = stub.Generate(request, timeout=self._deadline.forward(), metadata=outgoing())
        await self._open(self._decode, call)
        return call

    def _return_cost(self) -> ReturnCost | None:
        """None where the decode worker shall not give it back: of several sequences it can spare
        one and keep the others, and a prompt that it computed itself no prefill worker has
        cached."""
        if self._prefill is None or not self._may_return or self._work.params.num_sequences > 1:
            return None
        prefill, decode = (scored.candidate for scored in self.placement.chosen)
        return return_cost(prefill, decode, len(self._work.token_ids))

    async def _open(self, member: Member, call: Any) -> None:
        """Reads a worker's first message, which is `admitted`."""
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
        """Has a task read the last call again, while its events are not waited for."""
        call, self._last_call = self._last_call, None
        self._taking = self._start(call, self._read_decode(self._decode, call, None))

    async def _read_prefill(self, call: Any) -> None:
        """Passes the worker's messages on, and what ended them if it was an error."""
        assert self._prefill is not None, "a call to nobody"
        while (heard := await self._hear(self._prefill, call)) is not None:
            await self._events.put(heard)
            if isinstance(heard, AttemptFailure):
                return

    async def _read_decode(self, member: Member, call: Any, giving: "_Reading | None") -> None:
        """Passes the worker's messages on, and why they ended, unless it has handed over.

        That the lease it claims is over is news of the source, who tells it better: its prompt
        ended with its first token, or why it failed. So that one is heard first; and after a
        failure here nobody waits for its blocks any more.

        Ends before that where nobody else has anything to say, and the stream is slower than its
        pace, so that nothing gathers while the client is served.
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
        """What the last call says next, or why it says no more."""
        return await self._hear(self._decode, self._last_call) or self._incomplete()

    async def _hear(self, member: Member, call: Any) -> Event | AttemptFailure | None:
        """The next message, or what ended them; None: nothing went wrong."""
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
        """The decode worker has made room for others with the request, if that was open to it."""
        assert self._decode_request is not None, "given back by who was not asked"
        name = member.record.id
        if member is self._decode and self._decode_request.HasField("return_cost"):
            error: BatonError = OverloadedError(f"{name} had no room for the request any more")
            return self._made(FailureKind.PREEMPTED, error, member)
        return self._made(FailureKind.BROKEN, InternalError(f"{name} gave up the request"), member)

    def _failure(
        self, member: Member, error: grpc.aio.AioRpcError, kind: FailureKind
    ) -> AttemptFailure:
        """What a failed call means. The worker is lost where it was not it that has spoken, or
        where what it says is that it has failed. Nobody is where the deadline may have ended the
        call on the worker's side, which looks here as if the worker had gone."""
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
        """The call was cancelled on this side; raises on if it was this task."""
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
