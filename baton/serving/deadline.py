"""Deadline of a request, propagated from hop to hop. Independent of the work it limits."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, Self

from baton.errors import DeadlineExceededError

Clock = Callable[[], float]

MIN_FORWARDED = 0.001
FORWARD_MARGIN = 0.05


class TimeLimited(Protocol):
    """Call with an optional time limit, such as `grpc.aio.ServicerContext`."""

    def time_remaining(self) -> float | None:
        """Returns the seconds left; None without a limit."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Deadline of a request, after which its result is useless.

    Attributes:
        expires_at: the deadline, on `clock`.
        clock: monotonic seconds.
    """

    expires_at: float
    clock: Clock = time.monotonic

    @classmethod
    def of(cls, context: TimeLimited, default: float, clock: Clock = time.monotonic) -> Self:
        """Returns the deadline of a call; `default` seconds from now if its caller set none."""
        remaining = context.time_remaining()
        return cls.after(default if remaining is None else remaining, clock)

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Self:
        """Returns the deadline `seconds` from now."""
        return cls(clock() + seconds, clock)

    def remaining(self) -> float:
        """Returns the seconds left; 0 once expired."""
        return max(0.0, self.expires_at - self.clock())

    @property
    def expired(self) -> bool:
        return self.remaining() == 0.0

    def check(self) -> None:
        """Raises `DeadlineExceededError` once expired. Call it before work that costs compute."""
        if self.expired:
            raise _passed()

    @asynccontextmanager
    async def limit(self, grace: float = 0.0) -> AsyncIterator[None]:
        """Context manager that ends its block `grace` seconds after the deadline, and then raises
        `DeadlineExceededError`."""
        timeout = asyncio.timeout(self.remaining() + grace)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise _passed() from None

    def may_have_ended(self) -> bool:
        """Returns whether a call forwarded to the next hop may have reached its deadline there."""
        return self.remaining() <= 2 * FORWARD_MARGIN

    def forward(self, margin: float = FORWARD_MARGIN) -> float:
        """Returns the timeout in seconds for a call to the next hop; always positive.

        `margin` seconds are reserved for the way back, so that this hop can still answer when the
        next one times out. gRPC rounds the next hop's timeout up by as much as a percent, but ends
        the call here on time. Raises `DeadlineExceededError` once expired.
        """
        self.check()
        return max(self.remaining() - margin, MIN_FORWARDED)


def _passed() -> DeadlineExceededError:
    return DeadlineExceededError("the request's deadline has passed")
