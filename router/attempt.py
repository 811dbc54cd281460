"""One try at a request on two workers: two calls, from their admission to their end.

The decode worker is asked first; once it has admitted the request, the prefill worker is, unless
the decode worker computes the prompt itself: then there is one call. Both calls are read at once.
However the attempt ends, both calls are cancelled, which makes both workers give back all they
hold; so there is no moment in which nobody owns the blocks. What either says after that is heard by
nobody. Knows nothing of the client, nor of other attempts.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, ExitStack
from types import TracebackType
from typing import Any, Self

import grpc

from baton.errors import (
    BatonError,
    DeadlineExceededError,
    InternalError,
    NotFoundError,
    UnavailableError,
)
from baton.rpc_errors import error_of, is_loss
from baton.serving.deadline import Deadline
from baton.serving.pace import Pace
from baton.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    kv_transfer_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)
from router import wire
from router.fleet import Fleet, Member
from router.placement import Placement
from router.recovery import Setback, SetbackKind
from router.work import Work

Event = prefill_pb2.PrefillResponse | decode_pb2.DecodeGenerateResponse

# Messages read from the workers and not yet given to the client; beyond, the workers wait.
_MAX_UNREAD = 64

# Seconds after which a worker that does not hear that a sequence is over is told no more.
_END_SECONDS = 2.0

# Seconds that the end of a lease waits for the reason of it.
_SOURCE_PATIENCE = 1.0


class Attempt:
    """Use: `async with`, `admit`, then `events`. `cancel` may be called at any time.

    Attributes:
        placement: the workers it runs on.
    """

    def __init__(
        self, work: Work, fleet: Fleet, placement: Placement, deadline: Deadline, pace: Pace
    ) -> None:
        self.placement = placement
        self._pace = pace
        self._work = work
        self._fleet = fleet
        self._deadline = deadline
        self._prefill = fleet.member(placement.prefill) if placement.prefill else None
        self._decode = fleet.member(placement.decode)
        self._prefill_load = ExitStack()
        self._hashes: list[bytes] = []
        self._calls: list[Any] = []
        self._decode_request: decode_pb2.DecodeGenerateRequest | None = None
        self._events: asyncio.Queue[Event | Setback] = asyncio.Queue(_MAX_UNREAD)
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

    def cancel(self) -> None:
        """Ends both calls at once, whether or not anybody is still reading."""
        for call in self._calls:
            call.cancel()

    async def admit(self) -> None:
        """Opens both calls and waits for their admissions. Raises `Setback`.

        Both workers' load is counted before anything is awaited, so that of requests that come at
        once each sees what those before it were given.

        The prefill worker is asked as soon as the decode worker has admitted, so that prompts are
        computed in the order of admission, lest two requests wait for each other's blocks.
        """
        work, lease_id = self._work, wire.new_lease_id()
        salt = work.request.tenant.salt
        self._hashes = self._fleet.block_hashes(self._decode, work.token_ids, salt)
        num_sequences = work.params.num_sequences
        num_tokens = len(work.token_ids)
        num_uncached = max(0, num_tokens - self.placement.num_cached_tokens)
        self._stack.enter_context(self._prefill_load)
        self._prefill_load.enter_context(
            self._decode.loaded(num_sequences=0, num_tokens=num_uncached)
            if self._prefill is None
            else self._prefill.loaded(num_tokens=num_uncached)
        )
        computing = self.placement.prefill or self.placement.decode
        self._prefill_load.enter_context(self._fleet.pending.pending(computing, self._hashes))
        self._stack.enter_context(
            self._decode.loaded(num_sequences=num_sequences, num_held_tokens=num_tokens)
        )
        decode_stub = decode_pb2_grpc.DecodeStub(self._channel_to(self._decode))
        handle = self._handle(lease_id)
        request = self._decode_request = wire.decode_request(work, lease_id, handle)
        await self._open(
            self._decode, decode_stub.Generate(request, timeout=self._deadline.forward())
        )
        if self._prefill is not None:
            prefill_stub = prefill_pb2_grpc.PrefillStub(self._channel_to(self._prefill))
            asked = wire.prefill_request(work, lease_id, self.placement.decode)
            await self._open(
                self._prefill, prefill_stub.Prefill(asked, timeout=self._deadline.forward())
            )
        self._start_readers()

    def _handle(self, lease_id: bytes) -> kv_transfer_pb2.KvHandle | None:
        """What the decode worker claims the blocks with; None: it computes them."""
        if self._prefill is None:
            return None
        return wire.handle(self._prefill, lease_id, self._work, self._hashes)

    async def events(self) -> AsyncGenerator[list[Event | Setback], None]:
        """What either worker says, in the order in which it comes, without end; a setback where one
        says no more. What gathers before the pace allows another message comes together."""
        while True:
            gathered = [await self._events.get()]
            if self._pace.seconds:
                await self._pace.turn()
                while not self._events.empty():
                    gathered.append(self._events.get_nowait())
            for event in gathered:
                self._note(event)
                self._learn(event)
            yield gathered

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

    def _note(self, event: Event | Setback) -> None:
        """Counts what it says of the workers: their load, and what they hold."""
        if isinstance(event, prefill_pb2.PrefillResponse):
            if event.HasField("result"):
                assert self._prefill is not None, "a result of nobody"
                self._prefill_load.close()
                self._fleet.note_held(self._prefill, self._hashes)
        elif isinstance(event, decode_pb2.DecodeGenerateResponse):
            if event.HasField("kv_ready"):
                self._fleet.note_held(self._decode, self._hashes)
            elif self._prefill is None and not event.HasField("prefill_started"):
                # The first tokens, or the end of those that are ranked: the prompt is computed.
                self._prefill_load.close()
                held, self._hashes = self._hashes, []
                if held:
                    self._fleet.note_held(self._decode, held)

    def _learn(self, event: Event | Setback) -> None:
        """Has the models of the workers learn from what they report."""
        if isinstance(event, prefill_pb2.PrefillResponse):
            if event.HasField("result") and self._prefill is not None:
                self._prefill.model.worked(wire.work_done(event.result.work_done))
        elif isinstance(event, decode_pb2.DecodeGenerateResponse):
            if event.HasField("prefill_started"):
                self._decode.model.worked(wire.work_done(event.prefill_started.work_done))
            elif event.HasField("kv_ready"):
                self._decode.model.worked(wire.work_done(event.kv_ready.work_done))
                self._decode.model.received(*wire.received(event.kv_ready, self._decode))

    def succeed(self) -> None:
        """The request has got all it needed of its workers."""
        if self._prefill is not None:
            self._prefill.circuit.succeed()
        self._decode.circuit.succeed()

    def _channel_to(self, member: Member) -> grpc.aio.Channel:
        return self._stack.enter_context(self._fleet.channel_to(member))

    async def _open(self, member: Member, call: Any) -> None:
        """Reads a worker's first message, which is `admitted`."""
        self._calls.append(call)
        self._stack.callback(call.cancel)
        try:
            response = await call.read()
        except grpc.aio.AioRpcError as error:
            raise self._setback(member, error, SetbackKind.REFUSED) from error
        except asyncio.CancelledError:
            raise self._cut(member) from None
        assert response is not grpc.aio.EOF, "admitted, or an error"
        assert response.WhichOneof("event") == "admitted", "what comes first"

    def _start_readers(self) -> None:
        decode_call, *prefill_calls = self._calls
        sources = [asyncio.create_task(self._read_prefill(call)) for call in prefill_calls]
        decode_reader = asyncio.create_task(self._read_decode(decode_call, sources))
        for task in (*sources, decode_reader):
            self._stack.push_async_callback(_ended, task)

    async def _read_prefill(self, call: Any) -> None:
        """Passes the worker's messages on, and what ended them if it was an error."""
        assert self._prefill is not None, "a call to nobody"
        setback = await self._read(self._prefill, call)
        if setback is not None:
            await self._events.put(setback)

    async def _read_decode(self, call: Any, sources: "list[asyncio.Task[None]]") -> None:
        """Passes the worker's messages on, and why they ended.

        That the lease it claims is over is news of the prefill worker, who tells it better: its
        prompt ended with its first token, or why it failed. So that one is heard first; and after a
        failure here nobody waits for its blocks any more.
        """
        setback = await self._read(self._decode, call)
        if setback is None:
            if sources:
                await asyncio.wait(sources)
            error = InternalError("the decode worker ended its answer before it was complete")
            setback = self._made(SetbackKind.BROKEN, error, self._decode)
        elif isinstance(setback.error, NotFoundError) and sources:
            await asyncio.wait(sources, timeout=_SOURCE_PATIENCE)
        for source_call in self._calls[1:]:
            source_call.cancel()
        await self._events.put(setback)

    async def _read(self, member: Member, call: Any) -> Setback | None:
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                await self._events.put(message)
            await call.code()
        except grpc.aio.AioRpcError as error:
            return self._setback(member, error, SetbackKind.BROKEN)
        except asyncio.CancelledError:
            return self._cut(member)
        return None

    def _setback(self, member: Member, error: grpc.aio.AioRpcError, kind: SetbackKind) -> Setback:
        """What a failed call means. The worker is lost where it was not it that has spoken, or
        where what it says is that it has failed. Nobody is where the deadline may have ended the
        call on the worker's side, which looks here as if the worker had gone."""
        cause = error_of(error)
        if self._deadline.may_have_ended():
            cause = DeadlineExceededError("the request's deadline has passed")
        elif is_loss(error):
            kind, cause = SetbackKind.LOST, UnavailableError(f"{member.record.id} is lost: {cause}")
            self._fleet.report_loss(member)
        elif isinstance(cause, InternalError):
            kind = SetbackKind.LOST
            self._fleet.report_failure(member)
        return self._made(kind, cause, member)

    def _cut(self, member: Member) -> Setback:
        """The call was cancelled on this side; raises on if it was this task."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        error = UnavailableError(f"the call to {member.record.id} was cancelled")
        return self._made(SetbackKind.BROKEN, error, member)

    def _made(self, kind: SetbackKind, error: BatonError, member: Member) -> Setback:
        pair = (self.placement.prefill, self.placement.decode)
        return Setback(kind, error, member.record.id, pair)


async def _ended(task: "asyncio.Task[None]") -> None:
    """Cancels a task and waits until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
