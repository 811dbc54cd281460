"""Admission queue: weighted-fair across tenants; rejects requests that cannot meet their deadline.
Pure.

A new request is rejected immediately, with a retry-after, if its first token would miss its
deadline. In a full queue the tenant with the most requests gives way: its newest one is rejected.
Otherwise the queue admits a request in fair order, once its forecast shows capacity and its
tenant's quota allows it. A request whose first token would by then be too late is
rejected, since the requests after it can still be served in time. Forecasts come from a
`Forecaster` and the time from a clock, so that the router and the simulator share this code.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.errors import BatonError, DeadlineExceededError, OverloadedError
from baton.fairness.fair_queue import FairQueue, Waiting
from baton.serving.deadline import Clock
from baton_router.routing.admission.quotas import Quotas
from baton_router.routing.placement.decision import Decision

MAX_WAITING = 1024
POLL_SECONDS = 0.05
"""Polling interval while requests are queued: some free capacity is not announced, for example
that of a worker that has recovered."""

_LEAST_RETRY_SECONDS = 0.1

T = TypeVar("T")
_T = TypeVar("_T", contravariant=True)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast for a request if it were admitted now.

    Attributes:
        has_room: whether workers have capacity for it, also at the end of its prefill.
        ttft_seconds: seconds until its first token.
        drain_seconds: seconds until workers have capacity for it; 0 if they have.
        decision: its placement decision; None if the forecast did not depend on one.
    """

    has_room: bool
    ttft_seconds: float
    drain_seconds: float = 0.0
    decision: Decision | None = None


NO_WAIT = Forecast(True, 0.0)


class Forecaster(Protocol[_T]):
    """Forecaster of requests, from the workers and their load."""

    def forecast(self, request: _T, num_tokens_ahead: int, earlier: Decision | None, /) -> Forecast:
        """Forecasts the request if it were placed now, after queued prompts of `num_tokens_ahead`
        tokens. `earlier` is the last decision about it."""


@dataclass(frozen=True, slots=True, eq=False)
class QueuedRequest(Generic[T]):
    """Queued request.

    Attributes:
        expires: deadline of its first token, in seconds of the clock.
        decision: placement decision made when it arrived.
    """

    request: T
    expires: float
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class AdmissionResult(Generic[T]):
    """Result of admission for a request that left the queue.

    Attributes:
        forecast: forecast at that time.
        refusal: error with which it is rejected; None if it is admitted.
    """

    request: T
    forecast: Forecast = NO_WAIT
    refusal: BatonError | None = None


class AdmissionQueue(Generic[T]):
    """Admission queue of one router.

    Args:
        on_displaced: called with each request that gives way to another tenant's, and its error.
        max_waiting: maximum number of queued requests; more are rejected.
    """

    def __init__(
        self,
        quotas: Quotas,
        forecaster: Forecaster[T],
        on_displaced: Callable[[T, BatonError], object],
        max_waiting: int = MAX_WAITING,
        clock: Clock = time.monotonic,
    ) -> None:
        self._quotas = quotas
        self._forecaster = forecaster
        self._on_displaced = on_displaced
        self._clock = clock
        self._queue: FairQueue[QueuedRequest[T]] = FairQueue(
            quotas.weight_of, max_waiting=max_waiting
        )

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all queued requests."""
        return self._queue.num_tokens

    def join(
        self, request: T, *, tenant: str, priority: int, num_tokens: int, seconds_left: float
    ) -> Waiting[QueuedRequest[T]]:
        """Queues a request with `num_tokens` prompt tokens.

        Raises `OverloadedError` if the queue is full and no other tenant has more requests in it,
        or if the first token would miss `seconds_left`.
        """
        victim = self._queue.victim_for(tenant)
        is_full = victim == tenant
        decision = None
        if is_full or seconds_left < float("inf"):
            ahead = self._queue.tokens_ahead(tenant, priority, num_tokens)
            decision = self._check_worthwhile(request, tenant, seconds_left, ahead, is_full=is_full)
        if victim is not None:
            self._displace(victim)
        queued = QueuedRequest(request, self._clock() + seconds_left, decision)
        return self._queue.push(queued, tenant=tenant, priority=priority, num_tokens=num_tokens)

    def next(self, is_done: Callable[[T], bool] = lambda _: False) -> AdmissionResult[T] | None:
        """Removes and returns the next request to admit, charging its tenant's quota, or to reject.

        Returns None if no request may leave the queue now.

        Args:
            is_done: tells a request that no longer waits but was not removed yet; it is skipped.
        """
        waiting = self._queue.pop(self._quotas.is_admissible)
        while waiting is not None and is_done(waiting.item.request):
            waiting = self._queue.pop(self._quotas.is_admissible)
        if waiting is None:
            return None
        request, seconds_left = waiting.item.request, waiting.item.expires - self._clock()
        if seconds_left <= 0:
            return AdmissionResult(request, refusal=expired())
        forecast = self._forecaster.forecast(request, 0, waiting.item.decision)
        if forecast.ttft_seconds > seconds_left:
            retry_after = max(forecast.drain_seconds, _LEAST_RETRY_SECONDS)
            late = _late(forecast.ttft_seconds, seconds_left, retry_after)
            return AdmissionResult(request, forecast, late)
        if not forecast.has_room:
            self._queue.put_back(waiting)
            return None
        self._quotas.enter(waiting.tenant, waiting.num_tokens)
        return AdmissionResult(request, forecast)

    def remove(self, waiting: Waiting[QueuedRequest[T]]) -> None:
        """Removes a queued request; does nothing if it has left the queue."""
        self._queue.remove(waiting)

    def leave(self, tenant: str, num_output_tokens: int) -> None:
        """Releases the quota of an admitted request that has ended."""
        self._quotas.leave(tenant, num_output_tokens)

    def _displace(self, tenant: str) -> None:
        """Rejects the newest request of a tenant, which another one's takes the place of."""
        waiting = len(self._queue)
        displaced = self._queue.pop_newest(tenant).item.request
        wait = self._forecaster.forecast(displaced, self._queue.num_tokens, None).drain_seconds
        error = OverloadedError(
            f"{waiting} requests wait at this router already, the most of them of tenant "
            f"{tenant!r}: its newest gives way to another tenant's",
            max(wait, _LEAST_RETRY_SECONDS),
            reason="queue",
        )
        self._on_displaced(displaced, error)

    def _check_worthwhile(
        self,
        request: T,
        tenant: str,
        seconds_left: float,
        num_tokens_ahead: int,
        *,
        is_full: bool,
    ) -> Decision | None:
        forecast = self._forecaster.forecast(request, num_tokens_ahead, None)
        quota_wait = self._quotas.seconds_until_available(tenant)
        wait = max(forecast.drain_seconds, quota_wait)
        retry_after = max(wait, _LEAST_RETRY_SECONDS)
        first_token = wait + forecast.ttft_seconds
        if is_full:
            waiting = len(self._queue)
            raise OverloadedError(
                f"{waiting} requests wait at this router already", retry_after, reason="queue"
            )
        if first_token > seconds_left and quota_wait > 0 and quota_wait >= forecast.drain_seconds:
            raise OverloadedError(
                f"tenant {tenant!r} is over its rate", retry_after, reason="tokens_per_second"
            )
        if first_token > seconds_left:
            raise _late(first_token, seconds_left, retry_after)
        return forecast.decision


def expired(*, is_paused: bool = False) -> DeadlineExceededError:
    """Returns the error of a request whose deadline passed before its admission, which the operator
    has paused (`is_paused`) or which waited for capacity."""
    text = "the request's deadline has passed while it waited"
    if is_paused:
        return DeadlineExceededError(
            f"{text}: admission at this router is paused. Resume it with `baton resume`, and retry."
        )
    return DeadlineExceededError(f"{text} for room")


def _late(first_token: float, seconds_left: float, retry_after: float) -> OverloadedError:
    return OverloadedError(
        f"a first token would come in {first_token:.1f} s, and the deadline is in "
        f"{seconds_left:.1f} s",
        retry_after,
        reason="deadline",
    )
