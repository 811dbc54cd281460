"""Event log of a publishing worker: the hashes cached now, and the events not yet published.

Bounded: the hashes cached now, plus at most `max_pending` unpublished ones. Pure; independent of
Redis.
"""

from baton.cluster.events.kv_events import EventBatch, KvEvents
from baton.cluster.events.snapshot import IndexSnapshot
from baton.cluster.prefix import BlockHash


class EventLog:
    """Event log: numbers a worker's events, coalesces unpublished ones, and snapshots their effect.

    It is `behind` when the published events no longer add up to the snapshot: at the start, after
    `fall_behind`, and when too many are unpublished. It then drops those; `rebase` recovers.

    Args:
        max_pending: maximum number of unpublished hashes.
    """

    def __init__(self, max_pending: int) -> None:
        self._max_pending = max_pending
        self._sequence = 0
        self._first_pending = 1
        self._snapshot = IndexSnapshot()
        self._pending: dict[BlockHash, bool] = {}  # whether the hash was stored last, or removed
        self._cleared = False
        self._behind = True

    @property
    def sequence(self) -> int:
        """Number of the latest event; 0 before the first."""
        return self._sequence

    @property
    def snapshot(self) -> IndexSnapshot:
        """Snapshot of the hashes cached after the latest event."""
        return self._snapshot

    @property
    def behind(self) -> bool:
        """Whether the published events have a gap, so that publishing must continue by `rebase`."""
        return self._behind

    def append(self, events: KvEvents) -> None:
        """Appends the next event."""
        self._sequence += 1
        self._snapshot.apply(events)
        if not self._behind:
            self._enqueue(events)

    def take(self) -> EventBatch | None:
        """Removes and returns all unpublished events as one batch; None if there are none."""
        if self._behind or self._first_pending > self._sequence:
            return None
        events = KvEvents(
            stored=tuple(block for block, stored in self._pending.items() if stored),
            removed=tuple(block for block, stored in self._pending.items() if not stored),
            cleared=self._cleared,
        )
        batch = EventBatch(self._first_pending, self._sequence, events)
        self._clear_pending()
        return batch

    def fall_behind(self) -> None:
        """Marks a gap: some of the batches taken, or the snapshot, may be lost in Redis."""
        self._behind = True
        self._clear_pending()

    def rebase(self) -> EventBatch:
        """Restarts from the snapshot, which the caller publishes as a snapshot from this batch on.

        The returned batch is a new event without changes: a reader that missed an earlier event
        detects the gap, and a reader that missed none continues.
        """
        self._sequence += 1
        self._behind = False
        self._clear_pending()
        return EventBatch(self._sequence, self._sequence, KvEvents())

    def _enqueue(self, events: KvEvents) -> None:
        if events.cleared:
            self._pending.clear()
            self._cleared = True
        self._pending.update(dict.fromkeys(events.removed, False))
        self._pending.update(dict.fromkeys(events.stored, True))
        if len(self._pending) > self._max_pending:
            self.fall_behind()

    def _clear_pending(self) -> None:
        self._pending.clear()
        self._cleared = False
        self._first_pending = self._sequence + 1
