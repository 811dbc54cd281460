"""Admission controller: suspends a request until `AdmissionQueue` admits or rejects it."""

import asyncio
from typing import Protocol

from baton.errors import BatonError
from baton.fairness.fair_queue import Waiting
from baton.serving.deadline import Deadline
from baton.serving.telemetry.stages import stage
from baton_router.call.request import Request, RequestOutcome
from baton_router.routing.admission.admission_queue import (
    MAX_WAITING,
    POLL_SECONDS,
    AdmissionQueue,
    Forecast,
    Forecaster,
    QueuedRequest,
    expired,
)
from baton_router.routing.admission.quotas import Quotas
from baton_router.routing.placement.decision import Decision


class InFlightForecasts(Forecaster[Request], Protocol):
    """Forecaster that tracks which requests are in flight."""

    def begin(self, request: Request, forecast: Forecast, /) -> None:
        """Counts the request as in flight."""

    def end(
        self, request: Request, num_output_tokens: int, first_token_at: float | None, /
    ) -> None:
        """Stops counting the request as in flight."""


_Admission = asyncio.Future[Forecast]


class AdmissionController:
    """Admission controller of one router, which every request passes.

    Args:
        max_waiting: maximum number of queued requests; the queue rejects more.

    Attributes:
        is_paused: no queued request is admitted.
        num_waiting_encoder_tokens: tokens of the encoder inputs of all queued requests.
    """

    def __init__(
        self, quotas: Quotas, forecasts: InFlightForecasts, max_waiting: int = MAX_WAITING
    ) -> None:
        self.is_paused = False
        self.num_waiting_encoder_tokens = 0
        self._forecasts = forecasts
        self._queue: AdmissionQueue[Request] = AdmissionQueue(
            quotas, forecasts, self.abandon, max_waiting
        )
        self._pending: dict[int, _Admission] = {}  # of queued requests
        self._is_placing = False  # an admitted request has not been placed yet
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of all queued requests."""
        return self._queue.num_tokens

    async def admit(self, request: Request, tenant: str, deadline: Deadline) -> Decision | None:
        """Waits until the request is admitted; the caller must report its end with `end`.

        Returns the placement decision that admission used, or None if it needed none. The caller
        must place the request before it awaits anything, or the next one is admitted to the same
        capacity. Raises `OverloadedError` if the request cannot be served in time, and
        `DeadlineExceededError` if `deadline` expires while it waits.
        """
        with stage("admit.router"):
            forecast = await self._wait(request, tenant, deadline)
        self._forecasts.begin(request, forecast)
        return forecast.decision

    def end(self, outcome: RequestOutcome) -> None:
        """Releases the quota of an admitted request that has ended, and admits the next one."""
        request, account = outcome.request, outcome.account
        # Forecasts learn nothing from a resumed request, of whose output they know only a part.
        first_token_at = None if account.num_received_tokens else outcome.first_token_at
        self._forecasts.end(request, account.num_new_tokens, first_token_at)
        self._queue.leave(request.tenant.name, account.num_new_tokens)
        self.poll()

    def abandon(self, request: Request, error: BatonError) -> bool:
        """Removes a queued request: its `admit` raises `error`. Returns whether it was queued."""
        admission = self._pending.get(id(request))
        if admission is None or admission.done():
            return False
        admission.set_exception(error)
        return True

    def pause(self) -> None:
        """Admits no request until `resume`; requests queue, up to their deadlines. Idempotent."""
        self.is_paused = True

    def resume(self) -> None:
        """Admits queued requests again. Idempotent."""
        self.is_paused = False
        self.poll()

    def poll(self) -> None:
        """Admits the next eligible request; callers call it when capacity may have become free.

        Admits one at a time: the next is considered after the previous one has been placed.
        """
        if self._is_placing or self.is_paused:
            return
        while (next_one := self._queue.next(self._is_done)) is not None:
            admission = self._pending[id(next_one.request)]
            if next_one.refusal is None:
                self._is_placing = True
                admission.set_result(next_one.forecast)
                return
            admission.set_exception(next_one.refusal)
        self._schedule_poll()

    def _is_done(self, request: Request) -> bool:
        return self._pending[id(request)].done()

    async def _wait(self, request: Request, tenant: str, deadline: Deadline) -> Forecast:
        admission: _Admission = asyncio.get_running_loop().create_future()
        waiting = self._queue.join(
            request,
            tenant=tenant,
            priority=request.priority,
            num_tokens=len(request.token_ids),
            seconds_left=deadline.remaining(),
        )
        num_encoder_tokens = sum(each.length for each in request.encoder_inputs)
        self.num_waiting_encoder_tokens += num_encoder_tokens
        self._pending[id(request)] = admission
        self.poll()
        try:
            async with asyncio.timeout(deadline.remaining()):
                forecast = await admission
        except BaseException as error:
            self._give_up(waiting, admission)
            if isinstance(error, TimeoutError):
                raise expired(is_paused=self.is_paused) from None
            raise
        finally:
            del self._pending[id(request)]
            self.num_waiting_encoder_tokens -= num_encoder_tokens
        self._end_placing()
        return forecast

    def _end_placing(self) -> None:
        self._is_placing = False
        asyncio.get_running_loop().call_soon(self.poll)  # runs after this task placed its request

    def _give_up(self, waiting: Waiting[QueuedRequest[Request]], admission: _Admission) -> None:
        """Removes a request whose caller was cancelled or timed out, admitted meanwhile or not."""
        if _was_admitted(admission):
            self._queue.leave(waiting.tenant, 0)
            self._end_placing()
        else:
            self._queue.remove(waiting)
            self.poll()

    def _schedule_poll(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(self._queue):
            self._timer = asyncio.get_running_loop().call_later(POLL_SECONDS, self.poll)


def _was_admitted(admission: _Admission) -> bool:
    return admission.done() and not admission.cancelled() and admission.exception() is None
