"""KV event publisher of a worker: writes its KV events to a Redis stream and snapshot.

Independent of the prefix cache that makes the events, and of their readers.
"""

import asyncio
import time

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from baton.cluster.events.compaction import Compaction, Slice
from baton.cluster.events.event_log import EventLog
from baton.cluster.events.kv_events import (
    EventBatch,
    KvEvents,
    encode_sequence,
    entry_id,
    slots_offset,
)
from baton.cluster.events.snapshot_signatures import CHUNK, SnapshotSignatures, signatures_range
from baton.cluster.keys import signatures_key, snapshot_key, stream_key
from baton.cluster.redis.client import Command, prefix_of, signing_keys_of, transact
from baton.cluster.redis.loop import RedisLoop

_TTL = 60  # seconds that stream and snapshot outlive their last renewal
_REFRESH_INTERVAL = 15.0  # seconds between TTL renewals while there are no events
_BEGIN_INTERVAL = 1.0  # seconds between two new snapshots, at least
_MAX_PENDING = 16_384  # hashes: one entry is at most 256 KiB

# Appends to stream and snapshot if Redis holds what this publisher wrote last, so that a reader
# never sees a snapshot that lost a part. Returns 1 if it did, else 0.
#   KEYS: stream, snapshot, signatures of the snapshot
#   ARGV: expected head of the snapshot, expected id of the stream's last entry,
#         new head, offset to write at, data to write, least entry id to keep, TTL in seconds,
#         expected first signature (empty: nothing is signed), new one, offset to write others at,
#         others to write,
#         id of the entry to add, its fields (both may be missing)
_CONTINUE = """
local stream, snapshot, signatures = KEYS[1], KEYS[2], KEYS[3]
if redis.call('GETRANGE', snapshot, 0, 7) ~= ARGV[1] then return 0 end
local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
if not last or last[1] ~= ARGV[2] then return 0 end
if ARGV[8] ~= '' then
  if redis.call('GETRANGE', signatures, 0, 15) ~= ARGV[8] then return 0 end
  redis.call('SETRANGE', signatures, ARGV[10], ARGV[11])
  redis.call('SETRANGE', signatures, 0, ARGV[9])
  redis.call('EXPIRE', signatures, ARGV[7])
end
if ARGV[12] then redis.call('XADD', stream, unpack(ARGV, 12)) end
redis.call('SETRANGE', snapshot, ARGV[4], ARGV[5])
redis.call('SETRANGE', snapshot, 0, ARGV[3])
redis.call('XTRIM', stream, 'MINID', '~', ARGV[6])
redis.call('EXPIRE', stream, ARGV[7])
redis.call('EXPIRE', snapshot, ARGV[7])
return 1
"""


class EventPublisher:
    """KV event publisher of one worker epoch.

    The snapshot in Redis and the stream's tail after it add up to the blocks cached on the worker,
    with at most one round trip in flight. Each batch updates a slice of the snapshot, so that the
    cost of a step is independent of the cache's size. After a possible loss (a failed round trip, a
    flushed or restored Redis) it begins a new snapshot before new events.

    No method raises on Redis errors; all must be called in the event loop's thread. The caller owns
    the client.

    Args:
        redis: from `baton.cluster.redis.client.connect`.
        worker: the worker's id.
        epoch: its epoch, as in its record.
        refresh_interval: seconds between TTL renewals while there are no events.
        max_pending: maximum unpublished hashes; beyond, a new snapshot replaces them.
        max_slots: maximum slots of the snapshot written at once; None: 256 KiB.
        begin_interval: least seconds between two new snapshots.
    """

    def __init__(
        self,
        redis: Redis,
        worker: str,
        epoch: int,
        *,
        refresh_interval: float = _REFRESH_INTERVAL,
        max_pending: int = _MAX_PENDING,
        max_slots: int | None = None,
        begin_interval: float = _BEGIN_INTERVAL,
    ) -> None:
        self._redis = redis
        self._worker = worker
        self._stream_key = stream_key(worker, epoch, prefix_of(redis))
        self._snapshot_key = snapshot_key(worker, epoch, prefix_of(redis))
        self._signatures_key = signatures_key(worker, epoch, prefix_of(redis))
        self._signing_keys = signing_keys_of(redis)
        self._signed_by = b""
        self._signatures: SnapshotSignatures | None = None
        if self._signing_keys is not None:
            self._signatures = SnapshotSignatures(self._signing_keys, self._snapshot_key)
        self._refresh_interval = refresh_interval
        self._log = EventLog(max_pending)
        options = {} if max_slots is None else {"max_slots": max_slots}
        if self._signatures is not None:
            options["chunk"] = CHUNK
        self._compaction = Compaction(self._log.snapshot, **options)
        self._published = 0
        self._begin_interval = begin_interval
        self._next_begin = 0.0  # `time.monotonic`
        self._loop = RedisLoop(f"KV event publisher of {worker}", self._step)

    @property
    def sequence(self) -> int:
        """Number of the latest event."""
        return self._log.sequence

    @property
    def published(self) -> int:
        """Number of the latest event that Redis is known to have; at most `sequence`."""
        return self._published

    @property
    def staleness(self) -> float:
        """Seconds since Redis last answered; 0 while it answers."""
        return self._loop.staleness

    def start(self) -> None:
        """Starts publishing in the background, a snapshot first. Needs a running event loop."""
        self._loop.start()

    async def stop(self) -> None:
        """Stops immediately. Unpublished events are not sent; the keys in Redis expire."""
        await self._loop.stop()

    def successor(self, epoch: int) -> "EventPublisher":
        """Returns a publisher for the worker's next epoch, with the blocks cached now. The caller
        starts it, and publishes no more events here."""
        successor = EventPublisher(self._redis, self._worker, epoch)
        successor.publish(KvEvents(stored=tuple(self._log.snapshot.hashes)))
        return successor

    def publish(self, events: KvEvents) -> None:
        """Queues cache changes. Never blocks, also before `start`; constant work per hash."""
        if events:
            self._log.append(events)
            self._loop.wake()

    async def _step(self) -> float:
        if self._signing_keys is not None and self._signing_keys.first != self._signed_by:
            self._signed_by = self._signing_keys.first
            self._log.fall_behind()  # all is signed again
        try:
            if self._log.behind:
                await asyncio.sleep(self._next_begin - time.monotonic())
                self._next_begin = time.monotonic() + self._begin_interval
                await self._begin(self._log.rebase())
            else:
                await self._continue(self._log.take())
        except BaseException:
            self._log.fall_behind()
            raise
        is_incomplete = self._log.behind or self._compaction.sequence == 0
        return 0.0 if is_incomplete else self._refresh_interval

    async def _begin(self, batch: EventBatch) -> None:
        """Begins a new snapshot, complete after this step if it is small. Replaces a stream that
        does not take the batch: a key of another type, or one with forged entries of later ids."""
        self._compaction.restart()
        part = self._compaction.advance(0, batch.last)
        commands: tuple[Command, ...] = (
            ("XADD", self._stream_key, *self._entry(batch)),
            ("EXPIRE", self._stream_key, _TTL),
            ("SET", self._snapshot_key, encode_sequence(part.sequence) + part.data, "EX", _TTL),
        )
        if self._signatures is not None:
            signatures = self._signatures.sign_sequence(part.sequence)
            signatures += self._signatures.sign_slots(part.start, part.data)
            commands += (("SET", self._signatures_key, signatures, "EX", _TTL),)
        try:
            await transact(self._redis, *commands)
        except ResponseError:
            await transact(self._redis, ("DEL", self._stream_key), *commands)
        self._published = batch.last

    async def _continue(self, batch: EventBatch | None) -> None:
        """Sends unpublished events and the next slice of the snapshot, or only renews the TTLs.
        Falls behind if Redis does not hold what was written last."""
        before, num_hashes = self._compaction.sequence, 0
        last = self._published
        if batch is not None:
            last, num_hashes = batch.last, len(batch.events.stored) + len(batch.events.removed)
        part = self._compaction.advance(num_hashes, last)
        (has_continued,) = await transact(self._redis, self._command(before, part, batch))
        if has_continued:
            self._published = last
        else:
            self._log.fall_behind()

    def _command(self, before: int, part: Slice, batch: EventBatch | None) -> Command:
        keys = (3, self._stream_key, self._snapshot_key, self._signatures_key)
        expected = (encode_sequence(before), entry_id(self._published))
        written = (encode_sequence(part.sequence), slots_offset(part.start), part.data)
        kept = (entry_id(part.oldest), _TTL)
        signed: Command = ("", "", 0, "")
        if self._signatures is not None:
            signed = (
                self._signatures.sign_sequence(before),
                self._signatures.sign_sequence(part.sequence),
                signatures_range(part.start, 0)[0],
                self._signatures.sign_slots(part.start, part.data),
            )
        entry = () if batch is None else self._entry(batch)
        return ("EVAL", _CONTINUE, *keys, *expected, *written, *kept, *signed, *entry)

    def _entry(self, batch: EventBatch) -> Command:
        """Returns the id and the fields of the batch's stream entry."""
        fields = batch.to_fields()
        if self._signing_keys is not None:
            fields = self._signing_keys.sign_fields(self._stream_key, fields)
        return (batch.entry_id, *(part for pair in fields.items() for part in pair))
