"""KV event subscriber: applies workers' KV events from Redis to a router's locality index.

The caller chooses the workers to follow.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.events.kv_events import (
    SEQUENCE_BYTES,
    EventBatch,
    KvEvents,
    decode_sequence,
    decode_slots,
    slots_offset,
)
from baton.cluster.events.snapshot_signatures import SnapshotSignatures, signatures_range
from baton.cluster.index import LocalityIndex
from baton.cluster.keys import signatures_key, snapshot_key, stream_key
from baton.cluster.prefix import HASH_BYTES, BlockHash
from baton.cluster.redis.client import (
    Command,
    prefix_of,
    read_streams,
    signing_keys_of,
    transact,
    transact_each,
)
from baton.cluster.redis.loop import RedisLoop
from baton.cluster.throttled_log import ThrottledLog
from baton.rpc.backoff import Backoff

_BLOCK_MS = 200  # longest wait of a read for entries, and so of a new follow for its first read
_MAX_ENTRIES = 1024  # per read, of all streams together
_MIN_ENTRIES = 16  # per read, of each stream, even if that exceeds the total
_PART = 32_768  # slots of a snapshot in one reply: 512 KiB
_MAX_PARTS = 8  # per round trip
_PER_PART = 4  # replies
_IDLE = 60.0  # seconds; `follow` wakes the loop
_RESYNC_INTERVAL = 1.0  # seconds between attempts to read a snapshot

_HASHES_PER_SECOND = 100_000  # of one worker; each entry counts as `_HASHES_PER_ENTRY` at least
_HASHES_PER_ENTRY = 16
_BURST = 1_000_000  # hashes of one worker that are applied at once
_INSPECTION_INTERVAL = 5.0
_SUSPENSION = Backoff(first=5.0, longest=600.0)  # of streams that cannot be read
_MAX_REPLY_BYTES = 2**24  # of one stream's next entries, if they could not be read
_INSPECTED = 64  # streams inspected in one round trip

# Returns for each key whether it can be a stream, the bytes of its next entries (up to a limit) and
# the id of its last one.
#   KEYS: streams; ARGV: maximum number of entries, limit in bytes, last id read of each stream
_INSPECT = """
local found = {}
for i, key in ipairs(KEYS) do
  local size, last, at = 0, '', ARGV[i + 2]
  local latest = redis.pcall('XREVRANGE', key, '+', '-', 'COUNT', 1)
  if latest[1] then
    last = latest[1][1]
    for _ = 1, tonumber(ARGV[1]) do
      local read = redis.call('XREAD', 'COUNT', 1, 'STREAMS', key, at)
      if not read or size > tonumber(ARGV[2]) then break end
      local entry = read[1][2][1]
      for _, part in ipairs(entry[2]) do size = size + #part end
      at = entry[1]
    end
  end
  found[i] = {latest.err and 0 or 1, size, last}
end
return found
"""

_logger = logging.getLogger(__name__)

_EntryId = tuple[int, int]


@dataclass(slots=True)
class _Follow:
    """Read position in the event stream of one worker epoch.

    Attributes:
        applied: number of the latest event in the index.
        position: id of the latest entry that was read, also if it was refused.
        wanted: least sequence number of a snapshot that contains the missed events; None if none
            were missed. Events after a gap are applied anyway: a partial index beats none.
        resync_at: time of the next attempt to read that snapshot (`time.monotonic`).
        next_slot: first slot of the snapshot that is not in the index yet; None while no snapshot
            is being read.
        published: sequence number that the worker is known to have published.
        is_current: whether the latest read reached the stream's end and no event was missed.
        paused_until: time before which its stream is not read (`time.monotonic`).
        num_suspensions: how often in a row its stream could not be read.
        credit: hashes that may be applied before the stream is paused.
        credited_at: time at which `credit` was computed.
    """

    worker: str
    epoch: int
    applied: int = 0
    position: _EntryId = (0, 0)
    wanted: int | None = 0
    resync_at: float = 0.0
    next_slot: int | None = None
    published: int = 0
    is_current: bool = False
    paused_until: float = 0.0
    num_suspensions: int = 0
    credit: float = _BURST
    credited_at: float = field(default_factory=time.monotonic)

    def is_due(self, now: float) -> bool:
        """Returns whether its snapshot must be read now, which precedes reading its events."""
        return self.wanted is not None and self.resync_at <= now

    def is_behind(self, now: float) -> bool:
        """Returns whether there is more to read of it immediately."""
        is_unread = self.wanted is None and not self.is_current
        return self.is_due(now) or (is_unread and self.paused_until <= now)

    def spend(self, num_hashes: float, now: float) -> bool:
        """Takes `num_hashes` from its credit. Returns False if it has less: its stream pauses."""
        earned = (now - self.credited_at) * _HASHES_PER_SECOND
        self.credit, self.credited_at = min(_BURST, self.credit + earned) - num_hashes, now
        if self.credit < 0:
            self.paused_until = now - self.credit / _HASHES_PER_SECOND
        return self.credit >= 0

    def suspend(self, now: float, suspension: Backoff) -> None:
        """Pauses its stream, which could not be read, for a time that grows."""
        self.num_suspensions += 1
        self.paused_until = now + suspension.delay(self.num_suspensions)

    def restart(self) -> None:
        """Reads its stream again from the beginning, after its snapshot."""
        self.applied, self.position, self.published = 0, (0, 0), 0
        self.wanted, self.next_slot = 0, None


class EventSubscriber:
    """KV event subscriber: keeps a locality index up to date with the workers it follows.

    For each worker it reads the snapshot, then the stream after it; after a gap in the sequence
    numbers it reads the snapshot again. During a Redis outage the index keeps its content.

    No method raises on Redis errors; all must be called in the event loop's thread. The caller owns
    the client and the index.

    Args:
        redis: from `baton.cluster.redis.client.connect`.
        index: the index to which the events are applied.
        inspection_interval: seconds between inspections of all streams, which find those that
            began again.
        resync_interval: seconds between attempts to read a snapshot.
        suspension: seconds for which a stream that cannot be read is not read.

    Attributes:
        index: that index.
    """

    def __init__(
        self,
        redis: Redis,
        index: LocalityIndex,
        *,
        inspection_interval: float = _INSPECTION_INTERVAL,
        resync_interval: float = _RESYNC_INTERVAL,
        suspension: Backoff = _SUSPENSION,
    ) -> None:
        self._redis = redis
        self._prefix = prefix_of(redis)
        self._signing_keys = signing_keys_of(redis)
        self.index = index
        self._follows: dict[str, _Follow] = {}
        self._inspection_interval = inspection_interval
        self._next_inspection = 0.0
        self._resync_interval = resync_interval
        self._suspension = suspension
        self._log = ThrottledLog(_logger)
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
        self.index.drop(worker)
        self._follows[worker] = _Follow(worker, epoch)
        self._loop.wake()

    def unfollow(self, worker: str) -> None:
        """Stops following the worker, and drops it from the index immediately."""
        self._follows.pop(worker, None)
        self.index.drop(worker)

    async def _step(self) -> float:
        if not self._follows:
            return _IDLE
        await self._resync(time.monotonic())
        now = time.monotonic()
        await self._inspect_due(now)
        follows = {
            stream_key(follow.worker, follow.epoch, self._prefix).encode(): follow
            for follow in self._follows.values()
            if not follow.is_due(now) and follow.paused_until <= now
        }
        is_behind = any(follow.is_behind(now) for follow in self._follows.values())
        if follows:
            await self._read(follows, wait_ms=0 if is_behind else _BLOCK_MS)
            return 0.0
        return 0.0 if is_behind else _BLOCK_MS / 1000

    # Snapshots.

    async def _resync(self, now: float) -> None:
        """Reads the next parts of wanted snapshots, in one round trip."""
        due = [follow for follow in self._follows.values() if follow.is_due(now)]
        due.sort(key=lambda follow: follow.next_slot is None)  # those begun come first
        parts = due[:_MAX_PARTS]
        if not parts:
            return
        commands = [command for follow in parts for command in self._read_part(follow)]
        replies = await transact_each(self._redis, *commands)
        for number, follow in enumerate(parts):
            found = replies[_PER_PART * number : _PER_PART * (number + 1)]
            try:
                sequence, size, blocks = self._part_in(follow, found)
            except ValueError as error:
                self._log.warning("ignoring the snapshot of worker %r: %s", follow.worker, error)
                sequence, size, blocks = 0, 0, ()
            if self._is_followed(follow):
                self._apply_part(follow, sequence, size, blocks, now)
                await asyncio.sleep(0)  # lets requests run first

    def _read_part(self, follow: _Follow) -> tuple[Command, ...]:
        worker, start = (follow.worker, follow.epoch, self._prefix), follow.next_slot or 0
        snapshot, signatures = snapshot_key(*worker), signatures_key(*worker)
        offset = slots_offset(start)
        return (
            ("GETRANGE", snapshot, 0, SEQUENCE_BYTES - 1),
            ("GETRANGE", snapshot, offset, offset + _PART * HASH_BYTES - 1),
            ("GETRANGE", signatures, 0, signatures_range(0, 0)[0] - 1),
            ("GETRANGE", signatures, *signatures_range(start, _PART)),
        )

    def _part_in(
        self, follow: _Follow, replies: list[Any]
    ) -> tuple[int, int, tuple[BlockHash, ...]]:
        """Returns the sequence number, the number of slots and the hashes of a part.

        Raises:
            ValueError: a key is of another type, or the part is not signed as needed.
        """
        for reply in replies:
            if isinstance(reply, Exception):
                raise ValueError("its key is of another type than a string")
        head, data, first, others = replies
        sequence, size = decode_sequence(head), len(data) // HASH_BYTES
        data = data[: size * HASH_BYTES]
        if self._signing_keys is None or not head:
            return sequence, size, decode_slots(data)
        key = snapshot_key(follow.worker, follow.epoch, self._prefix)
        signatures = SnapshotSignatures(self._signing_keys, key)
        if not signatures.is_sequence(head, first):
            raise ValueError("it is not signed by a key that is known here")
        blocks = signatures.signed_slots(follow.next_slot or 0, data, others)
        if blocks is None:
            raise ValueError("a part of it is not signed by a key that is known here")
        return sequence, size, blocks

    def _apply_part(
        self,
        follow: _Follow,
        sequence: int,
        num_slots: int,
        blocks: tuple[BlockHash, ...],
        now: float,
    ) -> None:
        """Applies a part of a snapshot to the index; the first part replaces the worker's blocks.

        All parts are as they were at the sequence number first read or later, and the events after
        it are applied after the last part; so writes of the worker in between do no harm. A smaller
        number shows that the worker began a new snapshot.
        """
        assert follow.wanted is not None
        is_first = follow.next_slot is None
        least = max(1, follow.wanted if is_first else follow.applied)
        if sequence < least:
            follow.next_slot, follow.resync_at = None, now + self._resync_interval
            return
        if is_first:
            self.index.replace(follow.worker, follow.epoch, ())
            follow.next_slot, follow.applied, follow.position = 0, sequence, (sequence, 0)
        self.index.apply(follow.worker, follow.epoch, KvEvents(stored=blocks))
        assert follow.next_slot is not None
        follow.next_slot += _PART
        is_too_long = follow.next_slot >= self.index.max_entries
        if is_too_long:
            self._log.warning("reading only a part of the snapshot of worker %r", follow.worker)
        if is_too_long or num_slots < _PART:
            follow.next_slot = follow.wanted = None
            follow.published, follow.resync_at = sequence, now + self._resync_interval

    # Events.

    async def _read(self, follows: Mapping[bytes, _Follow], wait_ms: int) -> None:
        """Reads and applies new stream entries; waits up to `wait_ms` for the first."""
        positions = {key: _id_of(follow.position) for key, follow in follows.items()}
        max_entries = max(_MIN_ENTRIES, _MAX_ENTRIES // len(positions))
        try:
            found = dict(await read_streams(self._redis, positions, max_entries, wait_ms))
        except (RedisError, OSError):
            if not await self._inspect(list(follows.values()), max_entries, time.monotonic()):
                raise
            return
        for key, follow in follows.items():
            entries = found.get(key, ())
            is_end = len(entries) < max_entries
            for name, fields in entries:
                if not self._apply(follow, _position_of(name), fields):
                    is_end = False
                    break
            if is_end and follow.applied < follow.published:
                follow.wanted = follow.published  # the snapshot was read too slowly for the stream
            follow.is_current = is_end and follow.wanted is None
            if entries:
                await asyncio.sleep(0)  # lets requests run first

    async def _inspect_due(self, now: float) -> None:
        """Inspects streams whose suspension is over, and all others once per interval."""
        readable = [follow for follow in self._follows.values() if follow.paused_until <= now]
        if suspects := [follow for follow in readable if follow.num_suspensions]:
            await self._inspect(suspects, _MAX_ENTRIES, now)
        if now >= self._next_inspection:
            self._next_inspection = now + self._inspection_interval
            await self._inspect(readable, 0, now)

    async def _inspect(self, follows: list[_Follow], max_entries: int, now: float) -> bool:
        """Suspends streams that no read can return: keys of another type, and those whose next
        `max_entries` are too long. Reads streams again that began again at earlier ids. Returns
        whether any was such."""
        num_found = 0
        for start in range(0, len(follows), _INSPECTED):
            chunk = follows[start : start + _INSPECTED]
            keys = [stream_key(follow.worker, follow.epoch, self._prefix) for follow in chunk]
            ids = [_id_of(follow.position) for follow in chunk]
            limits = (max_entries, _MAX_REPLY_BYTES)
            command: Command = ("EVAL", _INSPECT, len(keys), *keys, *limits, *ids)
            (replies,) = await transact(self._redis, command)
            for follow, (is_stream, num_bytes, last) in zip(chunk, replies, strict=True):
                num_found += self._is_at_fault(follow, is_stream, num_bytes, last, now)
        return num_found > 0

    def _is_at_fault(
        self, follow: _Follow, is_stream: int, num_bytes: int, last: bytes, now: float
    ) -> bool:
        """Returns whether something is wrong with a stream, and acts on it."""
        if not is_stream:
            text = "ignoring the events of worker %r: their key is of another type than a stream"
            self._log.warning(text, follow.worker)
            follow.suspend(now, self._suspension)
        elif num_bytes > _MAX_REPLY_BYTES:
            text = "skipping the next %d bytes of events of worker %r: they take too long to read"
            self._log.warning(text, num_bytes, follow.worker)
            follow.restart()
            follow.suspend(now, self._suspension)
        elif last and _position_of(last) < follow.position:
            follow.restart()
        else:
            follow.num_suspensions = 0
            return False
        return True

    def _apply(self, follow: _Follow, position: _EntryId, fields: Mapping[bytes, bytes]) -> bool:
        """Applies a stream entry; returns False if the rest must be read later."""
        if not self._is_followed(follow):
            return False
        follow.position = position
        num_hashes = _HASHES_PER_ENTRY + sum(map(len, fields.values())) / HASH_BYTES
        has_credit = follow.spend(num_hashes, time.monotonic())
        if not has_credit:
            text = "reading the events of worker %r later: it has more than %d hashes a second"
            self._log.warning(text, follow.worker, _HASHES_PER_SECOND)
        try:
            batch = EventBatch.from_fields(fields)
            if position != (batch.last, 0):
                raise ValueError(f"its id is {_id_of(position)}; expected {batch.entry_id}")
            if self._signing_keys is not None:
                name = stream_key(follow.worker, follow.epoch, self._prefix)
                self._signing_keys.check_fields(name, fields, max_age=None)
        except ValueError as error:
            self._log.warning("ignoring an event of worker %r: %s", follow.worker, error)
            return has_credit
        if batch.first > follow.applied + 1:
            follow.wanted = batch.first - 1
        elif batch.first == 1:
            follow.wanted = None  # the stream has all events of the epoch
        self.index.apply(follow.worker, follow.epoch, batch.events)
        follow.applied = batch.last
        return has_credit

    def _is_followed(self, follow: _Follow) -> bool:
        return self._follows.get(follow.worker) is follow


def _position_of(name: bytes) -> _EntryId:
    number, _, rest = name.partition(b"-")
    return int(number), int(rest)


def _id_of(position: _EntryId) -> str:
    return "{}-{}".format(*position)
