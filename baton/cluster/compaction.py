"""Incremental compaction of a worker's snapshot in Redis: it is kept up to date in slices and never
rewritten at once.

Round after round, its slots are written in place, a few with each batch of events. When a round is
complete, all of it is as it was at the round's start or later; so the snapshot says that start as
its sequence number, and the events after it make it exact whenever each slot was written. Pure.
"""

from dataclasses import dataclass

from baton.cluster.snapshot import IndexSnapshot

_SLOTS_PER_HASH = 8  # a round is over after events of an eighth as many hashes as there are slots
_HASHES_PER_BATCH = 16  # what a batch costs a reader beside its hashes, in hashes
_MAX_SLOTS = 16_384  # written at once: 256 KiB


@dataclass(frozen=True, slots=True)
class Slice:
    """Some slots to be written, and what is true once they are.

    Attributes:
        start: the first slot.
        data: the slots' content.
        sequence: the number that the snapshot says from then on; 0: it is not complete.
        oldest: the number of the oldest event that any reader may still need.
    """

    start: int
    data: bytes
    sequence: int
    oldest: int


class Compaction:
    """Progress of compaction: the slots of the snapshot to be written next.

    Args:
        max_slots: the most that is written at once.
    """

    def __init__(self, mirror: IndexSnapshot, max_slots: int = _MAX_SLOTS) -> None:
        self._mirror = mirror
        self._max_slots = max_slots
        self._sequence = 0  # of the last complete round
        self._previous = 0  # of the one before: a reader may be in the midst of it
        self._round_start: int | None = None
        self._next_slot = 0
        self._credit = 0

    @property
    def sequence(self) -> int:
        """The number that the snapshot in Redis says; 0 while none is complete."""
        return self._sequence

    def restart(self) -> None:
        """Nothing of the snapshot is there any more."""
        self._sequence = self._previous = self._next_slot = self._credit = 0
        self._round_start = None

    def advance(self, num_hashes: int, sequence: int) -> Slice:
        """The slots to be written along with a batch of `num_hashes`, after which the latest event
        is `sequence`. As many as possible while no round is complete; none after a round since
        whose start nothing has happened."""
        if sequence == self._sequence:
            return Slice(0, b"", sequence, self._previous + 1)
        if self._round_start is None:
            self._round_start = sequence
        num_left = self._mirror.num_slots - self._next_slot
        self._credit += _SLOTS_PER_HASH * (num_hashes + _HASHES_PER_BATCH)
        wanted = num_left if self._sequence == 0 else min(num_left, self._credit)
        start, stop = self._next_slot, self._next_slot + min(wanted, self._max_slots)
        data = self._mirror.encode(start, stop)
        self._credit = max(0, self._credit - (stop - start))
        self._next_slot = stop
        if stop == self._mirror.num_slots:
            self._complete(self._round_start)
        return Slice(start, data, self._sequence, self._previous + 1)

    def _complete(self, round_start: int) -> None:
        self._previous, self._sequence = self._sequence, round_start
        self._round_start = None
        self._next_slot = self._credit = 0
