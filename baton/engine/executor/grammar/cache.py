"""LRU cache of grammars, by tenant: at its bounds the tenant with the most gives way."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.fairness.fair_bound import FairBound
from baton.sampling import Grammar


@dataclass(frozen=True, slots=True)
class GrammarKey:
    """Key of a grammar: one of another salt is another's, so that no tenant learns by the time of
    its request what others have sent.

    Attributes:
        salt: as that of the request's cached prefixes.
    """

    grammar: Grammar
    salt: bytes = b""


class Outcome(Protocol):
    """Outcome of a compilation."""

    @property
    def num_bytes(self) -> int:
        """Memory that it holds; it may grow."""


T = TypeVar("T", bound=Outcome)


@dataclass(frozen=True, slots=True)
class _Kept(Generic[T]):
    outcome: T
    tenant: str
    expires: float


class GrammarCache(Generic[T]):
    """Cache of the outcomes of compilations. Not thread-safe.

    Args:
        max_entries, max_bytes: bounds of all tenants together.
    """

    def __init__(
        self, max_entries: int, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: OrderedDict[GrammarKey, _Kept[T]] = OrderedDict()

    def get(self, key: GrammarKey) -> T | None:
        """Returns an outcome, now the most recently used; None if there is none, or none left."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        if self._clock() >= kept.expires:
            del self._kept[key]
            return None
        self._kept.move_to_end(key)
        return kept.outcome

    def put(self, key: GrammarKey, outcome: T, tenant: str, seconds: float = math.inf) -> None:
        """Keeps an outcome of a tenant for `seconds`."""
        self._kept[key] = _Kept(outcome, tenant, self._clock() + seconds)
        self.trim()

    def trim(self) -> None:
        """Evicts what is beyond the bounds, least recently used first, of the tenant with most."""
        num_bytes_of = {key: kept.outcome.num_bytes for key, kept in self._kept.items()}
        entries, num_bytes = FairBound(self._max_entries), FairBound(self._max_bytes)
        for key, kept in self._kept.items():
            entries.add(kept.tenant)
            num_bytes.add(kept.tenant, num_bytes_of[key])
        for bound in (entries, num_bytes):
            while bound.is_exceeded:
                tenant = bound.largest
                key = next(key for key, kept in self._kept.items() if kept.tenant == tenant)
                kept = self._kept.pop(key)
                entries.remove(kept.tenant)
                num_bytes.remove(kept.tenant, num_bytes_of[key])
