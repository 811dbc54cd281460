"""Retry budget: the ratio of retries to requests that a router may make. Awaits nothing; its clock
is given.

When much fails at once, retries can keep it failing. So each attempt after a request's first is
paid for: each request deposits a share of a retry, and some are added per second.
"""

import time

from baton.serving.deadline import Clock
from baton_router.routing.admission.token_bucket import TokenBucket

SHARE = 0.25
PER_SECOND = 4.0
# The requests of a large decode worker, all of which may be retried when it dies.
LARGEST = 512.0


class RetryBudget:
    """Token bucket of retries, full at first."""

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
        """Retries that may be made now."""
        return self._bucket.level

    def deposit(self) -> None:
        """Adds one request's share of a retry."""
        self._bucket.refund(self._share)

    def withdraw(self) -> bool:
        """Withdraws one retry; returns False if less than one is left."""
        if self._bucket.level < 1.0:
            return False
        self._bucket.take(1.0)
        return True
