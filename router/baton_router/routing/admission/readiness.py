"""Readiness of a router: a request of one of its models could be placed. Requests that come earlier
wait for that, each for the workers of its model.

Independent of health checks and of the source of the reasons.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

from baton.errors import DeadlineExceededError, OverloadedError, UnavailableError
from baton.serving.deadline import Clock, Deadline
from baton_router.routing.admission.admission_queue import MAX_WAITING

HOLD_SECONDS = 30.0
_POLL_SECONDS = 0.5
_FIRST_POLL_SECONDS = 0.05  # while requests may wait for the first workers
# Time for the first prefill workers to start, after the first decode workers could take requests.
_PREFILL_SECONDS = 10.0
_RETRY_SECONDS = 1.0

logger = logging.getLogger(__name__)


class Readiness:
    """Readiness of one model of a router.

    It is ready from the first moment at which a request could be placed until none could for
    `hold_seconds`: a router that became unready at once would, with all workers down for a moment,
    leave its clients with a refused connection instead of an error that names the reason.

    Args:
        why_none: returns the reason why no request could be placed now, as a sentence; empty if one
            could. Its argument: the request needs a prefill worker.
        max_waiting: maximum number of requests that wait for the first workers; more are rejected.
        needs_workers: False: it is ready without workers, too.
        hold_seconds: seconds without a placeable request after which it is not ready any more.

    Attributes:
        num_waiting: requests that wait for the first workers.
    """

    def __init__(
        self,
        why_none: Callable[[bool], str],
        max_waiting: int = MAX_WAITING,
        *,
        needs_workers: bool = True,
        hold_seconds: float = HOLD_SECONDS,
        clock: Clock = time.monotonic,
    ) -> None:
        self.num_waiting = 0
        self._why_none = why_none
        self._max_waiting = max_waiting
        self._needs_workers = needs_workers
        self._hold_seconds = hold_seconds
        self._clock = clock
        self._reason = "the workers are not known yet"
        self._first_at: float | None = None
        self._last_at: float | None = None
        # Set once a request could be placed, by whether it needs a prefill worker.
        self._first = {False: asyncio.Event(), True: asyncio.Event()}
        self._is_draining = False

    @property
    def reason(self) -> str:
        """Reason why the router is not ready, as a sentence; empty if it is."""
        last = self._last_at
        is_held = last is not None and self._clock() - last < self._hold_seconds
        return self._reason if self._needs_workers and not is_held else ""

    @property
    def had_workers(self) -> bool:
        """Whether a request could be placed at any time since the start."""
        return self._first[False].is_set()

    def update(self) -> None:
        """Checks whether a request could be placed now, and releases the requests that wait."""
        now = self._clock()
        self._reason = self._why_none(False)
        if not self._reason:
            self._last_at = now
            self._first_at = now if self._first_at is None else self._first_at
            self._first[False].set()
        if self._first_at is None or self._first[True].is_set():
            return
        if now - self._first_at >= _PREFILL_SECONDS or not self._why_none(True):
            self._first[True].set()

    async def wait_for_workers(self, deadline: Deadline, *, needs_prefill: bool = False) -> None:
        """Waits until the first workers of a router that has just started can take a request;
        returns immediately ever after, since later a request without workers fails over.

        Raises `OverloadedError` if too many requests wait, `DeadlineExceededError` with the missing
        role, and `UnavailableError` if the router drains meanwhile.
        """
        first = self._first[needs_prefill]
        if first.is_set():
            return
        self.update()
        if first.is_set():
            return
        if self.num_waiting >= self._max_waiting:
            raise OverloadedError(
                f"{self.num_waiting} requests wait at this router already, for its first workers",
                _RETRY_SECONDS,
                reason="queue",
            )
        self.num_waiting += 1
        try:
            async with asyncio.timeout(deadline.remaining()):
                await first.wait()
        except TimeoutError:
            raise DeadlineExceededError(
                "the request's deadline has passed while it waited for the first workers: "
                f"{self._why_none(needs_prefill)}"
            ) from None
        finally:
            self.num_waiting -= 1
        if self._is_draining:
            raise UnavailableError("the router is draining; another one will serve this")

    async def drain(self) -> None:
        """Ends the requests that wait for the first workers."""
        self._is_draining = True
        for first in self._first.values():
            first.set()


class RouterReadiness:
    """Readiness of one router: it is ready while one of its models is.

    So the workers of one model, where they are all down, take no router out of service that has
    other models to serve.

    Args:
        of: readiness of each model, by its name.
    """

    def __init__(self, of: Mapping[str, Readiness]) -> None:
        self._of = of

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the first workers of their model."""
        return sum(one.num_waiting for one in self._of.values())

    @property
    def reason(self) -> str:
        """Reason why the router is not ready, as a sentence; empty if it is."""
        reasons = {model: one.reason for model, one in self._of.items()}
        if not all(reasons.values()):
            return ""
        if len(set(reasons.values())) == 1:
            return next(iter(reasons.values()))
        return "; ".join(f"{model}: {reason}" for model, reason in reasons.items())

    async def run(self, set_ready: Callable[[bool], Awaitable[None]]) -> NoReturn:
        """Calls `set_ready` with each change of readiness, until cancelled."""
        was_ready = False
        while True:
            for one in self._of.values():
                one.update()
            is_ready = not self.reason
            if is_ready != was_ready:
                logger.info("ready" if is_ready else f"not ready: {self.reason}")
                await set_ready(is_ready)
                was_ready = is_ready
            is_first = not any(one.had_workers for one in self._of.values())
            await asyncio.sleep(_FIRST_POLL_SECONDS if is_first else _POLL_SECONDS)

    async def drain(self) -> None:
        """Ends the requests that wait for the first workers."""
        for one in self._of.values():
            await one.drain()
