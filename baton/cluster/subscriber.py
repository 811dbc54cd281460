"""The KV events of all workers, on their way from Redis into a router's index.

Knows nothing of which workers there are; it follows those it is told to.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.typing import KeyT, StreamIdT

from baton.cluster.events import (
    EventBatch,
    Snapshot,
    entry_id,
)
from baton.cluster.index import LocalityIndex
from baton.cluster.keys import snapshot_key, stream_key
from baton.cluster.loop import RedisLoop
from baton.cluster.redis import TIMEOUT, transact

_BLOCK_MS = 200  # how long a read waits for news, and a new follow for its first read
_MAX_ENTRIES = 32  # per stream and read
_IDLE = 60.0  # seconds; `follow` wakes the loop
_MEND_INTERVAL = 1.0  # seconds between looks for a snapshot

_Entry = tuple[bytes, Mapping[bytes, bytes]]

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Follow:
    """How far one worker epoch was read.

    Attributes:
        applied: the number of the latest event in the index.
        wanted: the least sequence number of a snapshot that mends what was missed; None if nothing
            was. Events after a gap are applied all the same: a partial index beats none.
        mend_at: when to look for that snapshot (`time.monotonic`).
    """

    worker: str
    epoch: int
    applied: int = 0
    wanted: int | None = 0
    mend_at: float = 0.0


class EventSubscriber:
    """Keeps a locality index up to date with the workers it follows.

    Each begins with the snapshot and goes on with the stream after it; a gap in the sequence
    numbers sends it back to the snapshot. While Redis does not answer, the index keeps what it has.

    No method raises on Redis trouble, and all belong to the event loop's thread. The caller owns
    the client and the index, which nobody else should write to.

    Args:
        redis: from `baton.cluster.redis.connect`.
        index: what the events are applied to.
    """

    def __init__(self, redis: Redis, index: LocalityIndex) -> None:
        self._redis = redis
        self._index = index
        self._follows: dict[str, _Follow] = {}
        self._loop = RedisLoop("KV event subscriber", self._step)

    @property
    def stale(self) -> bool:
        """Whether Redis did not answer the latest read, or was not asked yet."""
        return self._loop.answering_since is None

    def start(self) -> None:
        """Reads in the background. Needs a running event loop."""
        self._loop.start()

    async def stop(self) -> None:
        """Stops reading. The index stays as it is."""
        await self._loop.stop()

    def follow(self, worker: str, epoch: int) -> None:
        """Reads that epoch of the worker from now on, and forgets what another epoch of it held."""
        known = self._follows.get(worker)
        if known is not None and known.epoch == epoch:
            return
        self._index.drop(worker)
        self._follows[worker] = _Follow(worker, epoch)
        self._loop.wake()

    def unfollow(self, worker: str) -> None:
        """Reads no more of the worker, and drops it from the index at once."""
        self._follows.pop(worker, None)
        self._index.drop(worker)

    async def _step(self) -> float:
        await self._mend()
        follows = {
            stream_key(follow.worker, follow.epoch).encode(): follow
            for follow in self._follows.values()
        }
        if not follows:
            return _IDLE
        for key, entries in await self._read(follows):
            for name, fields in entries:
                self._apply(follows[key], name, fields)
        return 0.0

    async def _mend(self) -> None:
        """Looks for the snapshots that are wanted, in one round trip."""
        now = time.monotonic()
        wanting = [
            follow
            for follow in self._follows.values()
            if follow.wanted is not None and follow.mend_at <= now
        ]
        if not wanting:
            return
        keys = [snapshot_key(follow.worker, follow.epoch) for follow in wanting]
        for follow, data in zip(
            wanting, await transact(self._redis, *(("GET", key) for key in keys)), strict=True
        ):
            follow.mend_at = now + _MEND_INTERVAL
            if data is not None and self._is_followed(follow):
                self._restart(follow, data)

    def _restart(self, follow: _Follow, data: bytes) -> None:
        """Puts the snapshot in place of what the index has, if it mends what was missed."""
        try:
            snapshot = Snapshot.from_bytes(data)
        except ValueError as error:
            _logger.warning("ignoring the snapshot of worker %r: %s", follow.worker, error)
            return
        if follow.wanted is not None and snapshot.sequence >= follow.wanted:
            self._index.replace(follow.worker, follow.epoch, snapshot.hashes)
            follow.applied = snapshot.sequence
            follow.wanted = None

    async def _read(self, follows: Mapping[bytes, _Follow]) -> list[tuple[bytes, list[_Entry]]]:
        """What is new in the streams; waits for it a moment."""
        positions: dict[KeyT, StreamIdT] = {
            key: entry_id(follow.applied) for key, follow in follows.items()
        }
        async with asyncio.timeout(TIMEOUT + _BLOCK_MS / 1000):
            replies: Any = await self._redis.xread(positions, count=_MAX_ENTRIES, block=_BLOCK_MS)
        return cast("list[tuple[bytes, list[_Entry]]]", replies)

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
        self._index.apply(follow.worker, follow.epoch, batch.events)
        follow.applied = batch.last

    def _is_followed(self, follow: _Follow) -> bool:
        return self._follows.get(follow.worker) is follow
