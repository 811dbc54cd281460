"""One attempt at a request: its calls to a prefill and a decode worker, from admission to end.

The decode worker is called first. Once it has admitted the request, the prefill worker is called,
unless the decode worker computes the prompt itself: then there is one call. The consumer of the
messages applies them to the table of `baton_router.lifecycle.attempts.attempt_machine`, which says
what follows. Tasks read both calls ahead, so that the next message arrives while the client is sent
the last one. However the attempt ends, all its calls are cancelled, so that the workers release all
they hold and blocks always have an owner. Knows nothing of the client, nor of other attempts.

Other workers may lend a prefix of the prompt (`baton_router.lifecycle.attempts.prefix_lease`) and
encode its images (`baton_router.lifecycle.attempts.encoder_lease`). Both only save time: no attempt
fails for them.

Live migration: a draining decode worker suspends the request and keeps its blocks; until another
one, called to resume it, has the blocks, the suspended call replaces the prefill call.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from typing import Any, Self

import grpc

from baton.errors import InternalError
from baton.rpc.errors import error_of
from baton.serving.deadline import Deadline
from baton.serving.grpc.coalescer import Coalescer
from baton_router.call.ending import FinishReason
from baton_router.call.failure import AttemptFailure, FailureKind
from baton_router.call.output_delta import OutputDelta
from baton_router.call.request import Work
from baton_router.call.usage import EncodedInput
from baton_router.lifecycle import worker_wire
from baton_router.lifecycle.attempts import worker_methods
from baton_router.lifecycle.attempts.attempt_machine import (
    END_ACTIONS,
    TABLE,
    AttemptAction,
    AttemptEvent,
    AttemptState,
    DecodeEvent,
    RouterEvent,
    SourceEvent,
)
from baton_router.lifecycle.attempts.encoder_lease import EncoderLeases
from baton_router.lifecycle.attempts.inbox import Inbox
from baton_router.lifecycle.attempts.prefix_lease import PrefixLease
from baton_router.lifecycle.attempts.return_cost import ReturnCost, return_cost
from baton_router.lifecycle.attempts.work_bounds import MAX_MESSAGE_TOKENS, WorkBounds
from baton_router.lifecycle.attempts.worker_call import WorkerCall, learn
from baton_router.lifecycle.attempts.worker_methods import Method
from baton_router.lifecycle.worker_events import Received, Report
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.fleet.member import Member
from baton_router.routing.placement.placement import Placement

logger = logging.getLogger(__name__)

# Messages read from the workers and not yet consumed; a full queue is backpressure on the workers.
_MAX_UNREAD = 64

# Timeout of `Decode.EndSequence` in seconds; it is not retried.
_END_SECONDS = 2.0

# Seconds to wait for the source's reason after the decode worker found the lease ended.
SOURCE_TIMEOUT = 1.0

# Timeout of `Decode.HandOver` in seconds.
_HAND_OVER_SECONDS = 2.0

_SOURCE_EVENTS = {event.value: event for event in SourceEvent} | {"lease_ended": SourceEvent.FAILED}
_DECODE_EVENTS = {event.value: event for event in DecodeEvent}


class Attempt:
    """Attempt at a request. Use: `async with`, `admit`, `next_events`; `cancel` at any time.

    Args:
        bounds: of what the workers may send.
        may_return: the decode worker may give the request back if it preempts its sequence.
        first_token_due: when the first token is due; None: at any time.
        on_encoded: is called with where each encoder input was encoded that no worker had cached
            for this attempt.
        source_timeout: seconds to wait for the source's reason after its lease has ended.

    Attributes:
        placement: the workers it runs on; a migration changes the decode worker.
    """

    def __init__(
        self,
        work: Work,
        fleet: Fleet,
        placement: Placement,
        bounds: WorkBounds,
        deadline: Deadline,
        coalescer: Coalescer,
        *,
        may_return: bool = False,
        first_token_due: Deadline | None = None,
        on_encoded: Callable[[EncodedInput], None] = lambda _: None,
        source_timeout: float = SOURCE_TIMEOUT,
    ) -> None:
        self.placement = placement
        self._source_timeout = source_timeout
        self._bounds = bounds
        self._may_return = may_return
        self._first_token_due = first_token_due
        self._on_encoded = on_encoded
        self._coalescer = coalescer
        self._work = work
        self._fleet = fleet
        self._deadline = deadline
        self._state = AttemptState.CALLING
        self._prefill = fleet.member(placement.prefill) if placement.prefill else None
        self._source = self._call_to(self._prefill) if self._prefill else None
        self._decode = self._call_to(fleet.member(placement.decode))
        self._ended_by = {action: ExitStack() for action in END_ACTIONS}
        self._offers: dict[bytes, Member] = {}
        self._hashes: list[bytes] = []
        self._decode_request: worker_wire.DecodeRequest | None = None
        self._held: Any = None
        self._failure: AttemptFailure | None = None
        self._inbox: Inbox[tuple[WorkerCall, str, Any]] = Inbox(_MAX_UNREAD)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._apply(RouterEvent.CLOSED)
        await self._stack.aclose()
        # A failure's traceback refers to this attempt. That cycle would keep the calls, and with
        # them connections to workers that are gone, until a garbage collection.
        self._failure = self._held = None

    @property
    def decode_worker(self) -> str:
        """Id of the decode worker that serves the request now."""
        return self._decode.member.record.id

    def cancel(self) -> None:
        """Cancels the calls to both workers immediately, even while they are being read."""
        self._cancel_source()
        self._decode.cancel()

    async def admit(self) -> None:
        """Opens both calls and waits for their admissions. Raises `AttemptFailure`.

        Counts the load of all workers before the first await, so that each of several concurrent
        requests sees the load of those placed before it.

        Calls the prefill worker as soon as the decode worker has admitted, so that prompts are
        computed in the order of admission and no two requests wait for each other's blocks.
        """
        lease_id, computing = worker_wire.new_lease_id(), self._prefill or self._decode.member
        num_uncached = max(0, len(self._work.token_ids) - self.placement.num_cached_tokens)
        self._hashes = self._block_hashes()
        num_sequences = 0 if self._prefill is None else 1
        load = self._ended_by[AttemptAction.END_PREFILL_LOAD]
        load.enter_context(computing.loaded(num_sequences=num_sequences, num_tokens=num_uncached))
        load.enter_context(self._fleet.pending.pending(computing.record.id, self._hashes))
        prefix_lease, encoder_leases = self._request_prefix_lease(), self._encoder_leases(computing)
        if self._source is None:
            await self._open_decode(lease_id, self._opened(encoder_leases))
            self._apply(RouterEvent.ADMITTED_ALONE)
            self._read_ahead(self._decode)
            return
        await self._open_decode(lease_id)
        due, encoder_sources = self._first_token_due, self._opened(encoder_leases)
        prefix = None if prefix_lease is None else await prefix_lease.source()
        request = worker_wire.prefill_request(
            self._work, lease_id, self.decode_worker, prefix, due, encoder_sources
        )
        called = worker_methods.prefill(
            self._channel_to(self._source.member),
            request,
            self._work,
            self._bounds.max_message_bytes,
        )
        await self._open(self._source, "admit.prefill", called)
        is_scored = self._work.params.prompt_logprobs is not None
        self._apply(RouterEvent.ADMITTED_TO_SCORE if is_scored else RouterEvent.ADMITTED)
        self._read_ahead(self._source)
        self._read_ahead(self._decode)

    async def hand_over(self, decode: str) -> None:
        """Asks the decode worker to suspend the request for the worker `decode` to resume. The
        worker answers with the event `suspended`; if it refuses, it continues with the request."""
        self._raise_if_failed()
        assert self._decode_request is not None, "a request that was not sent"
        lease_id = worker_wire.new_lease_id()
        self._offers[lease_id] = self._fleet.member(decode)
        tenant = self._work.request.tenant.name
        channel, timeout = self._channel_to(self._decode.member), self._deadline.forward()
        asked = self._decode_request, lease_id, decode, tenant, min(_HAND_OVER_SECONDS, timeout)
        try:
            await worker_methods.hand_over(channel, *asked)
        except grpc.aio.AioRpcError as error:
            logger.info("no live migration from %s: %s", self.decode_worker, error_of(error))

    async def move(self, work: Work, lease_id: bytes) -> None:
        """Resumes the request with `work` on the worker that it was suspended for, which fetches
        the blocks under `lease_id` from the former worker. Raises `AttemptFailure`."""
        if lease_id not in self._offers or (self._state, RouterEvent.MIGRATED) not in TABLE:
            error = InternalError(
                "the decode worker suspended the request under an unknown lease id"
            )
            failure = AttemptFailure(FailureKind.BROKEN, error, self.decode_worker)
            self._apply(DecodeEvent.FAILED, received=failure)
        self._raise_if_failed()
        self._apply(RouterEvent.MIGRATED)
        self._source, self._decode = self._decode, self._call_to(self._offers[lease_id])
        self._work, self.placement = work, replace(self.placement, decode=self.decode_worker)
        self._hashes = self._block_hashes()
        logger.info(
            "live migration from %s to %s", self._source.member.record.id, self.decode_worker
        )
        await self._open_decode(lease_id)
        self._apply(RouterEvent.ADMITTED)
        self._read_ahead(self._decode)

    async def next_events(self) -> list[Received]:
        """Returns the next events of both workers in order of arrival, those that arrive within
        the coalescing window together. Raises `AttemptFailure` after the last one."""
        events: list[Received] = []
        while not events:
            self._raise_if_failed()
            if not self._inbox:
                await self._inbox.arrival()
            events = self._react(*self._inbox.take())
        if self._coalescer.seconds:
            await self._coalescer.acquire()
            while self._inbox and _num_tokens(events) < MAX_MESSAGE_TOKENS:
                events += self._react(*self._inbox.take())
        return events

    def end_sequence(self, index: int, reason: FinishReason) -> None:
        """Asks the decode worker, best effort, to end sequence `index` of several, whose further
        tokens are not needed for this `reason`."""
        task = asyncio.create_task(self._end_sequence(index, reason))
        self._stack.push_async_callback(_ended, task)

    async def _end_sequence(self, index: int, reason: FinishReason) -> None:
        assert self._decode_request is not None, "a sequence of a request that was not sent"
        member = self._decode.member
        request = worker_wire.end_sequence_request(self._decode_request, member, index, reason)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await worker_methods.end_sequence(self._channel_to(member), request, _END_SECONDS)

    def succeed(self) -> None:
        """Ends the load on both workers and records a success in their circuit breakers."""
        self._apply(RouterEvent.COMPLETED)
        if self._prefill is not None:
            self._prefill.circuit.record_success()
        self._decode.member.circuit.record_success()

    def _react(self, call: WorkerCall, kind: str, message: Any) -> list[Received]:
        """Applies what was read of a call; returns the message if it is for the consumer."""
        if call is self._decode:
            if kind == "tokens" and self._state is AttemptState.DECODING:
                return [message]  # hot path: the table has no row for it
            event: AttemptEvent | None = _DECODE_EVENTS.get(kind)
        else:
            event = _SOURCE_EVENTS.get(kind)
        if self._failure is not None or call not in (self._decode, self._source):
            return []  # nothing after a failure, nor of the source before a migration
        if isinstance(message, Report):
            learn(call.member, message)
        if event is not None:
            self._apply(event, call.member, message)
        return [] if isinstance(message, AttemptFailure) else [message]

    def _apply(self, event: AttemptEvent, member: Any = None, received: Any = None) -> None:
        """Applies an event, which `received` of the worker `member` has brought if it has."""
        step = TABLE.get((self._state, event))
        if step is not None:
            self._state = step.state
            for action in step.actions:
                self._act(action, member, received)

    def _act(self, action: AttemptAction, member: Any, received: Any) -> None:
        match action:
            case AttemptAction.NOTE_HELD:
                self._fleet.note_held(member, self._hashes)
            case AttemptAction.CANCEL_SOURCE:
                self._cancel_source()
            case AttemptAction.LIMIT_SOURCE:
                asyncio.get_running_loop().call_later(self._source_timeout, self._cancel_source)
            case AttemptAction.CANCEL_CALLS:
                self.cancel()
            case AttemptAction.HOLD:
                self._held = received
            case AttemptAction.FAIL:
                self._fail(received)
            case AttemptAction.FAIL_AS_HELD:
                self._fail(self._held)
            case _:
                self._ended_by[action].close()

    def _fail(self, failure: AttemptFailure) -> None:
        source = "" if self._source is None else self._source.member.record.id
        self._failure = failure.of_pair(source, self.decode_worker)

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _cancel_source(self) -> None:
        if self._source is not None:
            self._source.cancel()

    def _call_to(self, member: Member) -> WorkerCall:
        return WorkerCall(member, self._fleet, self._deadline, self._bounds.check)

    def _channel_to(self, member: Member) -> grpc.aio.Channel:
        return self._stack.enter_context(self._fleet.channel_to(member))

    def _request_prefix_lease(self) -> PrefixLease | None:
        """Requests a prefix lease if the placement names a source for the prompt's beginning. At
        least one token is left to compute, for the token that follows it."""
        if not self.placement.source:
            return None
        holder, token_ids = self._fleet.member(self.placement.source), self._work.token_ids
        hashes = self._hashes[: (len(token_ids) - 1) // holder.record.block_size]
        tenant = self._work.request.tenant.name
        channel, claimant = self._channel_to(holder), self.placement.prefill
        prefix_lease = PrefixLease(holder, channel, hashes, claimant, tenant)
        self._ended_by[AttemptAction.END_PREFIX_LEASE].callback(prefix_lease.end)
        return prefix_lease

    def _encoder_leases(self, claimant: Member) -> EncoderLeases | None:
        """Returns the leases on encoder outputs that the placement names sources for, if any."""
        if not self.placement.encoders:
            return None
        leases = EncoderLeases(
            self.placement.encoders,
            self._work,
            claimant,
            self._fleet,
            self._deadline,
            self._on_encoded,
        )
        self._ended_by[AttemptAction.END_ENCODER_LEASES].callback(leases.end)
        self._stack.push_async_callback(leases.close)
        return leases

    def _opened(self, leases: EncoderLeases | None) -> Sequence[worker_wire.EncoderSource]:
        return () if leases is None else leases.open(self._first_token_due)

    def _block_hashes(self) -> list[bytes]:
        return self._work.prompt.hashes(self._decode.member.namespace)

    async def _open_decode(
        self, lease_id: bytes, encoder_sources: Sequence[worker_wire.EncoderSource] = ()
    ) -> None:
        """Calls the decode worker to resume after the tokens that the source holds under
        `lease_id`; without a source, to compute the prompt itself, with `encoder_sources`. Raises
        `AttemptFailure`."""
        work, member = self._work, self._decode.member
        self._ended_by[AttemptAction.END_DECODE_LOAD].enter_context(
            member.loaded(num_sequences=work.num_sequences, num_held_tokens=work.num_tokens)
        )
        handle = (
            None
            if self._source is None
            else worker_wire.handle(self._source.member, lease_id, work, self._hashes)
        )
        cost = self._return_cost()
        self._decode.may_return = cost is not None
        request = self._decode_request = worker_wire.decode_request(
            work, lease_id, handle, cost, self._first_token_due, encoder_sources
        )
        max_bytes = self._bounds.max_message_bytes
        called = worker_methods.generate(self._channel_to(member), request, work, max_bytes)
        await self._open(self._decode, "admit.decode", called)

    async def _open(self, call: WorkerCall, stage_name: str, called: Awaitable[Method]) -> None:
        """Waits until the worker has admitted the request. Raises `AttemptFailure`."""
        self._react(call, *await call.open(stage_name, called))
        self._raise_if_failed()

    def _return_cost(self) -> ReturnCost | None:
        """Returns None if the decode worker shall not give the request back: of several sequences
        it can preempt one and keep the others, and a prompt that it computed itself is cached on no
        prefill worker."""
        if self._prefill is None or not self._may_return or self._work.params.num_sequences > 1:
            return None
        prefill, decode = (scored.candidate for scored in self.placement.chosen)
        if decode.worker != self.decode_worker:  # the request has migrated
            decode = decode._replace(rates=self._decode.member.model.rates)
        num_encoder_tokens = sum(each.length for each in self._work.request.encoder_inputs)
        return return_cost(prefill, decode, len(self._work.token_ids), num_encoder_tokens)

    def _read_ahead(self, call: WorkerCall) -> None:
        """Starts a task that reads a call while its events are not awaited."""
        task = asyncio.create_task(self._read(call))
        self._stack.push_async_callback(_ended, task)

    async def _read(self, call: WorkerCall) -> None:
        """Queues what is read of a call, up to its end."""
        message: Any = None
        while not isinstance(message, AttemptFailure):
            kind, message = await call.read()
            if self._inbox.put((call, kind, message)):
                await self._inbox.room()


def _num_tokens(events: Sequence[Received]) -> int:
    return sum(len(event.tokens) for event in events if isinstance(event, OutputDelta))


async def _ended(task: "asyncio.Task[None]") -> None:
    """Cancels a task and waits until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
