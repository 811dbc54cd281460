"""Block pool: KV blocks that are free, held or cached. Knows block numbers and hashes only.

Every block is in exactly one state: held (reference count > 0) or free (count 0). A free block may
still be cached: its hash is in the map, so a lookup can find and hold it until it is evicted.
Allocation takes the least recently freed block first.
"""

from collections import OrderedDict
from collections.abc import Iterable

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.prefix import BlockHash
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK


class CacheChanges:
    """Net changes of a cache since the last drain: a hash both stored and removed is in neither
    tuple."""

    def __init__(self) -> None:
        self._changes: dict[BlockHash, bool] = {}  # True: stored, False: removed
        self._was_cleared = False

    def store(self, block_hash: BlockHash) -> None:
        if self._changes.pop(block_hash, True):
            self._changes[block_hash] = True

    def remove(self, block_hash: BlockHash) -> None:
        if not self._changes.pop(block_hash, False):
            self._changes[block_hash] = False

    def clear(self) -> None:
        self._changes.clear()
        self._was_cleared = True

    def __bool__(self) -> bool:
        return bool(self._changes) or self._was_cleared

    def drain(self) -> KvEvents:
        """Returns the changes, and forgets them."""
        if not self:
            return _NO_EVENTS
        events = KvEvents(
            stored=tuple(h for h, stored in self._changes.items() if stored),
            removed=tuple(h for h, stored in self._changes.items() if not stored),
            cleared=self._was_cleared,
        )
        self._changes.clear()
        self._was_cleared = False
        return events


class BlockPool:
    """Blocks 1 to `num_blocks`, reference-counted, with a prefix cache over the full ones.

    Attributes:
        reports_changes: `drain_events` returns the changes of the cache; else they are not noted.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reports_changes = True
        self._ref_counts = [0] * (num_blocks + 1)
        self._hashes: list[BlockHash | None] = [None] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._cached: dict[BlockHash, int] = {}
        self._num_cached_free = 0
        self._changes = CacheChanges()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, free cached ones included."""
        return len(self._free)

    @property
    def num_held_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the prefix cache that have no holder. Held, these and the empty ones add up to
        `num_blocks`."""
        return self._num_cached_free

    def lookup(self, block_hash: BlockHash) -> int | None:
        """Returns the block with this content, or None. Does not hold it."""
        return self._cached.get(block_hash)

    def lookup_chain(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Returns the blocks of the leading hashes that are all cached. Does not hold them."""
        cached, found = self._cached, []
        for block_hash in hashes:
            block_id = cached.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def is_free(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def is_writable(self, block_id: int) -> bool:
        """Returns True if the block has one holder and no lookup can find it."""
        return self._ref_counts[block_id] == 1 and self._hashes[block_id] is None

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free blocks, holds each once and evicts their old content.

        The caller has checked `num_free_blocks`.
        """
        assert count <= len(self._free), "allocate() beyond the free blocks"
        take = self._free.popitem
        block_ids = [take(last=False)[0] for _ in range(count)]
        counts, hashes = self._ref_counts, self._hashes
        for block_id in block_ids:
            counts[block_id] = 1
            if hashes[block_id] is not None:
                self._forget(block_id)
                self._num_cached_free -= 1
        return block_ids

    def hold(self, block_ids: Iterable[int]) -> None:
        """Adds one reference to each block; a cached free block is free no longer."""
        counts = self._ref_counts
        for block_id in block_ids:
            if counts[block_id] == 0:
                del self._free[block_id]
                self._num_cached_free -= self._hashes[block_id] is not None
            counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each block; the order given is the order of eviction."""
        counts, hashes, free = self._ref_counts, self._hashes, self._free
        for block_id in block_ids:
            assert counts[block_id] > 0, f"block {block_id} released too often"
            counts[block_id] -= 1
            if counts[block_id] == 0:
                free[block_id] = None
                if hashes[block_id] is None:
                    free.move_to_end(block_id, last=False)
                else:
                    self._num_cached_free += 1

    def commit(self, block_ids: Iterable[int], block_hashes: Iterable[BlockHash]) -> None:
        """Caches held, full blocks; `NULL_BLOCK` is none. The first block with a given content
        stays the cached one."""
        cached, hashes = self._cached, self._hashes
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if block_id == NULL_BLOCK or block_hash in cached or hashes[block_id] is not None:
                continue
            cached[block_hash] = block_id
            hashes[block_id] = block_hash
            if self.reports_changes:
                self._changes.store(block_hash)

    def evict(self, block_ids: Iterable[int]) -> int:
        """Removes blocks from the cache; held ones stay held. Returns how many were cached."""
        found = [b for b in set(block_ids) if self._hashes[b] is not None]
        for block_id in found:
            self._forget(block_id)
            if self._ref_counts[block_id] == 0:
                self._free.move_to_end(block_id, last=False)
                self._num_cached_free -= 1
        return len(found)

    def clear(self) -> int:
        """Removes every block from the cache; held ones stay held. Returns how many were cached."""
        count = len(self._cached)
        for block_id in self._cached.values():
            self._hashes[block_id] = None
        self._cached.clear()
        self._num_cached_free = 0
        self._changes.clear()
        return count

    @property
    def has_events(self) -> bool:
        return bool(self._changes)

    def drain_events(self) -> KvEvents:
        """Returns the changes of the prefix cache since the last call."""
        return self._changes.drain()

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Asserts that the pool agrees with itself and with all block tables that hold blocks."""
        expected = [0] * (self.num_blocks + 1)
        for table in tables:
            for block_id in table:
                if block_id != NULL_BLOCK:
                    expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts differ from the block tables"
        free = {b for b, count in enumerate(self._ref_counts) if count == 0 and b != NULL_BLOCK}
        assert free == self._free.keys(), "the free list differs from the unreferenced blocks"
        hashed = {h: b for b, h in enumerate(self._hashes) if h is not None}
        assert hashed == self._cached, "the hash map differs from the blocks' hashes"
        assert self._num_cached_free == len(free & set(hashed.values())), "cached are miscounted"

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        assert block_hash is not None, "a block without content is forgotten"
        self._hashes[block_id] = None
        del self._cached[block_hash]
        if self.reports_changes:
            self._changes.remove(block_hash)


_NO_EVENTS = KvEvents((), (), cleared=False)
