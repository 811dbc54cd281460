"""Pinned blocks: cached blocks that a lease outside of the engine protects from eviction."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from baton.cluster.prefix import BlockHash
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.kv.prefix_cache import PrefixCache
from baton.engine.scheduler.kv.reservations import Reservations
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK

Tables = tuple[tuple[int, ...], ...]


class PinnedBlocks:
    """Pinned blocks, by name. They are full, so that no sequence writes to them."""

    def __init__(
        self, groups: SequenceOf[CacheGroup], prefixes: PrefixCache, reservations: Reservations
    ) -> None:
        self._groups = groups
        self._prefixes = prefixes
        self._reservations = reservations
        self._pinned: dict[str, Tables] = {}

    def pin(self, name: str, hashes: SequenceOf[BlockHash]) -> Tables:
        """Pins the longest cached run of these blocks from the first one on.

        Returns a table per cache group, all of one length; `NULL_BLOCK` replaces blocks that the
        last token of the run does not see. The tables are empty, and nothing is pinned, if nothing
        is cached or a pool has too few free blocks that are not reserved.
        """
        assert name not in self._pinned, "a pin twice"
        tables: Tables = tuple(map(tuple, self._prefixes.find_run(hashes)))
        for i, group in enumerate(self._groups):
            revived = sum(b != NULL_BLOCK and group.pool.is_free(b) for b in tables[i])
            if revived > self._reservations.num_free_blocks(i):
                return tuple(() for _ in self._groups)
        if any(tables):
            self._pinned[name] = tables
            for group, table in zip(self._groups, tables, strict=True):
                group.pool.hold(b for b in table if b != NULL_BLOCK)
        return tables

    def unpin(self, name: str) -> None:
        """Releases the pinned blocks, the tail to be evicted first. Idempotent."""
        for group, table in zip(self._groups, self._pinned.pop(name, ()), strict=False):
            group.pool.release(b for b in reversed(table) if b != NULL_BLOCK)

    def tables(self, group: int) -> Iterator[tuple[int, ...]]:
        """Returns all pinned tables of a cache group."""
        return (tables[group] for tables in self._pinned.values())
