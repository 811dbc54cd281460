"""Registry watcher of a router: the reading side of `baton.cluster.registry.registry`.

The router checks the workers' health itself.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from redis.asyncio import Redis

from baton.cluster.keys import record_key, workers_key
from baton.cluster.redis.client import prefix_of, signing_keys_of, transact
from baton.cluster.redis.loop import RedisLoop
from baton.cluster.registry.reader import Fields, RegistryReader
from baton.cluster.registry.registry import WorkerRecord
from baton.cluster.throttled_log import ThrottledLog

INTERVAL = 0.5  # seconds between polls
_GRACE = 10.0  # seconds for which a worker may lack its record if Redis may have lost it
_CHUNK = 64  # records handled without a break

_logger = logging.getLogger(__name__)

OnChange = Callable[[str, WorkerRecord | None], None]


class RegistryWatcher:
    """Registry watcher: keeps the records of all workers, and reports joins, changes and leaves.

    During a Redis outage it keeps the known records and is `stale`. A worker has left when its id
    is listed without a record, the state after expiry and after a graceful stop. If the id is not
    listed either, or there was an outage since, Redis may have lost the record of a live worker;
    then the worker has left only after `grace` seconds of answers without its record. The same
    holds while its record is refused: malformed, a key of a wrong type, or not signed as needed. A
    record of an older epoch than the known one counts as none.

    No method raises on Redis errors. The caller owns the client.

    Args:
        redis: from `baton.cluster.redis.client.connect`.
        on_change: called in the event loop with (id, record) of a worker that joined or changed,
            and (id, None) of one that left, after `records` is updated. Must not block.
        interval: seconds between polls.
        grace: grace period in seconds, see above.
    """

    def __init__(
        self,
        redis: Redis,
        on_change: OnChange,
        *,
        interval: float = INTERVAL,
        grace: float = _GRACE,
    ) -> None:
        self._redis = redis
        self._reader = RegistryReader(redis)
        self._prefix = prefix_of(redis)
        self._workers_key = workers_key(self._prefix)
        self._signing_keys = signing_keys_of(redis)
        self._on_change = on_change
        self._interval = interval
        self._grace = grace
        self._records: dict[str, WorkerRecord] = {}
        self._listed: set[str] = set()
        self._seen: dict[str, float] = {}  # when each known worker's record was last read
        self._missing: dict[str, float] = {}  # when an id was first seen without a record
        self._refused: dict[str, str] = {}
        self._decoded: dict[str, tuple[Fields | str, WorkerRecord]] = {}  # by the latest read
        self._unreadable: set[bytes] = set()  # listed ids that are no UTF-8
        self._log = ThrottledLog(_logger)
        self._has_read = asyncio.Event()
        self._loop = RedisLoop("registry watcher", self._poll)

    @property
    def listed(self) -> frozenset[str]:
        """Ids of workers in the registry's list, as of the last poll."""
        return frozenset(self._listed)

    @property
    def records(self) -> Mapping[str, WorkerRecord]:
        """Records of the known workers by id; a live view."""
        return MappingProxyType(self._records)

    @property
    def refused(self) -> Mapping[str, str]:
        """Reasons why records of the latest read were refused, by id."""
        return MappingProxyType(self._refused)

    @property
    def stale(self) -> bool:
        """True if Redis did not answer the latest poll, or was not polled yet."""
        return self._loop.answering_since is None

    @property
    def staleness(self) -> float:
        """Seconds since Redis last answered; 0 while it answers."""
        return self._loop.staleness

    async def first_read(self) -> None:
        """Waits until the first read of Redis, after which `records` has the records found."""
        await self._has_read.wait()

    def start(self) -> None:
        """Starts polling in the background, at once and every interval. Needs an event loop."""
        self._loop.start()

    async def stop(self) -> None:
        """Stops polling; keeps the records."""
        await self._loop.stop()

    async def _poll(self) -> float:
        if self.stale:
            self._missing.clear()
        found = await self._read()
        now = time.monotonic()
        fresh = set()
        for number, (worker, record) in enumerate(found.items(), 1):
            if self._accept(record, now):
                fresh.add(worker)
            if number % _CHUNK == 0:
                await asyncio.sleep(0)  # lets requests run first
        self._note_missing(fresh, now)
        for worker in self._records.keys() - fresh:
            if self._has_left(worker, found, now):
                self._forget(worker)
        self._has_read.set()
        await self._prune(found, now)
        return self._interval

    async def _read(self) -> dict[str, WorkerRecord]:
        """Reads the records of listed and of known workers."""
        self._list(await self._reader.ids())
        found = await self._reader.records(sorted(self._listed | self._records.keys()))
        self._refused, before, self._decoded = {}, self._decoded, {}
        for number, (worker, fields) in enumerate(found.items(), 1):
            known = before.get(worker)
            is_known = known is not None and known[0] == fields and self._signing_keys is None
            record = known[1] if known and is_known else self._decode(worker, fields)
            if record is not None:
                self._decoded[worker] = fields, record
            if number % _CHUNK == 0:
                await asyncio.sleep(0)  # lets requests run first
        return {worker: record for worker, (_, record) in self._decoded.items()}

    def _list(self, ids: list[bytes] | None) -> None:
        if ids is None:
            self._log.warning("the list of workers in Redis is a key of another type than a set")
            ids = []
        self._listed, self._unreadable = set(), set()
        for member in ids:
            try:
                self._listed.add(member.decode())
            except UnicodeDecodeError:
                self._unreadable.add(member)

    def _decode(self, worker: str, fields: Fields | str) -> WorkerRecord | None:
        try:
            if isinstance(fields, str):
                raise ValueError(fields)
            if self._signing_keys is not None:
                self._signing_keys.check_fields(record_key(worker, self._prefix), fields)
            record = WorkerRecord.from_fields(fields)
            if record.id != worker:
                raise ValueError(f"it is filed under another id than its own, {record.id!r}")
        except ValueError as error:
            self._log.warning("ignoring the record of worker %r: %s", worker, error)
            self._refused[worker] = str(error)
            return None
        return record

    def _accept(self, record: WorkerRecord, now: float) -> bool:
        """Applies the record; returns False if a newer epoch of its worker is known."""
        known = self._records.get(record.id)
        if known is not None and record.epoch < known.epoch:
            return False
        self._seen[record.id] = now
        if record != known:
            self._records[record.id] = record
            self._notify(record.id, record)
        return True

    def _note_missing(self, fresh: set[str], now: float) -> None:
        missing = (self._listed | self._records.keys()) - fresh
        self._missing = {worker: self._missing.get(worker, now) for worker in missing}

    def _has_left(self, worker: str, found: Mapping[str, WorkerRecord], now: float) -> bool:
        answering_since = self._loop.answering_since
        unbroken = answering_since is not None and answering_since <= self._seen[worker]
        is_gone = worker not in found and worker not in self._refused
        certain = unbroken and worker in self._listed and is_gone
        return certain or self._missing_for(worker, now) >= self._grace

    def _forget(self, worker: str) -> None:
        del self._records[worker], self._seen[worker]
        self._notify(worker, None)

    def _notify(self, worker: str, record: WorkerRecord | None) -> None:
        try:
            self._on_change(worker, record)
        except Exception:
            _logger.exception("the registry watcher's listener failed")

    async def _prune(self, found: Mapping[str, WorkerRecord], now: float) -> None:
        """Removes ids without a valid record for the whole grace period from the list.

        Not earlier, so that every router sees such an id listed; a live worker lists itself again.
        """
        late = (
            worker.encode()
            for worker in self._listed - found.keys()
            if self._missing_for(worker, now) >= self._grace
        )
        dead = [*late, *self._unreadable]
        if dead:
            await transact(self._redis, ("SREM", self._workers_key, *dead))

    def _missing_for(self, worker: str, now: float) -> float:
        return now - self._missing.get(worker, now)
