"""Exponential backoff with jitter. Pure; the caller may pass the source of randomness."""

import random
from collections.abc import Callable
from dataclasses import dataclass

Chance = Callable[[], float]
"""Random number in [0, 1), a new one per call."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff: doubles with each failure up to a limit, with equal jitter.

    Attributes:
        first, longest: upper bound of the first and of the longest delay, in seconds.
    """

    first: float
    longest: float
    chance: Chance = random.random

    def delay(self, num_failures: int) -> float:
        """Returns the seconds to wait after `num_failures` in a row, at least 1: half of the whole
        delay plus a random part of the other half."""
        whole = min(self.longest, self.first * 2.0 ** min(num_failures - 1, 60))
        return whole * (1.0 + self.chance()) / 2.0
