"""Background loop for Redis clients, with retries.

A Redis outage must not stop the loop: it retries a failed step after a backoff with jitter, and
logs once when errors begin and once when they end. Independent of the step's work.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from baton.rpc.backoff import Backoff

_BACKOFF = Backoff(first=0.1, longest=2.0)
_CANCEL_INTERVAL = 0.05  # seconds before cancelling again: redis-py may swallow it while connecting

_logger = logging.getLogger(__name__)


class RedisLoop:
    """Loop that repeats a step until stopped, whatever the step raises.

    Args:
        name: name in the log, such as "registry watcher".
        step: makes round trips, each with a timeout, and returns the seconds to sleep afterwards.
    """

    def __init__(self, name: str, step: Callable[[], Awaitable[float]]) -> None:
        self._name = name
        self._step = step
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._answering_since: float | None = None
        self._answered_at = time.monotonic()
        self._num_failures = 0

    @property
    def answering_since(self) -> float | None:
        """Start of the current run of successful steps (`time.monotonic`); None after a failure.

        Within a step, it has the value that the previous step left.
        """
        return self._answering_since

    @property
    def staleness(self) -> float:
        """Seconds since the last successful step, or since the loop was made if there was none; 0
        while steps succeed."""
        if self._answering_since is not None:
            return 0.0
        return time.monotonic() - self._answered_at

    def start(self) -> None:
        """Starts the loop, which must not be running already. Needs a running event loop."""
        assert self._task is None, f"the {self._name} is running already"
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Stops the loop; returns once no step runs. Does nothing if not started."""
        task, self._task = self._task, None
        while task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=_CANCEL_INTERVAL)

    def wake(self) -> None:
        """Ends the sleep after a successful step early. Does not shorten a backoff."""
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                pause = await self._step()
            except Exception as error:
                await asyncio.sleep(self._record_failure(error))
            else:
                self._record_success()
                await self._sleep(pause)

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _record_success(self) -> None:
        if self._num_failures:
            _logger.warning("%s: Redis answers again", self._name)
        self._answered_at = time.monotonic()
        if self._answering_since is None:
            self._answering_since = self._answered_at
        self._num_failures = 0

    def _record_failure(self, error: Exception) -> float:
        """Counts the failure; returns the backoff in seconds, with jitter to spread a fleet."""
        if not self._num_failures:
            bug = None if isinstance(error, RedisError | OSError) else error
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            _logger.warning("%s: continuing without Redis: %s", self._name, text, exc_info=bug)
        self._answering_since = None
        self._num_failures += 1
        return _BACKOFF.delay(self._num_failures)
