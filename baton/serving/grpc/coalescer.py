"""Coalescing window of one stream: at most one message per interval, with all tokens since the
last.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

# Imperceptible, and long enough that a fast stream sends a tenth of the messages.
INTERVAL_SECONDS = 0.001


class Coalescer:
    """Rate limit of one stream: a message per `seconds` at most. A slower stream never waits.

    With 0 seconds no stream waits, and nothing is coalesced. `clock` and `sleep`: in seconds.
    """

    def __init__(
        self,
        seconds: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._next = 0.0

    @property
    def wait(self) -> float:
        """Seconds until the next message may be sent; 0 or less if it may be sent now."""
        return self._next - self._clock()

    async def acquire(self) -> None:
        """Waits until the next message may be sent, and counts it as sent."""
        wait = self.wait
        if wait > 0:
            await self._sleep(wait)
        self._next = self._clock() + self.seconds
