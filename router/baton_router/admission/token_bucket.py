"""A token bucket: so much at once, and so much in the long run. Pure; its clock is given.

In any stretch of t seconds no more than `capacity + rate * t` is taken and not given back.
"""

import math

from baton.serving.deadline import Clock

# Of its capacity: what sums of fractions may be wrong by.
_SLACK = 1e-9


class TokenBucket:
    """Full at first.

    Attributes:
        capacity: what may be taken at once.
        rate: what flows in, in a second.
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
        """What may be taken now; below 0 while more is owed than has flowed in."""
        self._fill()
        return self._level

    @property
    def is_full(self) -> bool:
        return self.level >= self.capacity

    def seconds_until(self, amount: float) -> float:
        """How long until so much, at most the capacity, may be taken; 0 if it may now."""
        missing = min(amount, self.capacity) - self.level
        if missing <= _SLACK * self.capacity:
            return 0.0
        return missing / self.rate if self.rate else math.inf

    def take(self, amount: float) -> None:
        """Takes what may be taken now (`seconds_until` is 0)."""
        assert self.seconds_until(amount) == 0.0, "it is not there yet"
        self._level = max(0.0, self._level - amount)

    def give_back(self, amount: float) -> None:
        """Of what was taken; below 0: what was used beyond it, which is owed."""
        self._fill()
        self._level = min(self.capacity, self._level + amount)

    def _fill(self) -> None:
        now = self._clock()
        gained = self.rate * max(0.0, now - self._seen)
        self._level, self._seen = min(self.capacity, self._level + gained), now
