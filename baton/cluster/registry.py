"""Worker registry: each worker writes its own record to Redis and renews it while it lives.

A record is a hash that expires unless renewed; a set lists the ids (`baton.cluster.keys`).
`baton.cluster.watcher` is the reading side. Knows nothing of what the workers do, nor whether they
answer: a record is a claim, and gRPC health is the proof.
"""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.keys import record_key, workers_key
from baton.cluster.loop import RedisLoop
from baton.cluster.prefix import PrefixNamespace
from baton.cluster.redis import Command, prefix_of, transact

Role = Literal["prefill", "decode"]

_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}

_OPTIONAL = {b"max_num_batched_tokens", b"metrics_endpoint", b"admin_endpoint", b"version"}

_INTERVAL = 1.0  # seconds between renewals
_TTL = 5.0  # seconds a record outlives its last renewal

# Deletes a record only if it is still that of the given epoch: a worker that is slow to end must
# not remove the record of its own successor.
_DELETE_IF_OURS = """
if redis.call('HGET', KEYS[1], 'epoch') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


def new_epoch() -> int:
    """The epoch of a worker that starts now: wall-clock milliseconds.

    It grows from start to start on one machine and between machines whose clocks agree, and needs
    neither Redis nor a disk. Where a clock was set back, the watcher's grace settles it.
    """
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """Registry record of one worker.

    Attributes:
        id: its name, the same from start to start.
        role: the pool it belongs to in this epoch.
        endpoint: "host:port" of its gRPC service.
        kv_endpoint: "host:port" where its blocks are fetched from.
        epoch: grows each time it starts (`new_epoch`) or changes its role.
        model: the name under which the model is asked for.
        fingerprint: identifies weights and configuration, the way of computing and the version; the
            model of the prefix namespace.
        layout: the serialized layouts of all cache groups (`baton.v1.KvLayouts`), opaque here.
        tokenizer_hash: identifies the tokenizer.
        kv_dtype: the element type of the cache, such as "float32".
        block_size: tokens in a block.
        max_model_len: the most tokens a sequence may have, prompt and answer together.
        num_blocks: blocks of the cache group that sees furthest back.
        draining: it finishes what it has and takes nothing new.
        max_num_batched_tokens: tokens of one step at most; 0: not said, as by workers of before.
        metrics_endpoint: "host:port" where it serves its metrics; empty: nowhere, or not said.
        admin_endpoint: "host:port" of its admin service; empty: not said, and it is at `endpoint`.
        version: of Baton; empty: not said, as by workers of before.
    """

    id: str
    role: Role
    endpoint: str
    kv_endpoint: str
    epoch: int
    model: str
    fingerprint: bytes
    layout: bytes
    tokenizer_hash: bytes
    kv_dtype: str
    block_size: int
    max_model_len: int
    num_blocks: int
    draining: bool = False
    max_num_batched_tokens: int = 0
    metrics_endpoint: str = ""
    admin_endpoint: str = ""
    version: str = ""

    @property
    def pairing(self) -> bytes:
        """Workers hand blocks to each other only if theirs is equal. Opaque."""
        return b"\0".join((self.version.encode(), self.fingerprint, self.layout))

    @property
    def namespace(self) -> PrefixNamespace:
        """What its chain hashes start from."""
        return PrefixNamespace(
            self.fingerprint, self.tokenizer_hash, self.kv_dtype, self.block_size
        )

    def to_fields(self) -> dict[str, str | bytes | int]:
        """The record as the fields of a Redis hash."""
        return {
            "id": self.id,
            "role": self.role,
            "endpoint": self.endpoint,
            "kv_endpoint": self.kv_endpoint,
            "epoch": self.epoch,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "layout": self.layout,
            "tokenizer_hash": self.tokenizer_hash,
            "kv_dtype": self.kv_dtype,
            "block_size": self.block_size,
            "max_model_len": self.max_model_len,
            "num_blocks": self.num_blocks,
            "draining": int(self.draining),
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "metrics_endpoint": self.metrics_endpoint,
            "admin_endpoint": self.admin_endpoint,
            "version": self.version,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[bytes, bytes]) -> "WorkerRecord":
        """The record that `to_fields` wrote. Fields it does not know are ignored.

        Raises:
            ValueError: a field is missing or malformed.
        """
        missing = {name.encode() for name in cls.__slots__} - fields.keys() - _OPTIONAL
        if missing:
            raise ValueError(f"fields are missing: {sorted(missing)}")
        return cls(
            id=fields[b"id"].decode(),
            role=_role(fields[b"role"].decode()),
            endpoint=fields[b"endpoint"].decode(),
            kv_endpoint=fields[b"kv_endpoint"].decode(),
            epoch=int(fields[b"epoch"]),
            model=fields[b"model"].decode(),
            fingerprint=fields[b"fingerprint"],
            layout=fields[b"layout"],
            tokenizer_hash=fields[b"tokenizer_hash"],
            kv_dtype=fields[b"kv_dtype"].decode(),
            block_size=int(fields[b"block_size"]),
            max_model_len=int(fields[b"max_model_len"]),
            num_blocks=int(fields[b"num_blocks"]),
            draining=int(fields[b"draining"]) != 0,
            max_num_batched_tokens=int(fields.get(b"max_num_batched_tokens", 0)),
            metrics_endpoint=fields.get(b"metrics_endpoint", b"").decode(),
            admin_endpoint=fields.get(b"admin_endpoint", b"").decode(),
            version=fields.get(b"version", b"").decode(),
        )


class Registration:
    """Keeps one worker's record in Redis, and puts it back whenever Redis lost it.

    No method raises on Redis trouble. The caller owns the client.

    Args:
        redis: from `baton.cluster.redis.connect`.
        record: what to register.
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
        self._record = record
        self._interval = interval
        self._ttl = ttl
        self._loop = RedisLoop(f"registration of {record.id}", self._renew)

    @property
    def record(self) -> WorkerRecord:
        """What is registered now."""
        return self._record

    @property
    def stale(self) -> bool:
        """Whether Redis did not answer the latest renewal, or there was none yet."""
        return self._loop.answering_since is None

    @property
    def staleness(self) -> float:
        """Seconds for which Redis has not answered; 0 while it does."""
        return self._loop.staleness

    def start(self) -> None:
        """Registers in the background, at once and then every interval. Needs an event loop."""
        self._loop.start()

    def update(self, record: WorkerRecord) -> None:
        """Registers `record`, of the same worker in this epoch or a later one, in place of the one
        before, soon."""
        assert record.id == self._record.id
        assert record.epoch >= self._record.epoch
        self._record = record
        self._loop.wake()

    async def stop(self) -> None:
        """Stops renewing and removes the record, if Redis answers in time.

        The id stays listed, which tells a watcher that the worker left and Redis forgot nothing.
        """
        await self._loop.stop()
        key = record_key(self._record.id, self._prefix)
        with contextlib.suppress(RedisError, OSError):
            await transact(self._redis, ("EVAL", _DELETE_IF_OURS, 1, key, self._record.epoch))

    async def _renew(self) -> float:
        key = record_key(self._record.id, self._prefix)
        fields: Command = tuple(part for pair in self._record.to_fields().items() for part in pair)
        await transact(
            self._redis,
            ("HSET", key, *fields),
            ("PEXPIRE", key, int(self._ttl * 1000)),
            ("SADD", workers_key(self._prefix), self._record.id),
        )
        return self._interval


def _role(name: str) -> Role:
    if name not in _ROLES:
        raise ValueError(f"no role is called {name!r}")
    return _ROLES[name]
