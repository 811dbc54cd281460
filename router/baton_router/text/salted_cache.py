"""Cache of what was computed for earlier requests, which tenants do not share.

The time of a request must not reveal what other tenants have sent.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.fairness.fair_bound import FairBound


class SaltedKey(Protocol):
    """Hashable key with the salt of the tenant's caches."""

    @property
    def salt(self) -> bytes: ...


KeyT = TypeVar("KeyT", bound=SaltedKey)
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class _Kept(Generic[ValueT]):
    value: ValueT
    holder: str
    num_bytes: int


class SaltedCache(Generic[KeyT, ValueT]):
    """Least recently used cache, bounded by bytes: beyond them the tenant with the most gives way.
    From one thread.

    Attributes:
        num_hits, num_misses: keys that were looked up.
    """

    def __init__(self, max_bytes: int, bytes_of: Callable[[KeyT, ValueT], int]) -> None:
        """Takes the bytes that a key and its value are counted as."""
        self.num_hits = 0
        self.num_misses = 0
        self._max_bytes = max_bytes
        self._bytes_of = bytes_of
        self._held = FairBound(max_bytes)
        self._kept: dict[KeyT, _Kept[ValueT]] = {}
        self._keys_of: dict[str, OrderedDict[KeyT, None]] = {}  # the next victim first

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._held.total

    def get(self, key: KeyT) -> ValueT | None:
        """Returns the value of a key; None: it is not cached."""
        kept = self._kept.get(key)
        if kept is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._keys_of[kept.holder].move_to_end(key)
        return kept.value

    def put(self, key: KeyT, value: ValueT, holder: str = "") -> None:
        """Keeps a value of a tenant, unless it alone exceeds the bound. `holder`: its name."""
        num_bytes = self._bytes_of(key, value)
        if num_bytes > self._max_bytes or key in self._kept:
            return
        self._kept[key] = _Kept(value, holder, num_bytes)
        self._keys_of.setdefault(holder, OrderedDict())[key] = None
        self._held.add(holder, num_bytes)
        while self._held.is_exceeded and (largest := self._held.largest) is not None:
            self._remove(next(iter(self._keys_of[largest])))

    def drop(self, salt: bytes | None) -> None:
        """Drops what was computed for the tenants of one salt; None: for all."""
        for key in [key for key in self._kept if salt in (None, key.salt)]:
            self._remove(key)

    def _remove(self, key: KeyT) -> None:
        kept = self._kept.pop(key)
        keys = self._keys_of[kept.holder]
        del keys[key]
        if not keys:
            del self._keys_of[kept.holder]
        self._held.remove(kept.holder, kept.num_bytes)
