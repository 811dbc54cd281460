"""How many more tries a router may make than it has requests. Awaits nothing; its clock is given.

When much fails at once, trying again can be what keeps it failing. So each try after a request's
first one is paid for: requests pay a share of a try in, and some come with time.
"""

import time

from baton.serving.deadline import Clock

SHARE = 0.25
PER_SECOND = 4.0
# As many as a large decode worker may have run: they all may move when it dies.
LARGEST = 512.0


class RetryBudget:
    """A bucket of tries, full at first."""

    def __init__(
        self,
        *,
        share: float = SHARE,
        per_second: float = PER_SECOND,
        largest: float = LARGEST,
        clock: Clock = time.monotonic,
    ) -> None:
        self._share = share
        self._per_second = per_second
        self._largest = largest
        self._clock = clock
        self._saved = largest
        self._seen = clock()

    @property
    def balance(self) -> float:
        """Tries that may be made now."""
        return min(
            self._largest, self._saved + self._per_second * max(0.0, self._clock() - self._seen)
        )

    def deposit(self) -> None:
        """A request has come."""
        self._settle(self._share)

    def withdraw(self) -> bool:
        """Whether one more try may be made; it is then paid for."""
        if self.balance < 1.0:
            return False
        self._settle(-1.0)
        return True

    def _settle(self, change: float) -> None:
        self._saved = min(self._largest, self.balance + change)
        self._seen = self._clock()
