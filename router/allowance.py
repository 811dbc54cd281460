"""What one tenant may take: how much at once, and how much in the long run.

Read from a file with a line for each tenant, and one for all others; what a line leaves out has its
default, and `#` begins a comment:

    gold    weight=4
    batch   weight=0.5 max_concurrent=8 tokens_per_second=2000
    *       max_concurrent=32

Awaits nothing; its clock is given.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

from baton.errors import FailedPreconditionError
from baton.serving.deadline import Clock

OTHERS = "*"

# Seconds of its rate that a tenant may take at once after a pause.
_BURST_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Allowance:
    """A tenant's share and bounds.

    Attributes:
        weight: its share of the tokens beside others that wait.
        max_concurrent: requests in flight; None: any number.
        tokens_per_second: of prompts and answers, in the long run; None: no bound.
    """

    weight: float = 1.0
    max_concurrent: int | None = None
    tokens_per_second: float | None = None


class _Balance:
    """What one tenant has in flight, and how many tokens it may take now.

    Tokens are paid for once they are known: a prompt's when it goes, an answer's when it has ended.
    So a balance may fall below zero; the tenant then waits until time has paid for it.
    """

    def __init__(self, allowance: Allowance, clock: Clock) -> None:
        self.num_in_flight = 0
        self._allowance = allowance
        self._clock = clock
        self._rate = allowance.tokens_per_second
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
        most = self._allowance.max_concurrent
        return (most is None or self.num_in_flight < most) and not self.seconds_until_paid

    def pay(self, num_tokens: int) -> None:
        self._settle()
        self._saved -= num_tokens

    def _settle(self) -> None:
        now = self._clock()
        earned = (self._rate or 0.0) * max(0.0, now - self._seen)
        self._saved, self._seen = min(self._largest, self._saved + earned), now


_UNBOUNDED = Allowance()


class Allowances:
    """Those of all tenants; who is not named has the default one."""

    def __init__(
        self,
        of: Mapping[str, Allowance] = MappingProxyType({}),
        default: Allowance = _UNBOUNDED,
        clock: Clock = time.monotonic,
    ) -> None:
        self._of = of
        self._default = default
        self._clock = clock
        self._balances: dict[str, _Balance] = {}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Of a file. Raises `FailedPreconditionError`, naming the line that cannot be read."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FailedPreconditionError(f"cannot read allowances: {error}") from error
        of: dict[str, Allowance] = {}
        for number, line in enumerate(lines, 1):
            tenant, *bounds = line.partition("#")[0].split() or [""]
            try:
                if tenant in of:
                    raise ValueError(f"{tenant} has a line already")
                if tenant:
                    of[tenant] = _allowance(bounds)
            except ValueError as error:
                raise FailedPreconditionError(f"{path}:{number}: {error}") from None
        return cls(of, of.pop(OTHERS, _UNBOUNDED))

    def weight_of(self, tenant: str) -> float:
        return self._allowance(tenant).weight

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
        if not balance.num_in_flight and self._allowance(tenant).tokens_per_second is None:
            del self._balances[tenant]

    def _allowance(self, tenant: str) -> Allowance:
        return self._of.get(tenant, self._default)

    def _balance(self, tenant: str) -> _Balance:
        if tenant not in self._balances:
            self._balances[tenant] = _Balance(self._allowance(tenant), self._clock)
        return self._balances[tenant]


def _allowance(bounds: list[str]) -> Allowance:
    """Of "name=number" each. Raises `ValueError` with what is wrong."""
    known: dict[str, float] = {}
    for bound in bounds:
        name, _, text = bound.partition("=")
        if name not in ("weight", "max_concurrent", "tokens_per_second"):
            raise ValueError(
                f"{bound!r} is none of weight=, max_concurrent= and tokens_per_second="
            )
        try:
            known[name] = int(text) if name == "max_concurrent" else float(text)
        except ValueError:
            raise ValueError(f"{name} is {text!r}; must be a number") from None
        if not 0 < known[name] < float("inf"):
            raise ValueError(f"{name} is {text}; must be above 0")
    most, weight = known.get("max_concurrent"), known.get("weight", 1.0)
    return Allowance(weight, None if most is None else int(most), known.get("tokens_per_second"))
