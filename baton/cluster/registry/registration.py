"""Registration of a worker: writes its record to Redis and renews it while it runs.

A record is a hash that expires unless renewed; a set lists the ids (`baton.cluster.keys`). Of two
live workers with one id the first keeps the record, and both say so: the second waits until the
record is gone, or its worker drains.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.keys import record_key, rival_key, workers_key
from baton.cluster.redis.client import prefix_of, signing_keys_of, transact
from baton.cluster.redis.loop import RedisLoop
from baton.cluster.registry.registry import WorkerRecord
from baton.cluster.throttled_log import ThrottledLog

_INTERVAL = 1.0  # seconds between renewals
_TTL = 5.0  # seconds a record outlives its last renewal
# Renewals that the worker of a record may leave out before another one with its id takes it.
_MISSED_RENEWALS = 3

_logger = logging.getLogger(__name__)

# Deletes the record and the note of a rival, but only those of this worker: one that stops slowly
# must not remove the record of its successor.
#   KEYS: record, rival; ARGV: epoch, endpoint
_DELETE_OURS = """
if redis.pcall('HGET', KEYS[1], 'epoch') == ARGV[1] then redis.call('DEL', KEYS[1]) end
if redis.pcall('HGET', KEYS[2], 'endpoint') == ARGV[2] then redis.call('DEL', KEYS[2]) end
"""

# Replaces the record, whatever the type and the fields of its key were, and lists the id. Returns
# the endpoint of a rival, if one has noted itself. But if the record is that of another worker,
# which has renewed it lately and does not drain, notes this one as a rival, unless it drains, and
# returns the fields. Without the right to PTTL no worker has renewed lately.
#   KEYS: record, list of ids, rival; ARGV: this worker's endpoint, an endpoint whose record is
#   replaced, least and most milliseconds that a renewed record has left, whether this worker
#   drains, id, fields
_RENEW = """
local fields, left = redis.pcall('HGETALL', KEYS[1]), redis.pcall('PTTL', KEYS[1])
local held, is_renewed = {}, type(left) == 'number'
if not fields.err then for i = 1, #fields, 2 do held[fields[i]] = fields[i + 1] end end
is_renewed = is_renewed and left > tonumber(ARGV[3]) and left <= tonumber(ARGV[4])
local other = held.endpoint
if other and other ~= ARGV[1] and other ~= ARGV[2] and is_renewed and held.draining ~= '1' then
  if ARGV[5] ~= '1' then
    redis.call('DEL', KEYS[3])
    redis.call('HSET', KEYS[3], 'endpoint', ARGV[1])
    redis.call('PEXPIRE', KEYS[3], ARGV[4])
  end
  return fields
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(ARGV, 7))
redis.call('PEXPIRE', KEYS[1], ARGV[4])
if type(redis.pcall('SADD', KEYS[2], ARGV[6])) == 'table' then
  redis.call('DEL', KEYS[2])
  redis.call('SADD', KEYS[2], ARGV[6])
end
local rival = redis.pcall('HGET', KEYS[3], 'endpoint')
return type(rival) == 'string' and rival or ''
"""


class Registration:
    """Registration of one worker: keeps its record in Redis, and restores it if Redis lost it.

    No method raises on Redis errors. The caller owns the client.

    Args:
        redis: from `baton.cluster.redis.client.connect`.
        record: the worker's record.
        interval: seconds between renewals.
        ttl: seconds the record outlives its last renewal.
    """

    def __init__(
        self,
        redis: Redis,
        record: WorkerRecord,
        *,
        interval: float = _INTERVAL,
        ttl: float = _TTL,
    ) -> None:
        self._redis = redis
        self._prefix = prefix_of(redis)
        self._signing_keys = signing_keys_of(redis)
        self._record = record
        self._interval = interval
        self._ttl = ttl
        self._num_waits = 0  # consecutive renewals at which another worker had the record
        self._log = ThrottledLog(_logger)
        self._loop = RedisLoop(f"registration of {record.id}", self._renew)

    @property
    def record(self) -> WorkerRecord:
        """The record registered now."""
        return self._record

    @property
    def stale(self) -> bool:
        """True if Redis did not answer the latest renewal, or there was none yet."""
        return self._loop.answering_since is None

    @property
    def staleness(self) -> float:
        """Seconds since Redis last answered; 0 while it answers."""
        return self._loop.staleness

    def start(self) -> None:
        """Starts registering in the background, at once and every interval. Needs an event loop."""
        self._loop.start()

    def update(self, record: WorkerRecord) -> None:
        """Replaces the record, which must be of the same worker in this epoch or a later one.
        Returns before it is written."""
        assert record.id == self._record.id
        assert record.epoch >= self._record.epoch
        self._record = record
        self._loop.wake()

    async def stop(self) -> None:
        """Stops renewing and removes the record, if Redis answers in time.

        The id stays listed, which shows a watcher that the worker left and Redis lost no data.
        """
        await self._loop.stop()
        record, prefix = self._record, self._prefix
        keys = record_key(record.id, prefix), rival_key(record.id, prefix)
        own = record.epoch, record.endpoint
        with contextlib.suppress(RedisError, OSError):
            await transact(self._redis, ("EVAL", _DELETE_OURS, len(keys), *keys, *own))

    async def _renew(self) -> float:
        reply = await self._write()
        if isinstance(reply, list):
            holder = _fields_of(reply)
            if self._is_forged(holder):
                reply = await self._write(replaced=holder[b"endpoint"])
        if isinstance(reply, list):
            self._wait_for(_fields_of(reply)[b"endpoint"].decode(errors="replace"))
        else:
            self._keep_beside(reply.decode(errors="replace"))
        return self._interval

    async def _write(self, replaced: bytes = b"") -> list[bytes] | bytes:
        """Runs `_RENEW`, and returns its reply."""
        record, prefix = self._record, self._prefix
        keys = record_key(record.id, prefix), workers_key(prefix), rival_key(record.id, prefix)
        content = record.to_fields()
        if self._signing_keys is not None:
            content = self._signing_keys.sign_fields(keys[0], content)
        least = max(0.0, self._ttl - _MISSED_RENEWALS * self._interval)
        times = int(least * 1000), int(self._ttl * 1000)
        fields = (part for pair in content.items() for part in pair)
        own = int(record.draining), record.id
        given = record.endpoint, replaced, *times, *own, *fields
        (reply,) = await transact(self._redis, ("EVAL", _RENEW, len(keys), *keys, *given))
        return reply  # type: ignore[no-any-return]

    def _is_forged(self, holder: dict[bytes, bytes]) -> bool:
        """Returns whether no worker of this cluster has written these fields."""
        if self._signing_keys is None:
            return False
        try:
            self._signing_keys.check_fields(record_key(self._record.id, self._prefix), holder)
        except ValueError:
            return True
        return False

    def _wait_for(self, holder: str) -> None:
        """Says that another worker has the id, unless it may be a former epoch of this one, or the
        successor of this one."""
        self._num_waits += 1
        if self._num_waits > _MISSED_RENEWALS and not self._record.draining:
            self._log.warning(
                "worker id %r is held by the worker at %s; this one, at %s, gets no work until "
                "that one ends. Give each worker an id of its own (--worker-id)",
                self._record.id,
                holder,
                self._record.endpoint,
            )

    def _keep_beside(self, rival: str) -> None:
        """Says that another worker waits for the id, also in the record, which routers read."""
        self._num_waits = 0
        if rival == self._record.endpoint:  # its own note, from before the record was its own
            rival = ""
        if rival:
            self._log.warning(
                "worker id %r is that of the worker at %s, too, which gets no work; this one, at "
                "%s, keeps it. Give each worker an id of its own (--worker-id)",
                self._record.id,
                rival,
                self._record.endpoint,
            )
        if rival != self._record.rival:
            self._record = replace(self._record, rival=rival)


def _fields_of(reply: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(reply[::2], reply[1::2], strict=True))
