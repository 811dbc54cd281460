"""Locality index: maps hashes to the workers that have cached what they stand for: KV blocks by
their chain hashes, encoder outputs by their content hashes, which are never equal.

Stores a bitmap of worker slots per hash. Pure; independent of the source of the events. Advisory: a
worker may have evicted a block or output by the time it is requested.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.prefix import BlockHash

_EVICTED_SHARE = 512  # one eviction pass checks 1 of this many entries
_MAX_PASSES = 64  # passes until some are evicted: an eighth of all entries
_SWEPT_SHARE = 64  # a sweep takes about this many operations
_LEAST_SWEPT = 1024
_MAX_CACHED = 1024  # bitmaps whose workers are cached


@dataclass(slots=True)
class _Slot:
    """Bitmap slot of one worker epoch. `bit` is the bitmap of this worker alone, an int object
    shared by the many blocks that have no other holder."""

    worker: str
    epoch: int
    position: int
    bit: int
    num_hashes: int = 0


class LocalityIndex:
    """Locality index: leading blocks of sequences and outputs of encoders that workers have cached.

    Each operation's time is bounded by its input. Memory is bounded, too: beyond `max_entries`, the
    hashes least recently added or matched are evicted, for all workers.

    Args:
        max_entries: maximum number of hashes. One takes about 110 bytes, and about 40 more if
            several workers hold it.
    """

    def __init__(self, max_entries: int = 1_000_000) -> None:
        assert max_entries > 0
        self._max_entries = max_entries
        self._entries: dict[BlockHash, int] = {}  # oldest first
        self._slots: dict[str, _Slot] = {}
        self._by_position: list[_Slot] = []  # includes slots of dropped workers
        self._live = 0  # bits of known workers; all other bits of an entry are stale
        self._counts: dict[int, tuple[int, dict[str, int]]] = {}  # cache of `_count`
        self._free: list[int] = []
        self._dropped: list[int] = []  # positions whose stale bits are still in the entries
        self._swept: list[int] = []  # dropped positions that the current sweep clears
        self._unswept: list[BlockHash] = []
        self._seen: set[BlockHash] = set()  # matched since added or last checked for eviction

    @property
    def max_entries(self) -> int:
        """Maximum number of hashes."""
        return self._max_entries

    def __len__(self) -> int:
        """Returns the number of hashes, including those of dropped workers until the sweep."""
        return len(self._entries)

    def apply(self, worker: str, epoch: int, events: KvEvents) -> None:
        """Applies cache changes of a worker.

        A later epoch than the known one starts empty; an earlier one is ignored.
        """
        slot = self._slot(worker, epoch)
        if slot is None:
            return
        if events.cleared and slot.num_hashes:
            slot = self._renew(worker, epoch)
        self._remove(slot, events.removed)
        self._store(slot, events.stored)
        self._sweep(len(events.removed) + len(events.stored))

    def replace(self, worker: str, epoch: int, hashes: Iterable[BlockHash]) -> None:
        """Replaces the worker's blocks by `hashes`, unless a later epoch of it is known."""
        self.apply(worker, epoch, KvEvents(stored=tuple(hashes), cleared=True))

    def drop(self, worker: str) -> None:
        """Removes the worker and its epoch immediately; later operations clear its bits."""
        slot = self._slots.pop(worker, None)
        if slot is not None:
            self._live &= ~slot.bit
            self._dropped.append(slot.position)
        self._sweep(0)

    def match(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Returns the number of leading `hashes` that each worker holds without a gap.

        Omits workers without the first one. Stops at the end of the longest match.
        """
        values = map(self._entries.get, hashes)
        last = next(values, None)
        holders = self._live & (last or 0)
        matches: dict[str, int] = {}
        if not holders:
            return matches
        for num_blocks, value in enumerate(values, 1):
            if value is last:  # blocks with one holder share its bitmap
                continue
            last = value
            remaining = holders & (value or 0)
            if remaining != holders:
                found = self._count(holders ^ remaining, num_blocks)
                matches = matches | found if matches else found
                holders = remaining
                if not holders:
                    break
        else:
            num_blocks = len(hashes)
            matches.update(self._count(holders, num_blocks))
        if self._is_crowded:
            self._note_seen(hashes[:num_blocks])
        return matches

    def num_hashes(self, worker: str) -> int:
        """Returns the number of hashes that the worker is known to hold."""
        slot = self._slots.get(worker)
        return slot.num_hashes if slot is not None else 0

    def _count(self, bits: int, num_blocks: int) -> dict[str, int]:
        """Returns a new dict with `num_blocks` for each worker of a bitmap. Copies a cached one,
        which is several times as fast: most prompts begin with widely held prefixes."""
        known, counts = self._counts.get(bits, (0, {}))
        if known != num_blocks:
            if len(self._counts) >= _MAX_CACHED:
                self._counts.clear()
            workers = counts or [slot.worker for slot in self._slots_of(bits)]
            counts = dict.fromkeys(workers, num_blocks)
            self._counts[bits] = num_blocks, counts
        return counts.copy()

    def _slots_of(self, bits: int) -> Iterator[_Slot]:
        while bits:
            position = bits.bit_length() - 1
            yield self._by_position[position]
            bits ^= 1 << position

    def _slot(self, worker: str, epoch: int) -> _Slot | None:
        """Returns the worker's slot; None if a later epoch of it is known."""
        slot = self._slots.get(worker)
        if slot is None or slot.epoch < epoch:
            return self._renew(worker, epoch)
        return slot if slot.epoch == epoch else None

    def _renew(self, worker: str, epoch: int) -> _Slot:
        """Returns an empty slot for the worker, which replaces the one it may have."""
        self.drop(worker)
        position = self._free.pop() if self._free else len(self._by_position)
        slot = _Slot(worker, epoch, position, 1 << position)
        self._by_position[position : position + 1] = [slot]
        self._counts.clear()
        self._slots[worker] = slot
        self._live |= slot.bit
        return slot

    def _store(self, slot: _Slot, blocks: Collection[BlockHash]) -> None:
        entries, bit = self._entries, slot.bit
        if entries.keys().isdisjoint(blocks):  # the common case, and that of all bulk updates
            num_known = len(entries)
            entries.update(dict.fromkeys(blocks, bit))
            slot.num_hashes += len(entries) - num_known
        else:
            self._store_known(slot, blocks)
        while len(entries) > self._max_entries:
            self._evict()

    def _store_known(self, slot: _Slot, blocks: Iterable[BlockHash]) -> None:
        """Stores blocks of which some have entries already."""
        entries, bit = self._entries, slot.bit
        for block in blocks:
            holders = entries.get(block)
            if holders is None:
                entries[block] = bit
                slot.num_hashes += 1
            elif not holders & bit:
                entries[block] = holders & self._live | bit
                slot.num_hashes += 1

    def _remove(self, slot: _Slot, blocks: Iterable[BlockHash]) -> None:
        entries, bit = self._entries, slot.bit
        for block in blocks:
            holders = entries.get(block, 0) & self._live
            if not holders & bit:
                continue
            slot.num_hashes -= 1
            if holders != bit:
                entries[block] = holders ^ bit
            else:
                del entries[block]

    @property
    def _is_crowded(self) -> bool:
        """Whether the index is over three quarters full, so that it tracks matched hashes."""
        return 4 * len(self._entries) > 3 * self._max_entries

    def _note_seen(self, blocks: Iterable[BlockHash]) -> None:
        if len(self._seen) >= self._max_entries // 2:
            self._seen.clear()
        self._seen.update(blocks)

    def _evict(self) -> None:
        """Evicts the oldest entries that were not matched since their last check here, or the last
        ones checked if all were matched. Moves matched ones to the young end (CLOCK).

        Evicts several at once, because a dict finds its first entry slowly.
        """
        count = max(1, self._max_entries // _EVICTED_SHARE)
        for _ in range(_MAX_PASSES):
            oldest = list(islice(self._entries, count))
            recent = [block for block in oldest if block in self._seen]
            self._seen.difference_update(recent)
            for block in recent:
                self._entries[block] = self._entries.pop(block)
            if len(recent) < len(oldest):
                oldest = list(set(oldest).difference(recent))
                break
        for block in oldest:
            for slot in self._slots_of(self._entries.pop(block) & self._live):
                slot.num_hashes -= 1

    def _sweep(self, num_changes: int) -> None:
        """Clears bits of dropped slots in some entries; the slots are free after the last one.

        An entry added during a sweep has none of these bits, so a sweep covers only the entries
        that existed at its start.
        """
        if not self._swept:
            self._swept, self._dropped = self._dropped, []
            self._unswept = list(self._entries) if self._swept else []
        budget = max(_LEAST_SWEPT, len(self._entries) // _SWEPT_SHARE) + num_changes
        for block in self._unswept[-budget:]:
            holders = self._entries.get(block)
            if holders is not None and not holders & self._live:
                del self._entries[block]
            elif holders is not None:
                self._entries[block] = holders & self._live
        del self._unswept[-budget:]
        if not self._unswept:
            self._free += self._swept
            self._swept = []
