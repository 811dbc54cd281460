"""A worker's KV events on their way into Redis.

Knows nothing of the cache the events come from, nor of who reads them.
"""

import time

from redis.asyncio import Redis

from baton.cluster.event_log import EventLog
from baton.cluster.events import (
    SEQUENCE_BYTES,
    EventBatch,
    KvEvents,
    encode_sequence,
    entry_id,
)
from baton.cluster.keys import snapshot_key, stream_key
from baton.cluster.loop import RedisLoop
from baton.cluster.redis import Command, transact

_TTL = 60  # seconds that stream and snapshot outlive their last renewal
_REFRESH_INTERVAL = 15.0  # seconds between renewals while nothing happens
_STREAM_LENGTH = 10_000  # entries, about
_SNAPSHOT_BATCHES = 1_000  # far below the stream's length: snapshot and tail always overlap
_SNAPSHOT_INTERVAL = 30.0
_MAX_PENDING = 16_384  # hashes: one entry is at most 256 KiB


class EventPublisher:
    """Publishes the KV events of one worker epoch.

    What Redis holds, the snapshot and the stream's tail after it, adds up to what is findable on
    the worker, with at most one round trip in flight. After anything that may have broken this (a
    failed round trip, a flushed or restored Redis) it writes a new snapshot before new events.

    No method raises on Redis trouble, and all belong to the event loop's thread. The caller owns
    the client.

    Args:
        redis: from `baton.cluster.redis.connect`.
        worker: the worker's id.
        epoch: its epoch, as in its record.
        snapshot_batches: entries after which a new snapshot is written.
        refresh_interval: seconds between renewals while nothing happens.
        max_pending: hashes that may wait; beyond, a snapshot replaces them.
    """

    def __init__(
        self,
        redis: Redis,
        worker: str,
        epoch: int,
        *,
        snapshot_batches: int = _SNAPSHOT_BATCHES,
        refresh_interval: float = _REFRESH_INTERVAL,
        max_pending: int = _MAX_PENDING,
    ) -> None:
        self._redis = redis
        self._stream_key = stream_key(worker, epoch)
        self._snapshot_key = snapshot_key(worker, epoch)
        self._snapshot_batches = snapshot_batches
        self._refresh_interval = refresh_interval
        self._log = EventLog(max_pending)
        self._published = 0
        self._snapshot_sequence = 0  # of the snapshot in Redis
        self._snapshot_time = 0.0
        self._num_batches = 0  # published since that snapshot
        self._loop = RedisLoop(f"KV event publisher of {worker}", self._step)

    @property
    def sequence(self) -> int:
        """The number of the latest event."""
        return self._log.sequence

    @property
    def published(self) -> int:
        """The number of the latest event that Redis is known to have; `sequence` or less."""
        return self._published

    def start(self) -> None:
        """Publishes in the background, a snapshot first. Needs a running event loop."""
        self._loop.start()

    async def stop(self) -> None:
        """Stops at once. What waits is not sent, and what Redis holds expires by itself."""
        await self._loop.stop()

    def publish(self, events: KvEvents) -> None:
        """Takes in what changed. Never blocks, also before `start`; constant work per hash."""
        if events != KvEvents():
            self._log.append(events)
            self._loop.wake()

    async def _step(self) -> float:
        try:
            await self._send()
        except BaseException:
            self._log.fall_behind()
            raise
        return 0.0 if self._log.behind else self._refresh_interval

    async def _send(self) -> None:
        if self._log.behind:
            await self._send_snapshot(self._log.rebase())
        elif (batch := self._log.take()) is None:
            await self._refresh()
        elif self._snapshot_is_due():
            await self._send_snapshot(batch)
        else:
            await self._send_batch(batch)

    def _snapshot_is_due(self) -> bool:
        age = time.monotonic() - self._snapshot_time
        return self._num_batches >= self._snapshot_batches or age >= _SNAPSHOT_INTERVAL

    async def _send_snapshot(self, batch: EventBatch) -> None:
        snapshot = self._log.snapshot()
        await transact(
            self._redis,
            *self._append(batch),
            ("SET", self._snapshot_key, snapshot.to_bytes(), "EX", _TTL),
        )
        self._published = self._snapshot_sequence = snapshot.sequence
        self._snapshot_time = time.monotonic()
        self._num_batches = 0

    async def _send_batch(self, batch: EventBatch) -> None:
        replies = await transact(self._redis, *self._append(batch), *self._renew_snapshot())
        self._published = batch.last
        self._num_batches += 1
        self._check_snapshot(replies[-1])

    async def _refresh(self) -> None:
        """Renews what Redis holds, and notices if it is not what was published."""
        entries, *_, head = await transact(
            self._redis,
            ("XREVRANGE", self._stream_key, "+", "-", "COUNT", 1),
            ("EXPIRE", self._stream_key, _TTL),
            *self._renew_snapshot(),
        )
        self._check_snapshot(head)
        if [name for name, _ in entries] != [entry_id(self._published).encode()]:
            self._log.fall_behind()

    def _append(self, batch: EventBatch) -> list[Command]:
        fields: Command = tuple(part for pair in batch.to_fields().items() for part in pair)
        length: Command = ("MAXLEN", "~", _STREAM_LENGTH)
        return [
            ("XADD", self._stream_key, *length, batch.entry_id, *fields),
            ("EXPIRE", self._stream_key, _TTL),
        ]

    def _renew_snapshot(self) -> list[Command]:
        return [
            ("EXPIRE", self._snapshot_key, _TTL),
            ("GETRANGE", self._snapshot_key, 0, SEQUENCE_BYTES - 1),
        ]

    def _check_snapshot(self, head: bytes) -> None:
        """`head` is how the snapshot in Redis begins: not as ours if that was lost or replaced."""
        if head != encode_sequence(self._snapshot_sequence):
            self._log.fall_behind()
