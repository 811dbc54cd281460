"""Exponentially decayed token count, with a half-life of 10 minutes.

Independent of workers; the caller passes the time.
"""

import math

HALF_LIFE = 600.0  # seconds; long compared with a request, short compared with a working day
_STEP = 5.0  # seconds; the decay within one step is negligible


def coarse(now: float) -> float:
    """Returns `now` rounded down to a step, so that snapshots within one step are equal and need
    not be made or recorded again."""
    return now // _STEP * _STEP


class DecayedCounter:
    """Exponentially decayed sum of tokens. `now` must not decrease between calls of `add`."""

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._half_life = half_life
        self._tokens = 0.0
        self._at = 0.0

    def add(self, num_tokens: float, now: float) -> None:
        self._tokens = self.value(now) + num_tokens
        self._at = now

    def value(self, now: float) -> float:
        """Returns the decayed sum, in tokens, at time `now` in seconds."""
        return self._tokens * math.exp2((self._at - now) / self._half_life)
