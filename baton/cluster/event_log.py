"""The publishing side's memory: what is findable now, and what was not said of it yet.

Bounded: the hashes findable now, plus at most `max_pending` waiting ones. Pure; knows nothing of
Redis.
"""

from baton.cluster.events import EventBatch, KvEvents
from baton.cluster.prefix import BlockHash
from baton.cluster.snapshot import IndexSnapshot


class EventLog:
    """Numbers a worker's events, joins those that wait, and mirrors their effect.

    It is `behind` when what was said so far no longer adds up to the mirror: at the start, when
    somebody says so, and when too much waits. Nothing waits then; `rebase` makes up for it.

    Args:
        max_pending: how many hashes may wait.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._sequence = 0
        self._first_pending = 1
        self._mirror = IndexSnapshot()
        self._pending: dict[BlockHash, bool] = {}  # whether the hash was stored last, or removed
        self._cleared = False
        self._behind = True

    @property
    def sequence(self) -> int:
        """The number of the latest event; 0 before the first."""
        return self._sequence

    @property
    def mirror(self) -> IndexSnapshot:
        """What is findable after the latest event."""
        return self._mirror

    @property
    def behind(self) -> bool:
        """Whether only `rebase` can continue what was said."""
        return self._behind

    def append(self, events: KvEvents) -> None:
        """Takes in the next event."""
        self._sequence += 1
        self._mirror.apply(events)
        if not self._behind:
            self._enqueue(events)

    def take(self) -> EventBatch | None:
        """All that waits, as one batch, which then no longer waits; None if nothing does."""
        if self._behind or self._first_pending > self._sequence:
            return None
        events = KvEvents(
            stored=tuple(block for block, stored in self._pending.items() if stored),
            removed=tuple(block for block, stored in self._pending.items() if not stored),
            cleared=self._cleared,
        )
        batch = EventBatch(self._first_pending, self._sequence, events)
        self._forget_pending()
        return batch

    def fall_behind(self) -> None:
        """Says that some of what was taken, or the snapshot, may be lost."""
        self._behind = True
        self._forget_pending()

    def rebase(self) -> EventBatch:
        """Begins anew from the mirror, which is to be said as a snapshot from this batch on.

        The batch is an event of its own without effect: a reader that missed anything before it
        notices the gap, and one that missed nothing goes on.
        """
        self._sequence += 1
        self._behind = False
        self._forget_pending()
        return EventBatch(self._sequence, self._sequence, KvEvents())

    def _enqueue(self, events: KvEvents) -> None:
        if events.cleared:
            self._pending.clear()
            self._cleared = True
        self._pending.update(dict.fromkeys(events.removed, False))
        self._pending.update(dict.fromkeys(events.stored, True))
        if len(self._pending) > self._max_pending:
            self.fall_behind()

    def _forget_pending(self) -> None:
        self._pending.clear()
        self._cleared = False
        self._first_pending = self._sequence + 1
