"""Per-tenant rate limits, in requests, bytes and tokens per minute, as token buckets. Over a limit:
`RateLimitedError` with a retry-after.

Each request takes one from the request limit, and its size from the byte limit. From the token
limit it reserves its prompt and its longest possible output; the unused rest is returned at its
end. A request that may exceed a minute's tokens reserves all of them, and what it uses beyond is a
debt. Awaits nothing; the caller passes the clock. Limits that queue requests instead are in
`baton_router.routing.admission.quotas`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from baton.errors import OverloadedError
from baton.serving.deadline import Clock
from baton_router.call.request import RequestOutcome
from baton_router.routing.admission.quotas import Quota
from baton_router.routing.admission.token_bucket import TokenBucket

MINUTE = 60.0
# Number of buckets below which full ones are not looked for and evicted.
_FEW = 1024

Kind = Literal["requests", "tokens", "bytes"]
KINDS: tuple[Kind, ...] = ("requests", "tokens", "bytes")


@dataclass(frozen=True, slots=True)
class RateLimitStatus:
    """Status of one limit of a tenant.

    Attributes:
        limit: requests, tokens or bytes per minute, also the burst after an idle period.
        remaining: requests, tokens or bytes that may be taken now.
        reset_seconds: seconds until the whole limit is available again.
    """

    limit: int
    remaining: int
    reset_seconds: float


class RateLimitedError(OverloadedError):
    """Rejection of a request whose tenant is over a rate limit.

    Attributes:
        statuses: the tenant's limits, by kind.
    """

    def __init__(
        self, message: str, retry_after: float, kind: Kind, statuses: dict[Kind, RateLimitStatus]
    ) -> None:
        super().__init__(message, retry_after, reason=f"{kind}_per_minute")
        self.statuses = statuses


class TokenReservation:
    """Reservation of the most tokens that one request may use, held until its end."""

    def __init__(self, bucket: TokenBucket | None, num_tokens: float) -> None:
        self._bucket = bucket
        self._num_tokens = num_tokens

    def end(self, outcome: RequestOutcome) -> None:
        """Returns the unused tokens to the limit once the request has ended."""
        if self._bucket is not None:
            self._bucket.refund(self._num_tokens - outcome.num_tokens)


class RateLimits:
    """Rate limits of all tenants, at one router."""

    def __init__(self, quota_of: Callable[[str], Quota], clock: Clock = time.monotonic) -> None:
        self._quota_of = quota_of
        self._clock = clock
        self._buckets: dict[tuple[str, Kind], TokenBucket] = {}
        self._most_buckets = _FEW

    def check(self, tenant: str) -> None:
        """Raises `RateLimitedError` if the limit of requests, or that of bytes, allows no request
        now. Takes nothing."""
        kinds: tuple[Kind, ...] = ("requests", "bytes")
        for kind in kinds:
            bucket = self._bucket(tenant, kind)
            if bucket is not None:
                self._check(bucket, tenant, kind, 1)

    def count_request(self, tenant: str) -> None:
        """Takes one from the request limit. Raises `RateLimitedError` if it is exceeded."""
        self.check(tenant)
        bucket = self._bucket(tenant, "requests")
        if bucket is not None:
            bucket.take(1)

    def count_bytes(self, tenant: str, num_bytes: int) -> None:
        """Takes the size of a request, a minute's worth at most, from the byte limit. Raises
        `RateLimitedError` if it is exceeded."""
        bucket = self._bucket(tenant, "bytes")
        if bucket is not None:
            taken = min(num_bytes, bucket.capacity)
            self._check(bucket, tenant, "bytes", taken)
            bucket.take(taken)

    def reserve(self, tenant: str, num_tokens: int) -> "TokenReservation":
        """Reserves `num_tokens`, the most that a request may use; the reservation returns the
        unused ones when it ends.

        Raises `RateLimitedError` if the token limit does not allow them now.
        """
        bucket = self._bucket(tenant, "tokens")
        if bucket is None:
            return TokenReservation(None, 0.0)
        reserved = min(num_tokens, bucket.capacity)
        self._check(bucket, tenant, "tokens", reserved)
        bucket.take(reserved)
        return TokenReservation(bucket, reserved)

    def statuses(self, tenant: str) -> dict[Kind, RateLimitStatus]:
        """Returns the status of each limit that the tenant has."""
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
            raise RateLimitedError(
                f"tenant {tenant!r} may have {bucket.capacity:.0f} {kind} in a minute; this one "
                f"fits in {wait:.3g} s",
                wait,
                kind,
                self.statuses(tenant),
            )

    def _bucket(self, tenant: str, kind: Kind) -> TokenBucket | None:
        """Returns the tenant's bucket, made on first use; None if it has no limit of this kind."""
        quota = self._quota_of(tenant)
        most = {
            "requests": quota.requests_per_minute,
            "tokens": quota.tokens_per_minute,
            "bytes": quota.bytes_per_minute,
        }[kind]
        if most is None:
            return None
        found = self._buckets.get((tenant, kind))
        if found is None:
            if len(self._buckets) >= self._most_buckets:
                self._forget_full_ones()
            found = self._buckets[tenant, kind] = TokenBucket(most, most / MINUTE, self._clock)
        return found

    def _forget_full_ones(self) -> None:
        """Evicts full buckets, which equal new ones: tenants come and go, memory is bounded."""
        for key in [key for key, bucket in self._buckets.items() if bucket.is_full]:
            del self._buckets[key]
        self._most_buckets = max(_FEW, 2 * len(self._buckets))
