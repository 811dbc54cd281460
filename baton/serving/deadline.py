"""The time a request has left, on its way from hop to hop. Knows nothing of what is done in it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from baton.errors import DeadlineExceededError

Clock = Callable[[], float]

MIN_FORWARDED = 0.001
FORWARD_MARGIN = 0.05


class TimeLimited(Protocol):
    """A call that may have a time limit, such as `grpc.aio.ServicerContext`."""

    def time_remaining(self) -> float | None:
        """Seconds left, or None without a limit."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment after which a request's result is of no use to anyone.

    Attributes:
        expires_at: the moment, on `clock`.
        clock: monotonic seconds.
    """

    expires_at: float
    clock: Clock = time.monotonic

    @classmethod
    def of(cls, context: TimeLimited, default: float, clock: Clock = time.monotonic) -> Self:
        """The deadline of a call, or `default` seconds from now where its caller set none."""
        remaining = context.time_remaining()
        return cls.after(default if remaining is None else remaining, clock)

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Self:
        """The deadline `seconds` from now."""
        return cls(clock() + seconds, clock)

    def remaining(self) -> float:
        """Seconds left, 0 once expired."""
        return max(0.0, self.expires_at - self.clock())

    @property
    def expired(self) -> bool:
        return self.remaining() == 0.0

    def check(self) -> None:
        """Raises `DeadlineExceededError` once expired. Call it before work that costs compute."""
        if self.expired:
            raise DeadlineExceededError("the request's deadline has passed")

    def may_have_ended(self, margin: float = FORWARD_MARGIN) -> bool:
        """Whether a call it was forwarded to can have ended by it, on the other side, by now."""
        return self.remaining() <= 2 * margin

    def forward(self, margin: float = FORWARD_MARGIN) -> float:
        """The timeout in seconds for a call to the next hop, always positive.

        `margin` seconds are kept for the way back, so that this hop can still answer when the next
        one runs out of time. gRPC tells the next hop up to a percent more than this, rounding up,
        but ends the call here on time. Raises `DeadlineExceededError` once expired.
        """
        self.check()
        return max(self.remaining() - margin, MIN_FORWARDED)
