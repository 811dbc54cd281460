"""Lifecycle of a request for a pooled output: one call to a prefill worker, or to a decode worker
where there is none, made again elsewhere if that worker is lost."""

import time
from collections.abc import Sequence

from baton.serving.deadline import Deadline
from baton_router.call.failure import AttemptFailure, FailureKind
from baton_router.call.request import Request, RequestOutcome, work_of
from baton_router.call.usage import Account, Timings
from baton_router.lifecycle import worker_wire
from baton_router.lifecycle.attempts import worker_methods
from baton_router.lifecycle.attempts.worker_call import Received, WorkerCall, learn
from baton_router.lifecycle.recovery import Recovery
from baton_router.lifecycle.retries import Retries
from baton_router.lifecycle.worker_events import PoolResult, PrefillStarted
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.fleet.member import Member
from baton_router.routing.placement.decision import Decision
from baton_router.routing.placement.placement import Placement
from baton_router.routing.placement.placer import Placer
from baton_router.telemetry import request_trace


class PooledLifecycle:
    """Lifecycle of one request. `run` is used once; `abort` may be called meanwhile.

    Args:
        arrived: monotonic seconds of its arrival.
        due: when the result is due; workers with the deadline policy serve the earliest first.

    Attributes:
        account: usage and timings of the request so far.
        placement: placement of the present attempt; None while the request waits.
    """

    def __init__(
        self,
        request: Request,
        fleet: Fleet,
        placer: Placer,
        recovery: Recovery,
        deadline: Deadline,
        arrived: float,
        due: Deadline,
    ) -> None:
        self.request = request
        self.account = Account(Timings(arrived), len(request.token_ids))
        self.placement: Placement | None = None
        self._fleet = fleet
        self._recovery = recovery
        self._retries = Retries(request, placer, recovery, deadline)
        self._deadline = deadline
        self._due = due
        self._call: WorkerCall | None = None

    @property
    def outcome(self) -> RequestOutcome:
        """Outcome of the request, once it has ended."""
        return RequestOutcome(self.request, self.account, failures=tuple(self._recovery.failures))

    def abort(self) -> None:
        """Aborts the request and frees its worker; `run` raises `CancelledError`."""
        self._retries.abort()
        if self._call is not None:
            self._call.cancel()

    async def run(self, decision: Decision | None = None) -> Sequence[float]:
        """Returns the pooled output. Raises the error that ended the request otherwise. `decision`
        is the placement decision it was admitted by."""
        self._retries.decision = decision
        while True:
            try:
                return await self._attempt(self._place())
            except AttemptFailure as failure:
                await self._recover(failure)

    def _place(self) -> Member:
        """Chooses the worker of the next attempt. Raises `AttemptFailure` if none can take it."""
        self.placement = self._retries.place(work_of(self.request))
        return self._fleet.member(self.placement.chosen[0].candidate.worker)

    async def _attempt(self, member: Member) -> Sequence[float]:
        """Calls a worker for the result. Raises `AttemptFailure`."""
        assert self.placement is not None, "an attempt that was not placed"
        hashes = self.request.prompt.hashes(member.namespace)
        num_uncached = max(0, len(self.request.token_ids) - self.placement.num_cached_tokens)
        # The load is counted before the first await, so that each of several concurrent requests
        # sees that of those placed before it.
        with (
            member.loaded(num_tokens=num_uncached),
            self._fleet.pending.pending(member.record.id, hashes),
            self._fleet.channel_to(member) as channel,
        ):
            call = self._call = WorkerCall(member, self._fleet, self._deadline)
            message = worker_wire.pool_request(self.request, worker_wire.new_lease_id(), self._due)
            called = worker_methods.pool(channel, message)
            try:
                self._check(await call.open("admit.prefill", called))
                self._admitted()
                while True:
                    kind, received = self._check(await call.read())
                    if kind == "started":
                        started: PrefillStarted = received
                        self.account.started(
                            started.queue_seconds, started.elapsed, started.num_cached_tokens
                        )
                    elif kind == "result":
                        break
            finally:
                call.cancel()
        learn(member, received)
        self._fleet.note_held(member, hashes)
        member.circuit.record_success()
        self.account.timings.finished = time.monotonic()
        result: PoolResult = received
        return result.values

    def _admitted(self) -> None:
        self._recovery.is_accepted = True
        if self.account.timings.admitted is None:
            self.account.timings.admitted = time.monotonic()
        request_trace.admitted()

    def _check(self, received: Received) -> Received:
        """Returns what was read of the call. Raises the failure that it may be."""
        if isinstance(received[1], AttemptFailure):
            raise received[1]
        return received

    async def _recover(self, failure: AttemptFailure) -> None:
        """Waits until the next attempt is due. Raises the error that ends the request."""
        if self.placement is not None:
            failure = failure.of_pair(self.placement.prefill, self.placement.decode)
        self.placement = None
        is_lost = failure.kind is FailureKind.LOST and self._recovery.is_accepted
        request_trace.failed(failure, handed_over_at=None, is_prefilling=True)
        await self._retries.wait(failure, 0, 0 if is_lost else None)
