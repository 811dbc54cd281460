"""Per-tenant quotas: concurrency, and a long-term rate of tokens.

Read from a file with a line for each tenant, and one for all others; what a line leaves out has its
default, and `#` begins a comment:

    gold    weight=4
    batch   weight=0.5 max_concurrent=8 tokens_per_second=2000
    *       max_concurrent=32 requests_per_minute=600

Beyond the first three requests wait; beyond those of a minute they are refused
(`baton_router.admission.rate_limit`). Awaits nothing; its clock is given.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from baton.errors import FailedPreconditionError
from baton.serving.deadline import Clock

OTHERS = "*"

# Seconds of its rate that a tenant may take at once after a pause.
_BURST_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant's share and bounds.

    Attributes:
        weight: its share of the tokens beside others that wait.
        max_concurrent: requests in flight; None: any number.
        tokens_per_second: of prompts and answers, in the long run; None: no bound.
        requests_per_minute, tokens_per_minute: that are let in; None: any number.
    """

    weight: float = 1.0
    max_concurrent: int | None = None
    tokens_per_second: float | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class _Balance:
    """Requests of one tenant in flight, and the tokens that it may use now.

    Tokens are paid for once they are known: a prompt's when it goes, an answer's when it has ended.
    So a balance may fall below zero; the tenant then waits until time has paid for it.
    """

    def __init__(self, quota: Quota, clock: Clock) -> None:
        self.num_in_flight = 0
        self._quota = quota
        self._clock = clock
        self._rate = quota.tokens_per_second
        self._saved = self._largest
        self._seen = clock()

    @property
    def _largest(self) -> float:
        return 0.0 if self._rate is None else self._rate * _BURST_SECONDS

    @property
    def seconds_until_paid(self) -> float:
        """How long until it may take tokens again; 0 if it may now."""
        if self._rate is None:
            return 0.0
        self._settle()
        return max(0.0, -self._saved / self._rate)

    @property
    def may_go(self) -> bool:
        most = self._quota.max_concurrent
        return (most is None or self.num_in_flight < most) and not self.seconds_until_paid

    def pay(self, num_tokens: int) -> None:
        self._settle()
        self._saved -= num_tokens

    def _settle(self) -> None:
        now = self._clock()
        earned = (self._rate or 0.0) * max(0.0, now - self._seen)
        self._saved, self._seen = min(self._largest, self._saved + earned), now


_UNBOUNDED = Quota()


class Quotas:
    """Those of all tenants; who is not named has the default one."""

    def __init__(
        self,
        of: Mapping[str, Quota] = MappingProxyType({}),
        default: Quota = _UNBOUNDED,
        clock: Clock = time.monotonic,
    ) -> None:
        self._of = of
        self._default = default
        self._clock = clock
        self._balances: dict[str, _Balance] = {}

    @classmethod
    def read(cls, path: Path, default: Quota = _UNBOUNDED) -> Self:
        """Of a file; what it does not say is as in `default`.

        Raises `FailedPreconditionError`, naming the line that cannot be read.
        """
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FailedPreconditionError(f"cannot read allowances: {error}") from error
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
        """The tenants that have an allowance of their own."""
        return self._of.keys()

    def of(self, tenant: str) -> Quota:
        return self._of.get(tenant, self._default)

    def weight_of(self, tenant: str) -> float:
        return self.of(tenant).weight

    def may_go(self, tenant: str) -> bool:
        """Whether it may have one more request in flight now."""
        return self._balance(tenant).may_go

    def seconds_until_paid(self, tenant: str) -> float:
        """How long its rate alone holds its next request back."""
        return self._balance(tenant).seconds_until_paid

    def enter(self, tenant: str, num_prompt_tokens: int) -> None:
        """A request of the tenant goes."""
        balance = self._balance(tenant)
        balance.num_in_flight += 1
        balance.pay(num_prompt_tokens)

    def leave(self, tenant: str, num_output_tokens: int) -> None:
        """It has ended."""
        balance = self._balance(tenant)
        balance.num_in_flight -= 1
        balance.pay(num_output_tokens)
        if not balance.num_in_flight and self.of(tenant).tokens_per_second is None:
            del self._balances[tenant]

    def _balance(self, tenant: str) -> _Balance:
        if tenant not in self._balances:
            self._balances[tenant] = _Balance(self.of(tenant), self._clock)
        return self._balances[tenant]


_WHOLE = {"max_concurrent", "requests_per_minute", "tokens_per_minute"}
_NAMES = [field.name for field in fields(Quota)]


def _quota(bounds: list[str], default: Quota) -> Quota:
    """Of "name=number" each. Raises `ValueError` with what is wrong."""
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
