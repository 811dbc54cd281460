"""Admission controller: suspends a request until `AdmissionQueue` admits or rejects it."""

import asyncio
from typing import Protocol

from baton.errors import BatonError
from baton.serving.deadline import Deadline
from baton.serving.telemetry.stages import stage
from router.admission.admission_queue import (
    LOOK_SECONDS,
    MAX_WAITING,
    Asking,
    Forecast,
    Forecaster,
    Turns,
    expired,
)
from router.admission.fair_queue import Waiting
from router.admission.quotas import Allowances
from router.placement.decision import Decision
from router.request import Request, RequestOutcome


class Foreseer(Forecaster[Request], Protocol):
    """Who forecasts, and is told what goes."""

    def begin(self, request: Request, forecast: Forecast, /) -> None:
        """The request is in flight from now on."""

    def end(
        self, request: Request, num_output_tokens: int, first_token_at: float | None, /
    ) -> None:
        """The request is not in flight any more."""


_Turn = asyncio.Future[Forecast]


class Gate:
    """All requests of one router go through it.

    Args:
        max_waiting: requests; more are refused.
    """

    def __init__(
        self, allowances: Allowances, foreseer: Foreseer, max_waiting: int = MAX_WAITING
    ) -> None:
        self._foreseer = foreseer
        self._turns: Turns[Request] = Turns(allowances, foreseer, max_waiting)
        self._pending: dict[int, _Turn] = {}  # of requests that wait
        self._is_passing = False  # somebody was let through and is not yet placed
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._turns)

    @property
    def num_waiting_tokens(self) -> int:
        """Of the prompts of all that wait."""
        return self._turns.num_tokens

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
        self._foreseer.begin(request, forecast)
        return forecast.decision

    def end(self, outcome: RequestOutcome) -> None:
        """A request that was admitted has ended."""
        request, num_output_tokens = outcome.request, outcome.num_output_tokens
        self._foreseer.end(request, num_output_tokens, outcome.first_token_at)
        self._turns.leave(request.tenant.name, num_output_tokens)
        self.look()

    def abandon(self, request: Request, error: BatonError) -> None:
        """Has a request that waits wait no more: its `turn` raises `error`."""
        turn = self._pending.get(id(request))
        if turn is not None and not turn.done():
            turn.set_exception(error)

    def look(self) -> None:
        """Lets through whoever may go now; to be called when room may have appeared.

        One at a time: the next is looked at when the one before has been placed.
        """
        if self._is_passing:
            return
        while (next_one := self._turns.next(self._has_gone)) is not None:
            turn = self._pending[id(next_one.request)]
            if next_one.refusal is None:
                self._is_passing = True
                turn.set_result(next_one.forecast)
                return
            turn.set_exception(next_one.refusal)
        self._look_later()

    def _has_gone(self, request: Request) -> bool:
        return self._pending[id(request)].done()

    async def _wait(self, request: Request, tenant: str, deadline: Deadline) -> Forecast:
        turn: _Turn = asyncio.get_running_loop().create_future()
        waiting = self._turns.join(
            request,
            tenant=tenant,
            priority=request.priority,
            num_tokens=len(request.token_ids),
            seconds_left=deadline.remaining(),
        )
        self._pending[id(request)] = turn
        self.look()
        try:
            async with asyncio.timeout(deadline.remaining()):
                forecast = await turn
        except BaseException as error:
            self._give_up(waiting, turn)
            if isinstance(error, TimeoutError):
                raise expired() from None
            raise
        finally:
            del self._pending[id(request)]
        self._passed()
        return forecast

    def _passed(self) -> None:
        self._is_passing = False
        asyncio.get_running_loop().call_soon(self.look)  # behind what this task does at once

    def _give_up(self, waiting: Waiting[Asking[Request]], turn: _Turn) -> None:
        """It waits no more, or goes no more though it was let through."""
        if _was_let_through(turn):
            self._turns.leave(waiting.tenant, 0)
            self._passed()
        else:
            self._turns.remove(waiting)
            self.look()

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(self._turns):
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self.look)


def _was_let_through(turn: _Turn) -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is None
