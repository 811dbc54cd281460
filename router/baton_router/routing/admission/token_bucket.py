"""Token bucket: a rate limit with a burst. Pure; the caller passes the clock.

In any interval of t seconds at most `capacity + rate * t` is taken and not given back.
"""

import math

from baton.serving.deadline import Clock

# Tolerance for floating-point rounding, as a fraction of the capacity.
_SLACK = 1e-9


class TokenBucket:
    """Token bucket that starts full.

    Attributes:
        capacity: tokens that may be taken at once (the burst).
        rate: tokens that it refills per second.
    """

    def __init__(self, capacity: float, rate: float, clock: Clock) -> None:
        assert capacity >= 0
        assert rate >= 0
        self.capacity = capacity
        self.rate = rate
        self._clock = clock
        self._level = capacity
        self._seen = clock()

    @property
    def level(self) -> float:
        """Tokens that may be taken now; negative while debt exceeds the refill."""
        self._fill()
        return self._level

    @property
    def is_full(self) -> bool:
        return self.level >= self.capacity

    def seconds_until(self, amount: float) -> float:
        """Returns the seconds until `amount`, capped at the capacity, may be taken; 0 if now."""
        missing = min(amount, self.capacity) - self.level
        if missing <= _SLACK * self.capacity:
            return 0.0
        return missing / self.rate if self.rate else math.inf

    def take(self, amount: float) -> None:
        """Takes `amount`, which must be available now (`seconds_until` returns 0)."""
        assert self.seconds_until(amount) == 0.0, "it is not there yet"
        self._level = max(0.0, self._level - amount)

    def refund(self, amount: float) -> None:
        """Returns `amount` of the tokens taken; a negative amount was used beyond them: a debt."""
        self._fill()
        self._level = min(self.capacity, self._level + amount)

    def _fill(self) -> None:
        now = self._clock()
        gained = self.rate * max(0.0, now - self._seen)
        self._level, self._seen = min(self.capacity, self._level + gained), now
