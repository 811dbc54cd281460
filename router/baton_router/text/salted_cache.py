"""Cache of what was computed for earlier requests, which tenants do not share.

The time of a request must not reveal what other tenants have sent.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class SaltedKey(Protocol):
    """Hashable key with the salt of the tenant's caches."""

    @property
    def salt(self) -> bytes: ...


KeyT = TypeVar("KeyT", bound=SaltedKey)
ValueT = TypeVar("ValueT")


class SaltedCache(Generic[KeyT, ValueT]):
    """Least recently used cache, bounded by bytes. From one thread.

    Attributes:
        num_bytes: bytes held.
        num_hits, num_misses: keys that were looked up.
    """

    def __init__(self, max_bytes: int, bytes_of: Callable[[KeyT, ValueT], int]) -> None:
        """Takes the bytes that a key and its value are counted as."""
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._max_bytes = max_bytes
        self._bytes_of = bytes_of
        self._values: OrderedDict[KeyT, ValueT] = OrderedDict()  # the next victim first

    def get(self, key: KeyT) -> ValueT | None:
        """Returns the value of a key; None: it is not cached."""
        value = self._values.get(key)
        if value is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._values.move_to_end(key)
        return value

    def put(self, key: KeyT, value: ValueT) -> None:
        """Keeps a value, unless it alone exceeds the bound."""
        num_bytes = self._bytes_of(key, value)
        if num_bytes > self._max_bytes or key in self._values:
            return
        self._values[key] = value
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._bytes_of(*self._values.popitem(last=False))

    def drop(self, salt: bytes | None) -> None:
        """Drops what was computed for the tenants of one salt; None: for all."""
        for key in [key for key in self._values if salt in (None, key.salt)]:
            self.num_bytes -= self._bytes_of(key, self._values.pop(key))
