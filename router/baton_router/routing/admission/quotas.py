"""Per-tenant quotas: concurrency, and a long-term rate of tokens.

The file has one line per tenant and one (`*`) for all others; a bound that a line omits has its
default, and `#` begins a comment:

    gold    weight=4
    batch   weight=0.5 max_concurrent=8 tokens_per_second=2000
    *       max_concurrent=32 requests_per_minute=600

Requests over `max_concurrent` or `tokens_per_second` wait; requests over a limit per minute are
rejected (`baton_router.routing.admission.rate_limit`). Awaits nothing; the caller passes the clock.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from baton.errors import FailedPreconditionError
from baton.serving.deadline import Clock
from baton.settings import setting
from baton_router.routing.admission.token_bucket import TokenBucket

OTHERS = "*"

# Burst after an idle period, in seconds of the tenant's `tokens_per_second`.
_BURST_SECONDS = 10.0
# Number of usages below which unused ones are not looked for and evicted.
_FEW = 1024


@dataclass(frozen=True, slots=True)
class Quota:
    """Quota of one tenant: its fair-queueing weight and its limits.

    Attributes:
        weight: share of the tokens relative to other tenants with queued requests.
        max_concurrent: maximum requests in flight; None: unlimited.
        tokens_per_second: long-term rate of prompt and output tokens; None: unlimited.
        requests_per_minute, tokens_per_minute, bytes_per_minute: rate limits; None: unlimited.
    """

    weight: float = 1.0
    max_concurrent: int | None = None
    tokens_per_second: float | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    bytes_per_minute: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultRates:
    """Rate limits of each router, for tenants whose quota gives no other."""

    requests_per_minute: int = setting(
        60_000,
        "Rate limit of each router: requests per tenant and minute, for tenants to which --quotas "
        "gives no other. 0: no limit. The default, a thousand a second, is about what one router "
        "serves: it refuses floods only.",
        ge=0,
    )
    tokens_per_minute: int = setting(
        60_000_000,
        "Rate limit of each router: tokens of prompts and answers per tenant and minute, as "
        "--requests-per-minute. A request in flight counts with its maximum answer. The default, a "
        "million a second, is more than one router tokenizes.",
        ge=0,
    )
    bytes_per_minute: int = setting(
        256 * 2**20,
        "Rate limit of each router: bytes of requests per tenant and minute, valid or not, as "
        "--requests-per-minute. The default is 32 of the largest HTTP bodies, or the text of "
        "--tokens-per-minute.",
        ge=0,
    )

    @property
    def quota(self) -> Quota:
        """Quota with these limits; 0 is none."""
        return Quota(
            requests_per_minute=self.requests_per_minute or None,
            tokens_per_minute=self.tokens_per_minute or None,
            bytes_per_minute=self.bytes_per_minute or None,
        )


class _Usage:
    """Quota usage of one tenant: requests in flight and its token bucket.

    Prompt tokens are charged on admission, output tokens at the request's end, when their number
    is known. So the bucket may become negative; the tenant then waits until it has refilled.
    """

    def __init__(self, quota: Quota, clock: Clock) -> None:
        self.num_in_flight = 0
        self._quota = quota
        rate = quota.tokens_per_second
        self._bucket = None if rate is None else TokenBucket(rate * _BURST_SECONDS, rate, clock)

    @property
    def seconds_until_available(self) -> float:
        """Seconds until the tenant may use tokens again; 0 if it may now."""
        return 0.0 if self._bucket is None else self._bucket.seconds_until(0.0)

    @property
    def is_unused(self) -> bool:
        """Whether it equals a new one."""
        return not self.num_in_flight and (self._bucket is None or self._bucket.is_full)

    @property
    def is_admissible(self) -> bool:
        most = self._quota.max_concurrent
        return (most is None or self.num_in_flight < most) and not self.seconds_until_available

    def charge(self, num_tokens: int) -> None:
        if self._bucket is not None:
            self._bucket.refund(-num_tokens)


_UNBOUNDED = Quota()


class Quotas:
    """Quotas of all tenants; a tenant without an entry has the default quota."""

    def __init__(
        self,
        of: Mapping[str, Quota] = MappingProxyType({}),
        default: Quota = _UNBOUNDED,
        clock: Clock = time.monotonic,
    ) -> None:
        self._of = of
        self._default = default
        self._clock = clock
        self._usages: dict[str, _Usage] = {}
        self._most_usages = _FEW

    @classmethod
    def read(cls, path: Path, default: Quota = _UNBOUNDED) -> Self:
        """Reads the quotas from a file; bounds that it omits are as in `default`.

        Raises `FailedPreconditionError` that names the line that cannot be read.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FailedPreconditionError(f"cannot read quotas: {error}") from error
        of: dict[str, Quota] = {}
        for number, line in enumerate(lines, 1):
            tenant, *bounds = line.partition("#")[0].split() or [""]
            try:
                if tenant in of:
                    raise ValueError(f"{tenant} has a line already")
                if tenant:
                    of[tenant] = _quota(bounds, default)
            except ValueError as error:
                raise FailedPreconditionError(f"{path}:{number}: {error}") from None
        return cls(of, of.pop(OTHERS, default))

    @property
    def named(self) -> Collection[str]:
        """Tenants with a quota of their own."""
        return self._of.keys()

    def of(self, tenant: str) -> Quota:
        return self._of.get(tenant, self._default)

    def weight_of(self, tenant: str) -> float:
        return self.of(tenant).weight

    @property
    def num_kept(self) -> int:
        """Number of tenants with requests in flight, or with a rate that is not whole."""
        return len(self._usages)

    def is_admissible(self, tenant: str) -> bool:
        """Returns whether the tenant may have one more request in flight now."""
        return self._usage(tenant).is_admissible

    def seconds_until_available(self, tenant: str) -> float:
        """Returns the seconds for which the tenant's token rate alone delays its next request."""
        return self._usage(tenant).seconds_until_available

    def enter(self, tenant: str, num_prompt_tokens: int) -> None:
        """Counts a request of the tenant as in flight and charges its prompt tokens."""
        if tenant not in self._usages and len(self._usages) >= self._most_usages:
            self._forget_unused()
        usage = self._usages[tenant] = self._usage(tenant)
        usage.num_in_flight += 1
        usage.charge(num_prompt_tokens)

    def leave(self, tenant: str, num_output_tokens: int) -> None:
        """Counts a request of the tenant as ended and charges its output tokens."""
        usage = self._usages[tenant]
        usage.num_in_flight -= 1
        usage.charge(num_output_tokens)
        if not usage.num_in_flight and self.of(tenant).tokens_per_second is None:
            del self._usages[tenant]

    def _usage(self, tenant: str) -> _Usage:
        return self._usages.get(tenant) or _Usage(self.of(tenant), self._clock)

    def _forget_unused(self) -> None:
        """Evicts usages that equal new ones: tenants come and go, memory is bounded."""
        for tenant in [tenant for tenant, usage in self._usages.items() if usage.is_unused]:
            del self._usages[tenant]
        self._most_usages = max(_FEW, 2 * len(self._usages))


_WHOLE = {"max_concurrent", "requests_per_minute", "tokens_per_minute", "bytes_per_minute"}
_NAMES = [field.name for field in fields(Quota)]


def _quota(bounds: list[str], default: Quota) -> Quota:
    """Parses bounds of the form "name=number". Raises `ValueError` that names the wrong one."""
    known: dict[str, Any] = {}
    for bound in bounds:
        name, _, text = bound.partition("=")
        if name not in _NAMES:
            raise ValueError(f"{bound!r} is none of {', '.join(f'{name}=' for name in _NAMES)}")
        try:
            known[name] = int(text) if name in _WHOLE else float(text)
        except ValueError:
            raise ValueError(f"{name} is {text!r}; must be a number") from None
        if not 0 < known[name] < float("inf"):
            raise ValueError(f"{name} is {text}; must be above 0")
    return replace(default, **known)
