"""KV event subscriber: applies workers' KV events from Redis to a router's locality index.

The caller chooses the workers to follow.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from redis.asyncio import Redis

from baton.cluster.events import (
    SEQUENCE_BYTES,
    EventBatch,
    KvEvents,
    decode_sequence,
    decode_slots,
    entry_id,
    slots_offset,
)
from baton.cluster.index import LocalityIndex
from baton.cluster.keys import snapshot_key, stream_key
from baton.cluster.loop import RedisLoop
from baton.cluster.prefix import HASH_BYTES
from baton.cluster.redis import Command, prefix_of, read_streams, transact

_BLOCK_MS = 200  # longest wait of a read for entries, and so of a new follow for its first read
_MAX_ENTRIES = 1024  # per read, of all streams together
_MIN_ENTRIES = 16  # per read, of each stream, even if that exceeds the total
_PART = 32_768  # slots of a snapshot in one reply: 512 KiB
_MAX_PARTS = 8  # per round trip
_IDLE = 60.0  # seconds; `follow` wakes the loop
_RESYNC_INTERVAL = 1.0  # seconds between attempts to read a snapshot

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Follow:
    """Read position in the event stream of one worker epoch.

    Attributes:
        applied: number of the latest event in the index.
        wanted: least sequence number of a snapshot that contains the missed events; None if none
            were missed. Events after a gap are applied anyway: a partial index beats none.
        resync_at: time of the next attempt to read that snapshot (`time.monotonic`).
        next_slot: first slot of the snapshot that is not in the index yet; None while no snapshot
            is being read.
        published: sequence number that the worker is known to have published.
        is_current: whether the latest read reached the stream's end and no event was missed.
    """

    worker: str
    epoch: int
    applied: int = 0
    wanted: int | None = 0
    resync_at: float = 0.0
    next_slot: int | None = None
    published: int = 0
    is_current: bool = False

    def is_due(self, now: float) -> bool:
        """Returns whether its snapshot must be read now, which precedes reading its events."""
        return self.wanted is not None and self.resync_at <= now

    def is_behind(self, now: float) -> bool:
        """Returns whether there is more to read of it immediately."""
        return self.is_due(now) or (self.wanted is None and not self.is_current)


class EventSubscriber:
    """KV event subscriber: keeps a locality index up to date with the workers it follows.

    For each worker it reads the snapshot, then the stream after it; after a gap in the sequence
    numbers it reads the snapshot again. During a Redis outage the index keeps its content.

    No method raises on Redis errors; all must be called in the event loop's thread. The caller owns
    the client and the index.

    Args:
        redis: from `baton.cluster.redis.connect`.
        index: the index to which the events are applied.
    """

    def __init__(self, redis: Redis, index: LocalityIndex) -> None:
        self._redis = redis
        self._prefix = prefix_of(redis)
        self._index = index
        self._follows: dict[str, _Follow] = {}
        self._loop = RedisLoop("KV event subscriber", self._step)

    @property
    def is_warm(self) -> bool:
        """Whether the index has all published events of the followed workers, as far as is
        known."""
        return not self.stale and all(f.is_current for f in self._follows.values())

    @property
    def stale(self) -> bool:
        """True if Redis did not answer the latest read, or was not read yet."""
        return self._loop.answering_since is None

    @property
    def staleness(self) -> float:
        """Seconds since Redis last answered; 0 while it answers."""
        return self._loop.staleness

    def start(self) -> None:
        """Starts reading in the background. Needs a running event loop."""
        self._loop.start()

    async def stop(self) -> None:
        """Stops reading; does not change the index."""
        await self._loop.stop()

    def follow(self, worker: str, epoch: int) -> None:
        """Follows that epoch of the worker, and drops another epoch of it from the index."""
        known = self._follows.get(worker)
        if known is not None and known.epoch == epoch:
            return
        self._index.drop(worker)
        self._follows[worker] = _Follow(worker, epoch)
        self._loop.wake()

    def unfollow(self, worker: str) -> None:
        """Stops following the worker, and drops it from the index immediately."""
        self._follows.pop(worker, None)
        self._index.drop(worker)

    async def _step(self) -> float:
        if not self._follows:
            return _IDLE
        await self._resync(time.monotonic())
        now = time.monotonic()
        follows = {
            stream_key(follow.worker, follow.epoch, self._prefix).encode(): follow
            for follow in self._follows.values()
            if not follow.is_due(now)
        }
        if follows:
            is_behind = any(follow.is_behind(now) for follow in self._follows.values())
            await self._read(follows, wait_ms=0 if is_behind else _BLOCK_MS)
        return 0.0

    # Snapshots.

    async def _resync(self, now: float) -> None:
        """Reads the next parts of wanted snapshots, in one round trip."""
        due = [follow for follow in self._follows.values() if follow.is_due(now)]
        due.sort(key=lambda follow: follow.next_slot is None)  # those begun come first
        parts = due[:_MAX_PARTS]
        if not parts:
            return
        commands = [command for follow in parts for command in _read_part(follow, self._prefix)]
        replies = await transact(self._redis, *commands)
        for number, follow in enumerate(parts):
            head, data = replies[2 * number : 2 * number + 2]
            if self._is_followed(follow):
                self._apply_part(follow, decode_sequence(head), data, now)
                await asyncio.sleep(0)  # lets requests run first

    def _apply_part(self, follow: _Follow, sequence: int, data: bytes, now: float) -> None:
        """Applies a part of a snapshot to the index; the first part replaces the worker's blocks.

        All parts are as they were at the sequence number first read or later, and the events after
        it are applied after the last part; so writes of the worker in between do no harm. A smaller
        number shows that the worker began a new snapshot.
        """
        assert follow.wanted is not None
        is_first = follow.next_slot is None
        least = max(1, follow.wanted if is_first else follow.applied)
        if sequence < least:
            follow.next_slot, follow.resync_at = None, now + _RESYNC_INTERVAL
            return
        if is_first:
            self._index.replace(follow.worker, follow.epoch, ())
            follow.next_slot, follow.applied = 0, sequence
        blocks = decode_slots(data[: len(data) // HASH_BYTES * HASH_BYTES])
        self._index.apply(follow.worker, follow.epoch, KvEvents(stored=blocks))
        assert follow.next_slot is not None
        follow.next_slot += _PART
        if len(data) < _PART * HASH_BYTES:
            follow.next_slot = follow.wanted = None
            follow.published, follow.resync_at = sequence, now + _RESYNC_INTERVAL

    # Events.

    async def _read(self, follows: Mapping[bytes, _Follow], wait_ms: int) -> None:
        """Reads and applies new stream entries; waits up to `wait_ms` for the first."""
        positions = {key: entry_id(follow.applied) for key, follow in follows.items()}
        max_entries = max(_MIN_ENTRIES, _MAX_ENTRIES // len(positions))
        found = dict(await read_streams(self._redis, positions, max_entries, wait_ms))
        for key, follow in follows.items():
            entries = found.get(key, ())
            for name, fields in entries:
                self._apply(follow, name, fields)
            is_end = len(entries) < max_entries
            if is_end and follow.applied < follow.published:
                follow.wanted = follow.published  # the snapshot was read too slowly for the stream
            follow.is_current = is_end and follow.wanted is None
            if entries:
                await asyncio.sleep(0)  # lets requests run first

    def _apply(self, follow: _Follow, name: bytes, fields: Mapping[bytes, bytes]) -> None:
        if not self._is_followed(follow):
            return
        try:
            batch = EventBatch.from_fields(fields)
        except ValueError as error:
            _logger.warning("ignoring an event of worker %r: %s", follow.worker, error)
            follow.applied = int(name.partition(b"-")[0])
            follow.wanted = follow.applied
            return
        if batch.first > follow.applied + 1:
            follow.wanted = batch.first - 1
        elif batch.first == 1:
            follow.wanted = None  # the stream has all events of the epoch
        self._index.apply(follow.worker, follow.epoch, batch.events)
        follow.applied = batch.last

    def _is_followed(self, follow: _Follow) -> bool:
        return self._follows.get(follow.worker) is follow


def _read_part(follow: _Follow, prefix: str) -> tuple[Command, Command]:
    key = snapshot_key(follow.worker, follow.epoch, prefix)
    start = slots_offset(follow.next_slot or 0)
    return (
        ("GETRANGE", key, 0, SEQUENCE_BYTES - 1),
        ("GETRANGE", key, start, start + _PART * HASH_BYTES - 1),
    )
