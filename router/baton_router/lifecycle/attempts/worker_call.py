"""Call to one worker in an attempt: its messages, and the failure that ends it. Independent of the
attempt's other calls."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from opentelemetry.trace import SpanKind

from baton.cluster.throttled_log import ThrottledLog
from baton.errors import (
    BatonError,
    ContextLengthError,
    DeadlineExceededError,
    EngineLimitError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from baton.rpc.cancellation import is_task_cancelled
from baton.rpc.errors import error_of, has_ended, is_cancelled_here, is_loss
from baton.serving.deadline import Deadline
from baton.serving.telemetry.propagation import outgoing
from baton.serving.telemetry.stages import failed, stage
from baton_router.call.failure import AttemptFailure, FailureKind
from baton_router.call.output_delta import OutputDelta
from baton_router.lifecycle import worker_wire
from baton_router.lifecycle.attempts.work_bounds import Unreadable, ViolationError, any_event
from baton_router.lifecycle.attempts.worker_methods import Method
from baton_router.lifecycle.worker_events import KvReady, Report
from baton_router.lifecycle.worker_events import Received as Event
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.fleet.member import Member

# In the error of a message that gRPC has not received whole.
_OVERSIZED = "eceived message larger than max"

_log = ThrottledLog(logging.getLogger(__name__))

Received = tuple[str, Any]
"""Kind and event; or the `AttemptFailure` that ended the call, of the kind `lease_ended` if the
lease was over, `ended` if the call ended with status OK or was cancelled here, else `failed`."""


class WorkerCall:
    """Call to one worker.

    Attributes:
        member: the worker.
        may_return: the worker may give the request back.
    """

    def __init__(
        self,
        member: Member,
        fleet: Fleet,
        deadline: Deadline,
        check: Callable[[Event], None] = any_event,
    ) -> None:
        """Takes `check`, which raises `ViolationError` for an event that no worker may send."""
        self.member = member
        self._check = check
        self.may_return = False
        self._fleet = fleet
        self._deadline = deadline
        self._call: Any = None
        self._is_admitted = False

    @property
    def _name(self) -> str:
        return self.member.record.id

    async def open(self, stage_name: str, called: Awaitable[Method]) -> Received:
        """Calls a method once it is there with its request, and waits for the first message, which
        is `admitted`, or the call's failure. `stage_name`: of the span of this wait, whose child is
        the worker's span of the whole call."""
        with stage(stage_name, {"baton.worker": self._name}, kind=SpanKind.CLIENT) as span:
            self.start(*await called)
            kind, received = await self.read()
            if kind != "admitted" and not isinstance(received, AttemptFailure):
                early = InternalError(f"{self._name} sent {kind!r} before it admitted the request")
                kind, received = "failed", self._broken(early)
                self.cancel()
            if kind in ("failed", "lease_ended"):
                failed(span, received.error)
        self._is_admitted = True
        return kind, received

    def start(self, method: Any, request: Any) -> None:
        """Calls `method` of a stub with `request`."""
        timeout = self._deadline.forward()
        self._call = method(request, timeout=timeout, metadata=outgoing())

    def cancel(self) -> None:
        """Cancels the call immediately, even while it is being read."""
        if self._call is not None:
            self._call.cancel()

    async def read(self) -> Received:
        """Waits for the next event, or the failure that ended the call."""
        try:
            message: Any = await self._call.read()
        except grpc.aio.AioRpcError as error:
            return self._cancelled() if is_cancelled_here(error) else self._classify(error)
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            return self._cancelled()
        if message is grpc.aio.EOF:
            early = InternalError(f"{self._name} ended its answer before it was complete")
            return "ended", self._broken(early)
        if isinstance(message, Unreadable):
            return "failed", self._violation(message.problem)
        try:
            is_delta = isinstance(message, OutputDelta)  # hot path
            event = message if is_delta else worker_wire.event_of(message)
            self._check(event)
        except ViolationError as error:
            return "failed", self._violation(str(error))
        except InternalError as error:
            return "failed", self._broken(error)
        if isinstance(event, OutputDelta):
            return "tokens", event
        return ("failed", self._given_back()) if event.kind == "preempted" else (event.kind, event)

    def _violation(self, problem: str) -> AttemptFailure:
        """Returns the failure for a worker that breaks its contract, which gets no requests until a
        health check has succeeded."""
        error = ViolationError(f"{self._name} sent {problem}")
        _log.warning("%s; its circuit is open", error, kind="violation")
        self.cancel()
        self._fleet.report_loss(self.member)
        return AttemptFailure(FailureKind.VIOLATION, error, self._name)

    def _cancelled(self) -> Received:
        return "ended", self._broken(UnavailableError(f"the call to {self._name} was cancelled"))

    def _given_back(self) -> AttemptFailure:
        """Returns the failure for a request given back; `BROKEN` if that was not permitted."""
        if not self.may_return:
            return self._broken(InternalError(f"{self._name} gave up the request"))
        error = OverloadedError(f"{self._name} had no room for the request any more")
        return AttemptFailure(FailureKind.PREEMPTED, error, self._name)

    def _classify(self, error: grpc.aio.AioRpcError) -> Received:
        """Classifies a failed call. The worker is lost if the error is not its own (`is_loss`) or
        says that it has failed internally. It is not lost if the deadline may have ended the call
        on the worker's side, which looks like a lost worker from here."""
        cause = error_of(error)
        kind = FailureKind.BROKEN if self._is_admitted else FailureKind.REFUSED
        if self._deadline.may_have_ended():
            cause = DeadlineExceededError("the request's deadline has passed")
        elif is_loss(error):
            kind = FailureKind.LOST if has_ended(error) else FailureKind.SILENT
            cause = UnavailableError(f"{self._name} is lost: {cause}")
            self._fleet.report_loss(self.member)
        elif not self._is_admitted and self._is_too_small(cause):
            kind = FailureKind.TOO_SMALL
        elif isinstance(cause, InternalError):
            kind = FailureKind.LOST
            self._fleet.report_failure(self.member)
        elif _OVERSIZED in (error.details() or ""):
            return "failed", self._violation(f"too large a message: {error.details()}")
        ending = "lease_ended" if isinstance(cause, NotFoundError) else "failed"
        return ending, AttemptFailure(kind, cause, self._name)

    def _is_too_small(self, cause: BatonError) -> bool:
        """Returns whether the worker has refused by a limit of its own. The router has checked the
        length against the model's before. Older workers do not tell their limits from faults of a
        request, so that all that they call invalid may be either."""
        is_older = not self.member.record.max_num_seqs
        kind = InvalidArgumentError if is_older else EngineLimitError | ContextLengthError
        return isinstance(cause, kind)

    def _broken(self, error: BatonError) -> AttemptFailure:
        return AttemptFailure(FailureKind.BROKEN, error, self._name)


def learn(member: Member, report: Report) -> None:
    """Updates the worker's latency model by the work and the transfer that it reports."""
    member.model.observe_work(report.done)
    if isinstance(report, KvReady):
        per_token = member.bytes_per_token
        num_tokens = report.num_bytes / per_token if per_token else 0.0
        member.model.received(num_tokens, report.exposed_seconds, report.connector)
