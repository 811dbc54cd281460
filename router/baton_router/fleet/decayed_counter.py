"""Exponentially decayed token count, with a half-life of 10 minutes.

Knows nothing of workers, and of time only what it is told.
"""

import math

HALF_LIFE = 600.0  # seconds; long beside a request, short beside a working day
_STEP = 5.0  # seconds in which hardly anything fades


def coarse(now: float) -> float:
    """The moment to look at in place of `now`, so that what has hardly faded looks the same: a
    snapshot of it need not be recorded, nor made, anew each time."""
    return now // _STEP * _STEP


class DecayedCounter:
    """Tokens, of which half are forgotten in each half-life. The moments of `add` never go back."""

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._half_life = half_life
        self._tokens = 0.0
        self._at = 0.0

    def add(self, num_tokens: float, now: float) -> None:
        self._tokens = self.value(now) + num_tokens
        self._at = now

    def value(self, now: float) -> float:
        """What is left of all that was added."""
        return self._tokens * math.exp2((self._at - now) / self._half_life)
