"""The locality index: which workers hold which blocks.

A map from chain hash to a bitmap of worker slots. Pure; knows nothing of where its events come from
and promises nothing: a block it names may be gone by the time it is asked for.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from baton.cluster.events import KvEvents
from baton.cluster.prefix import BlockHash

_EVICTED_SHARE = 512  # one of so many entries is looked at for eviction at a time
_MAX_LOOKS = 64  # until some are evicted: an eighth of all
_SWEPT_SHARE = 64  # a sweep takes about so many operations
_LEAST_SWEPT = 1024
_MAX_NAMED = 4096  # bitmaps whose workers are remembered


@dataclass(slots=True)
class _Slot:
    """One worker epoch's place in the bitmaps. `bit` is the bitmap of this worker alone: most
    blocks have one holder, and share it."""

    worker: str
    epoch: int
    position: int
    bit: int
    num_blocks: int = 0


class LocalityIndex:
    """Locality index: the leading blocks of a sequence that each worker holds.

    Every operation is bounded by what it is given. Memory is bounded too: beyond `max_entries`
    hashes, those are evicted, for all workers, that came or were asked for longest ago.

    Args:
        max_entries: the most hashes it holds. One takes about 110 bytes, and some 40 more where
            several workers hold it.
    """

    def __init__(self, max_entries: int = 1_000_000) -> None:
        assert max_entries > 0
        self._max_entries = max_entries
        self._entries: dict[BlockHash, int] = {}  # oldest first
        self._slots: dict[str, _Slot] = {}
        self._by_position: list[_Slot] = []  # those of dropped workers are still there
        self._live = 0  # the slots of known workers; all other bits of an entry mean nothing
        self._named: dict[int, tuple[str, ...]] = {}  # workers of bitmaps that were asked for
        self._free: list[int] = []
        self._dropped: list[int] = []  # positions whose bits are still in the entries
        self._swept: list[int] = []  # those of them that the sweep under way clears
        self._unswept: list[BlockHash] = []
        self._seen: set[BlockHash] = set()  # asked for since they came, or were looked at

    def __len__(self) -> int:
        """How many hashes it holds, those of dropped workers included until they are swept."""
        return len(self._entries)

    def apply(self, worker: str, epoch: int, events: KvEvents) -> None:
        """Takes in what changed on a worker.

        A later epoch than the known one starts from nothing; an earlier one is ignored.
        """
        slot = self._slot(worker, epoch)
        if slot is None:
            return
        if events.cleared and slot.num_blocks:
            slot = self._renew(worker, epoch)
        self._remove(slot, events.removed)
        self._store(slot, events.stored)
        self._tidy(len(events.removed) + len(events.stored))

    def replace(self, worker: str, epoch: int, hashes: Iterable[BlockHash]) -> None:
        """Makes `hashes` all that the worker holds, unless a later epoch of it is known."""
        self.apply(worker, epoch, KvEvents(stored=tuple(hashes), cleared=True))

    def drop(self, worker: str) -> None:
        """Forgets the worker and its epoch at once. Its bits are cleared little by little."""
        slot = self._slots.pop(worker, None)
        if slot is not None:
            self._live &= ~slot.bit
            self._dropped.append(slot.position)
        self._tidy(0)

    def match(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """How many of the leading `hashes` each worker holds without a hole.

        Workers that hold not even the first are left out. Stops where the last worker does.
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
                found = dict.fromkeys(self._workers_of(holders ^ remaining), num_blocks)
                matches = matches | found if matches else found
                holders = remaining
                if not holders:
                    break
        else:
            num_blocks = len(hashes)
            matches.update(dict.fromkeys(self._workers_of(holders), num_blocks))
        if self._is_crowded:
            self._note_seen(hashes[:num_blocks])
        return matches

    def num_blocks(self, worker: str) -> int:
        """How many blocks the worker is known to hold."""
        slot = self._slots.get(worker)
        return slot.num_blocks if slot is not None else 0

    def _workers_of(self, bits: int) -> tuple[str, ...]:
        """Remembered, for prefixes that many workers hold are what most prompts begin with."""
        workers = self._named.get(bits)
        if workers is None:
            if len(self._named) >= _MAX_NAMED:
                self._named.clear()
            workers = self._named[bits] = tuple(slot.worker for slot in self._slots_of(bits))
        return workers

    def _slots_of(self, bits: int) -> Iterator[_Slot]:
        while bits:
            position = bits.bit_length() - 1
            yield self._by_position[position]
            bits ^= 1 << position

    def _slot(self, worker: str, epoch: int) -> _Slot | None:
        """The worker's slot; None if a later epoch of it is known."""
        slot = self._slots.get(worker)
        if slot is None or slot.epoch < epoch:
            return self._renew(worker, epoch)
        return slot if slot.epoch == epoch else None

    def _renew(self, worker: str, epoch: int) -> _Slot:
        """An empty slot for the worker in place of the one it may have."""
        self.drop(worker)
        position = self._free.pop() if self._free else len(self._by_position)
        slot = _Slot(worker, epoch, position, 1 << position)
        self._by_position[position : position + 1] = [slot]
        self._named.clear()
        self._slots[worker] = slot
        self._live |= slot.bit
        return slot

    def _store(self, slot: _Slot, blocks: Collection[BlockHash]) -> None:
        entries, bit = self._entries, slot.bit
        if entries.keys().isdisjoint(blocks):  # as most are, and all that come in bulk
            num_known = len(entries)
            entries.update(dict.fromkeys(blocks, bit))
            slot.num_blocks += len(entries) - num_known
        else:
            self._store_known(slot, blocks)
        while len(entries) > self._max_entries:
            self._evict()

    def _store_known(self, slot: _Slot, blocks: Iterable[BlockHash]) -> None:
        """The same where some of the blocks are there."""
        entries, bit = self._entries, slot.bit
        for block in blocks:
            holders = entries.get(block)
            if holders is None:
                entries[block] = bit
                slot.num_blocks += 1
            elif not holders & bit:
                entries[block] = holders & self._live | bit
                slot.num_blocks += 1

    def _remove(self, slot: _Slot, blocks: Iterable[BlockHash]) -> None:
        entries, bit = self._entries, slot.bit
        for block in blocks:
            holders = entries.get(block, 0) & self._live
            if not holders & bit:
                continue
            slot.num_blocks -= 1
            if holders != bit:
                entries[block] = holders ^ bit
            else:
                del entries[block]

    @property
    def _is_crowded(self) -> bool:
        """Whether it will have to evict before long, and remembers what is asked for."""
        return 4 * len(self._entries) > 3 * self._max_entries

    def _note_seen(self, blocks: Iterable[BlockHash]) -> None:
        if len(self._seen) >= self._max_entries // 2:
            self._seen.clear()
        self._seen.update(blocks)

    def _evict(self) -> None:
        """Evicts, of the oldest entries, those that nobody has asked for since they were last
        looked at here; or all of them, if everything is asked for. The others become the youngest.

        Several at once, for a dict finds its first entry slowly.
        """
        count = max(1, self._max_entries // _EVICTED_SHARE)
        for _ in range(_MAX_LOOKS):
            oldest = list(islice(self._entries, count))
            spared = [block for block in oldest if block in self._seen]
            self._seen.difference_update(spared)
            for block in spared:
                self._entries[block] = self._entries.pop(block)
            if len(spared) < len(oldest):
                oldest = list(set(oldest).difference(spared))
                break
        for block in oldest:
            for slot in self._slots_of(self._entries.pop(block) & self._live):
                slot.num_blocks -= 1

    def _tidy(self, num_changes: int) -> None:
        """Clears some of the bits of dropped slots, which may be used again after the last one.

        An entry that comes while the sweep is under way has none of these bits, so the entries
        there were at its start are all it has to see.
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
