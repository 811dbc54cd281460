"""Admission controller: suspends a request until `AdmissionQueue` admits or rejects it."""

import asyncio
from typing import Protocol

from baton.errors import BatonError
from baton.serving.deadline import Deadline
from baton.serving.telemetry.stages import stage
from baton_router.admission.admission_queue import (
    LOOK_SECONDS,
    MAX_WAITING,
    AdmissionQueue,
    Forecast,
    Forecaster,
    QueuedRequest,
    expired,
)
from baton_router.admission.fair_queue import Waiting
from baton_router.admission.quotas import Quotas
from baton_router.placement.decision import Decision
from baton_router.request import Request, RequestOutcome


class InFlightForecasts(Forecaster[Request], Protocol):
    """Forecaster that is told which requests are in flight."""

    def begin(self, request: Request, forecast: Forecast, /) -> None:
        """The request is in flight from now on."""

    def end(
        self, request: Request, num_output_tokens: int, first_token_at: float | None, /
    ) -> None:
        """The request is not in flight any more."""


_Admission = asyncio.Future[Forecast]


class AdmissionController:
    """All requests of one router go through it.

    Args:
        max_waiting: requests; more are refused.
    """

    def __init__(
        self, quotas: Quotas, forecasts: InFlightForecasts, max_waiting: int = MAX_WAITING
    ) -> None:
        self._forecasts = forecasts
        self._queue: AdmissionQueue[Request] = AdmissionQueue(quotas, forecasts, max_waiting)
        self._pending: dict[int, _Admission] = {}  # of queued requests
        self._is_passing = False  # an admitted request is not placed yet
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        """Of the prompts of all that wait."""
        return self._queue.num_tokens

    async def admit(self, request: Request, tenant: str, deadline: Deadline) -> Decision | None:
        """Waits until the request is admitted; `end` ends that. Returns the decision about its
        placement that it was admitted by, None where none was needed.

        The request must be placed before anything else is awaited, or the next one is admitted to
        the same room.

        Raises `OverloadedError` if it cannot be served in time, `DeadlineExceededError` if time ran
        out all the same.
        """
        with stage("admit", {"baton.worker": "router"}):
            forecast = await self._wait(request, tenant, deadline)
        self._forecasts.begin(request, forecast)
        return forecast.decision

    def end(self, outcome: RequestOutcome) -> None:
        """A request that was admitted has ended."""
        request, num_output_tokens = outcome.request, outcome.num_output_tokens
        self._forecasts.end(request, num_output_tokens, outcome.first_token_at)
        self._queue.leave(request.tenant.name, num_output_tokens)
        self.look()

    def abandon(self, request: Request, error: BatonError) -> None:
        """Removes a queued request: its `admit` raises `error`."""
        admission = self._pending.get(id(request))
        if admission is not None and not admission.done():
            admission.set_exception(error)

    def look(self) -> None:
        """Admits the next queued request that may go; to be called when room may have appeared.

        One at a time: the next is looked at after the one before has been placed.
        """
        if self._is_passing:
            return
        while (next_one := self._queue.next(self._has_gone)) is not None:
            admission = self._pending[id(next_one.request)]
            if next_one.refusal is None:
                self._is_passing = True
                admission.set_result(next_one.forecast)
                return
            admission.set_exception(next_one.refusal)
        self._look_later()

    def _has_gone(self, request: Request) -> bool:
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
        self._pending[id(request)] = admission
        self.look()
        try:
            async with asyncio.timeout(deadline.remaining()):
                forecast = await admission
        except BaseException as error:
            self._give_up(waiting, admission)
            if isinstance(error, TimeoutError):
                raise expired() from None
            raise
        finally:
            del self._pending[id(request)]
        self._passed()
        return forecast

    def _passed(self) -> None:
        self._is_passing = False
        asyncio.get_running_loop().call_soon(self.look)  # after this task has placed its request

    def _give_up(self, waiting: Waiting[QueuedRequest[Request]], admission: _Admission) -> None:
        """Removes a request whose caller has gone, whether it was admitted meanwhile or not."""
        if _was_admitted(admission):
            self._queue.leave(waiting.tenant, 0)
            self._passed()
        else:
            self._queue.remove(waiting)
            self.look()

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(self._queue):
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self.look)


def _was_admitted(admission: _Admission) -> bool:
    return admission.done() and not admission.cancelled() and admission.exception() is None
