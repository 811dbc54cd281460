"""Incremental compaction of a worker's snapshot in Redis: updates it in slices instead of rewriting
it at once.

In rounds, each batch of events also writes a few slots in place. After a complete round every slot
is as it was at the round's start or later; so the snapshot carries the round's start as its
sequence number, and the events after it make it exact, whenever each slot was written. Pure.
"""

from dataclasses import dataclass

from baton.cluster.events.snapshot import IndexSnapshot

_SLOTS_PER_HASH = 8  # a round ends after events of an eighth as many hashes as there are slots
_HASHES_PER_BATCH = 16  # fixed cost of a batch for a reader, in hashes
_MAX_SLOTS = 16_384  # per write: 256 KiB


@dataclass(frozen=True, slots=True)
class Slice:
    """Slice of the snapshot to be written, with its sequence numbers afterwards.

    Attributes:
        start: the first slot.
        data: the slots' content.
        sequence: sequence number of the snapshot after the write; 0: it is not complete.
        oldest: number of the oldest event that a reader may still need.
    """

    start: int
    data: bytes
    sequence: int
    oldest: int


class Compaction:
    """Progress of compaction: the slots of the snapshot to be written next.

    Args:
        max_slots: maximum number of slots written at once.
        chunk: slots that are only written together; divides `max_slots`.
    """

    def __init__(
        self, snapshot: IndexSnapshot, max_slots: int = _MAX_SLOTS, chunk: int = 1
    ) -> None:
        assert max_slots % chunk == 0
        self._snapshot = snapshot
        self._max_slots = max_slots
        self._chunk = chunk
        self._sequence = 0  # of the last complete round
        self._previous = 0  # of the round before, which a reader may still be reading
        self._round_start: int | None = None
        self._next_slot = 0
        self._num_due = 0

    @property
    def sequence(self) -> int:
        """Sequence number of the snapshot in Redis; 0 while it is not complete."""
        return self._sequence

    def restart(self) -> None:
        """Restarts from an empty snapshot, when the one in Redis is lost or invalid."""
        self._sequence = self._previous = self._next_slot = self._num_due = 0
        self._round_start = None

    def advance(self, num_hashes: int, sequence: int) -> Slice:
        """Returns the slots to write with a batch of `num_hashes`, after which the latest event is
        `sequence`: as many as possible until the first round is complete; none if there was no
        event since the start of the last round."""
        if sequence == self._sequence:
            return Slice(0, b"", sequence, self._previous + 1)
        if self._round_start is None:
            self._round_start = sequence
        num_left = self._snapshot.num_slots - self._next_slot
        self._num_due += _SLOTS_PER_HASH * (num_hashes + _HASHES_PER_BATCH)
        wanted = num_left if self._sequence == 0 else min(num_left, self._num_due)
        wanted = min(num_left, wanted + -wanted % self._chunk)
        start, stop = self._next_slot, self._next_slot + min(wanted, self._max_slots)
        data = self._snapshot.encode(start, stop)
        self._num_due = max(0, self._num_due - (stop - start))
        self._next_slot = stop
        if stop == self._snapshot.num_slots:
            self._complete(self._round_start)
        return Slice(start, data, self._sequence, self._previous + 1)

    def _complete(self, round_start: int) -> None:
        self._previous, self._sequence = self._sequence, round_start
        self._round_start = None
        self._next_slot = self._num_due = 0
