"""The order in which sequences that wait are served. Does not know what for."""

from collections.abc import Iterator
from heapq import heappop, heappush

from baton.engine.scheduler.sequences.sequence import Sequence, SequenceStatus

_Entry = tuple[float, int, int, Sequence]


def order_of(sequence: Sequence) -> tuple[float, int, int]:
    """Sorts sequences as the policy wants; never equal for two."""
    return sequence.request.rank, sequence.request.arrival, sequence.index


class WaitingQueue:
    """Sequences that wait, the one to be served next first."""

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
        """The head starts."""
        heappop(self._entries)

    def leave(self) -> None:
        """One that waits here has ended; its status says so, and it is dropped when met."""
        self._num_left += 1
