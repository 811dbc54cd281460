"""Coalescing window of one stream: at most one message per interval, with all tokens since the
last.
"""

import asyncio
import time

# Far below what anybody sees, and long enough that a fast stream sends a tenth of the messages.
INTERVAL_SECONDS = 0.001


class Coalescer:
    """Lets a stream send at most once in `seconds`. One that is slower never waits.

    Zero: nothing waits, and nothing is to be gathered.
    """

    def __init__(self, seconds: float = INTERVAL_SECONDS) -> None:
        self.seconds = seconds
        self._next = 0.0

    @property
    def wait(self) -> float:
        """Seconds until something may be sent again; not above 0 where it may now."""
        return self._next - time.monotonic()

    async def turn(self) -> None:
        """Waits until something may be sent again, and counts it as sent."""
        wait = self.wait
        if wait > 0:
            await asyncio.sleep(wait)
        self._next = time.monotonic() + self.seconds
