"""The background loop of everything that talks to Redis.

Redis may be gone, slow or wrong at any time, and nothing here may fail for it: a step that raises
is repeated later, and the log says so once when trouble starts and once when it ends. Knows nothing
of what a step does.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

_FIRST_BACKOFF = 0.1  # seconds
_LONGEST_BACKOFF = 2.0
_PATIENCE = 0.05  # before cancelling again: redis-py, while it connects, may swallow it

_logger = logging.getLogger(__name__)


class RedisLoop:
    """Repeats a step until stopped, whatever the step raises.

    Args:
        name: what the loop does, for the log, such as "registry watcher".
        step: makes its round trips, each bounded in time, and returns the seconds to rest after.
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
        """When the unbroken run of good steps began (`time.monotonic`); None while there is none.

        A step sees the state that the step before it left.
        """
        return self._answering_since

    @property
    def staleness(self) -> float:
        """Seconds since the last good step, or since there should have been one, while steps fail;
        0 while they do not."""
        if self._answering_since is not None:
            return 0.0
        return time.monotonic() - self._answered_at

    def start(self) -> None:
        """Begins at once. Needs a running event loop; starting twice is a mistake."""
        assert self._task is None, f"the {self._name} is running already"
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Returns when no step is running and none will. Does nothing if not started."""
        task, self._task = self._task, None
        while task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=_PATIENCE)

    def wake(self) -> None:
        """Ends the rest after a good step. A pause after a failed one stays as long as it is."""
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                rest = await self._step()
            except Exception as error:
                await asyncio.sleep(self._failed(error))
            else:
                self._succeeded()
                await self._rest(rest)

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _succeeded(self) -> None:
        if self._num_failures:
            _logger.warning("%s: Redis answers again", self._name)
        self._answered_at = time.monotonic()
        if self._answering_since is None:
            self._answering_since = self._answered_at
        self._num_failures = 0

    def _failed(self, error: Exception) -> float:
        """Notes the failure; returns the seconds to wait, jittered so that a fleet spreads out."""
        if not self._num_failures:
            bug = None if isinstance(error, RedisError | OSError) else error
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            _logger.warning("%s: going on without Redis: %s", self._name, what, exc_info=bug)
        self._answering_since = None
        backoff = min(_FIRST_BACKOFF * 2.0**self._num_failures, _LONGEST_BACKOFF)
        self._num_failures = min(self._num_failures + 1, 16)
        return backoff * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, keeps no secret
