"""Waiting queue in the policy's order. Does not know what sequences wait for."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from baton.engine.scheduler.sequences.sequence import Sequence, SequenceStatus

_Entry = tuple[float, int, int, Sequence]


def order_of(sequence: Sequence) -> tuple[float, int, int]:
    """Returns a sort key in the policy's order; never equal for two sequences."""
    return sequence.request.rank, sequence.request.arrival, sequence.index


class WaitingQueue:
    """Priority queue of waiting sequences; the head is served next."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._num_left = 0

    def __len__(self) -> int:
        return len(self._entries) - self._num_left

    def __iter__(self) -> Iterator[Sequence]:
        return (e[3] for e in self._entries if e[3].status is SequenceStatus.WAITING)

    def push(self, sequence: Sequence) -> None:
        heappush(self._entries, (*order_of(sequence), sequence))

    def head(self) -> Sequence | None:
        while self._entries and self._entries[0][3].status is not SequenceStatus.WAITING:
            heappop(self._entries)
            self._num_left -= 1
        return self._entries[0][3] if self._entries else None

    def pop(self) -> None:
        """Removes the head, which starts."""
        heappop(self._entries)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that starts before the head."""
        self._entries = [entry for entry in self._entries if entry[3] is not sequence]
        heapify(self._entries)

    def leave(self) -> None:
        """Counts a queued sequence that has ended; `head` drops it by its status."""
        self._num_left += 1
