"""Retry budget: the ratio of retries to requests that a router may make. Awaits nothing; its clock
is given.

When much fails at once, trying again can be what keeps it failing. So each try after a request's
first one is paid for: requests pay a share of a try in, and some come with time.
"""

import time

from baton.serving.deadline import Clock
from baton_router.admission.token_bucket import TokenBucket

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
        self._bucket = TokenBucket(largest, per_second, clock)

    @property
    def balance(self) -> float:
        """Tries that may be made now."""
        return self._bucket.level

    def deposit(self) -> None:
        """A request has come."""
        self._bucket.give_back(self._share)

    def withdraw(self) -> bool:
        """Whether one more try may be made; it is then paid for."""
        if self._bucket.level < 1.0:
            return False
        self._bucket.take(1.0)
        return True
