"""Per-tenant rate limits, in requests and tokens per minute, as token buckets. Over a limit:
`RateLimitedError` with a retry-after.

A request counts as one, and as its tokens: those of its prompt and of the longest answer that it
may get, of which is given back what was not used once it has ended. One that may come to more than
a minute's tokens needs all of them, and what it uses beyond is owed. Awaits nothing; its clock is
given. `baton_router.admission.quotas` has what makes requests wait instead.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from baton.errors import OverloadedError
from baton.serving.deadline import Clock
from baton_router.admission.quotas import Quota
from baton_router.admission.token_bucket import TokenBucket
from baton_router.request import RequestOutcome

MINUTE = 60.0
# Up to so many buckets none is looked at to be forgotten.
_FEW = 1024

Kind = Literal["requests", "tokens"]
KINDS: tuple[Kind, ...] = ("requests", "tokens")


@dataclass(frozen=True, slots=True)
class RateLimitStatus:
    """Status of one limit of a tenant.

    Attributes:
        limit: in a minute, and at once after a pause.
        remaining: that may be taken now.
        reset_seconds: until all of it may.
    """

    limit: int
    remaining: int
    reset_seconds: float


class RateLimitedError(OverloadedError):
    """The tenant is over its limit.

    Attributes:
        standings: its limits, by what they are of.
    """

    def __init__(
        self, message: str, retry_after: float, statuses: dict[Kind, RateLimitStatus]
    ) -> None:
        super().__init__(message, retry_after)
        self.statuses = statuses


class TokenReservation:
    """Tokens that one request may come to, taken from its tenant's limit until its end."""

    def __init__(self, bucket: TokenBucket | None, num_tokens: float) -> None:
        self._bucket = bucket
        self._num_tokens = num_tokens

    def end(self, outcome: RequestOutcome) -> None:
        """The request has ended."""
        if self._bucket is not None:
            self._bucket.give_back(self._num_tokens - outcome.num_tokens)


class RateLimits:
    """Those of all tenants, of one router.

    Attributes:
        num_refused: requests, by their tenant and what there were too many of.
    """

    def __init__(self, quota_of: Callable[[str], Quota], clock: Clock = time.monotonic) -> None:
        self.num_refused: Counter[tuple[str, Kind]] = Counter()
        self._quota_of = quota_of
        self._clock = clock
        self._buckets: dict[tuple[str, Kind], TokenBucket] = {}
        self._most_buckets = _FEW

    def check(self, tenant: str) -> None:
        """Raises `RateLimitedError` if not even one request would be let in now. Counts nothing."""
        bucket = self._bucket(tenant, "requests")
        if bucket is not None:
            self._check(bucket, tenant, "requests", 1)

    def count_request(self, tenant: str) -> None:
        """One has come. Raises `RateLimitedError` if it is one too many."""
        self.check(tenant)
        bucket = self._bucket(tenant, "requests")
        if bucket is not None:
            bucket.take(1)

    def reserve(self, tenant: str, num_tokens: int) -> "TokenReservation":
        """Takes the tokens that a request may come to; what it did not use is given back when the
        reservation ends.

        Raises `RateLimitedError` if they are too many now.
        """
        bucket = self._bucket(tenant, "tokens")
        if bucket is None:
            return TokenReservation(None, 0.0)
        reserved = min(num_tokens, bucket.capacity)
        self._check(bucket, tenant, "tokens", reserved)
        bucket.take(reserved)
        return TokenReservation(bucket, reserved)

    def statuses(self, tenant: str) -> dict[Kind, RateLimitStatus]:
        """The limits that the tenant has."""
        found: dict[Kind, RateLimitStatus] = {}
        for kind in KINDS:
            bucket = self._bucket(tenant, kind)
            if bucket is not None:
                wait = bucket.seconds_until(bucket.capacity)
                found[kind] = RateLimitStatus(int(bucket.capacity), max(0, int(bucket.level)), wait)
        return found

    def _check(self, bucket: TokenBucket, tenant: str, kind: Kind, amount: float) -> None:
        wait = bucket.seconds_until(amount)
        if wait > 0.0:
            self.num_refused[tenant, kind] += 1
            raise RateLimitedError(
                f"tenant {tenant!r} may have {bucket.capacity:.0f} {kind} in a minute; this one "
                f"fits in {wait:.3g} s",
                wait,
                self.statuses(tenant),
            )

    def _bucket(self, tenant: str, kind: Kind) -> TokenBucket | None:
        """None: there is no limit."""
        quota = self._quota_of(tenant)
        most = quota.requests_per_minute if kind == "requests" else quota.tokens_per_minute
        if most is None:
            return None
        found = self._buckets.get((tenant, kind))
        if found is None:
            if len(self._buckets) >= self._most_buckets:
                self._forget_full_ones()
            found = self._buckets[tenant, kind] = TokenBucket(most, most / MINUTE, self._clock)
        return found

    def _forget_full_ones(self) -> None:
        """Tenants may come and go; a bucket that is full is like a new one."""
        for key in [key for key, bucket in self._buckets.items() if bucket.is_full]:
            del self._buckets[key]
        self._most_buckets = max(_FEW, 2 * len(self._buckets))
