"""Snapshot of the block hashes cached on a worker, laid out as it is stored in Redis.

A hash keeps its slot while its block is cached, and a new hash takes a free slot first. So the
snapshot is updated in place, a few slots at a time, and is never longer than the largest number of
hashes cached at the same time. Pure; independent of Redis.
"""

from baton.cluster.events.kv_events import EMPTY_SLOT, KvEvents
from baton.cluster.prefix import BlockHash


class IndexSnapshot:
    """Snapshot of cached hashes in slots. Constant work per hash, except for clearing."""

    def __init__(self) -> None:
        self._slot_of: dict[BlockHash, int] = {}
        self._slots: list[BlockHash] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        """Returns the number of cached hashes."""
        return len(self._slot_of)

    @property
    def num_slots(self) -> int:
        """Number of slots. Never shrinks, because the string in Redis does not, either."""
        return len(self._slots)

    @property
    def hashes(self) -> set[BlockHash]:
        """Copy of all cached hashes."""
        return set(self._slot_of)

    def encode(self, start: int, stop: int) -> bytes:
        """Returns the slots [start, stop), 16 bytes each; empty slots are zeros."""
        return b"".join(self._slots[start:stop])

    def apply(self, events: KvEvents) -> None:
        """Applies cache changes."""
        if events.cleared:
            self._clear()
        for block in events.removed:
            slot = self._slot_of.pop(block, None)
            if slot is not None:
                self._slots[slot] = EMPTY_SLOT
                self._free.append(slot)
        for block in events.stored:
            if block not in self._slot_of:
                self._slot_of[block] = self._take_slot(block)

    def _take_slot(self, block: BlockHash) -> int:
        if self._free:
            slot = self._free.pop()
            self._slots[slot] = block
            return slot
        self._slots.append(block)
        return len(self._slots) - 1

    def _clear(self) -> None:
        self._slot_of.clear()
        self._slots = [EMPTY_SLOT] * len(self._slots)
        self._free = list(range(len(self._slots) - 1, -1, -1))
