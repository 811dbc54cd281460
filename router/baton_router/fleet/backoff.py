"""Exponential backoff with jitter. Pure; randomness is given."""

import random
from collections.abc import Callable
from dataclasses import dataclass

Chance = Callable[[], float]
"""A number in [0, 1), another one each time."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Twice as long each time, up to a limit, and never as long as others wait.

    Attributes:
        first, longest: seconds.
    """

    first: float
    longest: float
    chance: Chance = random.random

    def delay(self, num_failures: int) -> float:
        """Seconds to wait after so many failures in a row, at least 1: half of the whole wait, and
        a random part of the other half."""
        whole = min(self.longest, self.first * 2.0 ** min(num_failures - 1, 60))
        return whole * (1.0 + self.chance()) / 2.0
