"""Where requests wait before they are placed: in fair order, and none that would wait for nothing.

A request that comes is told at once if it cannot get its first token before its deadline, or if
too many wait already, with the time after which asking again is worthwhile. Otherwise it goes when
it is its turn, there is room for it, and its tenant's allowance lets it. Knows nothing of workers:
what would become of a request is forecast by the one who knows them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from baton.errors import BatonError, DeadlineExceededError, OverloadedError
from baton.serving.deadline import Deadline
from router.allowance import Allowances
from router.fair_queue import FairQueue, Waiting
from router.intake import Request

MAX_WAITING = 1024
# Room appears with no word to the gate where a worker comes back, say.
_LOOK_SECONDS = 0.05
_LEAST_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Forecast:
    """What would become of a request if it went now.

    Attributes:
        has_room: it would find room, at the end of its prefill as well.
        ttft_seconds: until its first token.
        drain_seconds: until there is room for it; 0 where there is.
    """

    has_room: bool
    ttft_seconds: float
    drain_seconds: float = 0.0


@dataclass(slots=True)
class Answered:
    """What is seen of an answer: filled in while it is written.

    Attributes:
        first_token: when its first token came, in monotonic seconds.
    """

    num_output_tokens: int = 0
    first_token: float | None = None


class Forecaster(Protocol):
    """Who knows the workers, and what they were given."""

    def forecast(self, request: Request, num_tokens_ahead: int) -> Forecast:
        """How the request would fare if it went now, behind prompts of so many tokens."""

    def placed(self, request: Request) -> AbstractContextManager[Answered]:
        """The request is in flight for the length of the block."""


@dataclass(slots=True, eq=False)
class _Caller:
    request: Request
    turn: "asyncio.Future[None]"


class Gate:
    """All requests of one router go through it.

    Args:
        max_waiting: requests; more are refused.
    """

    def __init__(
        self, allowances: Allowances, forecaster: Forecaster, max_waiting: int = MAX_WAITING
    ) -> None:
        self._allowances = allowances
        self._forecaster = forecaster
        self._max_waiting = max_waiting
        self._queue: FairQueue[_Caller] = FairQueue(allowances.weight_of)
        self._callers: dict[int, _Caller] = {}
        self._is_passing = False  # somebody was let through and is not yet placed
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        """Of the prompts of all that wait."""
        return self._queue.num_tokens

    @asynccontextmanager
    async def turn(
        self, request: Request, tenant: str, deadline: Deadline
    ) -> AsyncIterator[Answered]:
        """Waits for the request's turn; the block is its life. It must be placed before anything is
        awaited in the block, lest the next one be let through to the same room.

        Raises `OverloadedError` if it cannot be served in time, `DeadlineExceededError` if time ran
        out all the same.
        """
        self._check_worthwhile(request, tenant, deadline)
        await self._wait(request, tenant, deadline)
        answered = Answered()
        try:
            with self._forecaster.placed(request) as answered:
                yield answered
        finally:
            self._allowances.leave(tenant, answered.num_output_tokens)
            self.look()

    def abandon(self, request: Request, error: BatonError) -> None:
        """Has a request that waits wait no more: its `turn` raises `error`."""
        caller = self._callers.get(id(request))
        if caller is not None and not caller.turn.done():
            caller.turn.set_exception(error)

    def look(self) -> None:
        """Lets through whoever may go now; to be called when room may have appeared.

        One at a time: the next is looked at when the one before has been placed.
        """
        if self._is_passing:
            return
        waiting = self._queue.pop(self._allowances.may_go)
        while waiting is not None and waiting.item.turn.done():  # and not yet removed
            waiting = self._queue.pop(self._allowances.may_go)
        if waiting is None:
            self._look_later()
        elif not self._forecaster.forecast(waiting.item.request, 0).has_room:
            self._queue.put_back(waiting)
            self._look_later()
        else:
            self._is_passing = True
            self._allowances.enter(waiting.tenant, waiting.num_tokens)
            waiting.item.turn.set_result(None)

    async def _wait(self, request: Request, tenant: str, deadline: Deadline) -> None:
        caller = _Caller(request, asyncio.get_running_loop().create_future())
        waiting = self._queue.push(
            caller,
            tenant=tenant,
            priority=request.priority,
            num_tokens=len(request.token_ids),
        )
        self._callers[id(request)] = caller
        self.look()
        try:
            async with asyncio.timeout(deadline.remaining()):
                await caller.turn
        except BaseException as error:
            self._give_up(waiting)
            if isinstance(error, TimeoutError):
                raise DeadlineExceededError(
                    "the request's deadline has passed while it waited for room"
                ) from None
            raise
        finally:
            del self._callers[id(request)]
        self._passed()

    def _passed(self) -> None:
        self._is_passing = False
        asyncio.get_running_loop().call_soon(self.look)  # behind what this task does at once

    def _give_up(self, waiting: Waiting[_Caller]) -> None:
        """It waits no more, or goes no more though it was let through."""
        if _was_let_through(waiting.item.turn):
            self._allowances.leave(waiting.tenant, 0)
            self._passed()
        else:
            self._queue.remove(waiting)
            self.look()

    def _check_worthwhile(self, request: Request, tenant: str, deadline: Deadline) -> None:
        forecast = self._forecaster.forecast(request, self._queue.num_tokens)
        unpaid = self._allowances.seconds_until_paid(tenant)
        wait, left = max(forecast.drain_seconds, unpaid), deadline.remaining()
        retry_after = max(wait, _LEAST_RETRY_SECONDS)
        first_token = wait + forecast.ttft_seconds
        if len(self._queue) >= self._max_waiting:
            waiting = len(self._queue)
            raise OverloadedError(f"{waiting} requests wait at this router already", retry_after)
        if first_token > left and unpaid > 0 and unpaid >= forecast.drain_seconds:
            raise OverloadedError(f"tenant {tenant!r} is over its rate", retry_after)
        if first_token > left:
            raise OverloadedError(
                f"a first token would come in {first_token:.1f} s, and the deadline is in "
                f"{left:.1f} s",
                retry_after,
            )

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(self._queue):
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self.look)


def _was_let_through(turn: "asyncio.Future[None]") -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is None
