"""KV event streams and snapshots of wrong types, with forged entries, and too long ones."""

import asyncio
from typing import Any

import pytest
from redis.asyncio import ConnectionPool, Redis

from baton.cluster.events.kv_events import EventBatch, KvEvents, encode_sequence
from baton.cluster.events.publisher import EventPublisher
from baton.cluster.events.subscriber import EventSubscriber
from baton.cluster.index import LocalityIndex
from baton.cluster.keys import snapshot_key, stream_key
from baton.cluster.redis.client import transact
from baton.rpc.backoff import Backoff
from tests.cluster.test_hostile_registry import WRONG_TYPES, replace_key
from tests.support.redis_loops import BLOCKS, Loops
from tests.support.waiting import until

EPOCH = 7
STREAM, SNAPSHOT = stream_key("w", EPOCH), snapshot_key("w", EPOCH)
ODD = b"o" * 16


class Pair:
    """A router that follows two workers, "w" and "odd"; only the first one is at work."""

    def __init__(self, redis: Redis, loops: Loops) -> None:
        self.redis = redis
        self.index = LocalityIndex()
        self.publisher = loops.start(
            EventPublisher(redis, "w", EPOCH, refresh_interval=0.2, begin_interval=0.1)
        )
        self.subscriber = EventSubscriber(
            redis,
            self.index,
            inspection_interval=0.1,
            resync_interval=0.1,
            suspension=Backoff(first=0.2, longest=10.0),
        )
        self.num_blocks = 0
        loops.start(self.subscriber)

    async def follow(self) -> None:
        """Follows both workers after the first event, whose snapshot is read at once."""
        await until(lambda: self.publisher.published > 0)
        self.subscriber.follow("w", EPOCH)
        self.subscriber.follow("odd", EPOCH)
        await self.until_next_block_arrives()

    async def until_next_block_arrives(self, within: float = 10.0) -> None:
        self.num_blocks += 1
        self.publisher.publish(KvEvents(stored=(BLOCKS[self.num_blocks - 1],)))
        expected = {"w": self.num_blocks}
        await until(lambda: self.index.match(BLOCKS) == expected, within, what="the new block")

    async def add(self, entry_id: str, *fields: Any, key: str = STREAM) -> None:
        await transact(self.redis, ("XADD", key, entry_id, *fields))


def entry(first: int, last: int, *stored: bytes) -> list[Any]:
    fields = EventBatch(first, last, KvEvents(stored)).to_fields()
    return [part for pair in fields.items() for part in pair]


@pytest.fixture
async def pair(redis: Redis, loops: Loops) -> Pair:
    pair = Pair(redis, loops)
    await pair.follow()
    return pair


@pytest.mark.parametrize("write", WRONG_TYPES, ids=lambda write: write[0])
async def test_subscriber_reads_on_beside_stream_of_wrong_type(
    pair: Pair, write: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    write = ("SET", "x") if write[0] == "XADD" else write
    await replace_key(pair.redis, stream_key("odd", EPOCH), write)
    for _ in range(5):
        await pair.until_next_block_arrives()
    assert not pair.subscriber.stale
    assert caplog.text.count("their key is of another type") <= 1
    assert "continuing without Redis" not in caplog.text


@pytest.mark.parametrize("write", WRONG_TYPES, ids=lambda write: write[0])
@pytest.mark.parametrize("key", [STREAM, SNAPSHOT], ids=["stream", "snapshot"])
async def test_publisher_replaces_its_keys_of_wrong_type(
    pair: Pair, key: str, write: tuple[Any, ...]
) -> None:
    await replace_key(pair.redis, key, write)
    await pair.until_next_block_arrives(within=20.0)
    assert await transact(pair.redis, ("TYPE", STREAM), ("TYPE", SNAPSHOT)) == [
        b"stream",
        b"string",
    ]


@pytest.mark.parametrize(
    "snapshot", [b"", b"x", b"x" * 1000, encode_sequence(2**64 - 1) + ODD, bytes(8)]
)
async def test_subscriber_reads_on_beside_garbled_snapshot(pair: Pair, snapshot: bytes) -> None:
    for key in (SNAPSHOT, snapshot_key("odd", EPOCH)):
        await transact(pair.redis, ("SET", key, snapshot))
    await pair.until_next_block_arrives()
    await pair.until_next_block_arrives()
    assert not pair.subscriber.stale


async def test_subscriber_recovers_from_2000_forged_entries(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """Malformed entries, and entries whose ids are not those of their events."""
    forged = [
        ("XADD", STREAM, "*", *fields)
        for number in range(1000)
        for fields in (["stored", "odd"], entry(5, 2**60 + number, ODD))
    ]
    await transact(pair.redis, *forged)
    await pair.until_next_block_arrives()
    await asyncio.sleep(0.3)
    await pair.until_next_block_arrives()
    assert pair.index.match([ODD]) == {}
    assert caplog.text.count("ignoring an event") <= 1, "one line a minute"


@pytest.mark.parametrize("entry_id", ["2-7", f"{2**63}-0", f"{2**64 - 1}-{2**64 - 1}"])
async def test_subscriber_recovers_from_forged_entry_ids(pair: Pair, entry_id: str) -> None:
    last = int(entry_id.partition("-")[0])
    await pair.add(entry_id, *entry(3, last, ODD))
    await pair.until_next_block_arrives(within=20.0)
    await until(lambda: pair.index.match([ODD]) == {}, within=10.0)


async def test_subscriber_skips_entry_of_64_mib(pair: Pair) -> None:
    large = b"x" * (64 * 2**20)
    options = pair.redis.connection_pool.connection_kwargs | {"socket_timeout": 60.0}
    async with Redis.from_pool(ConnectionPool(**options)) as patient:
        await patient.xadd(stream_key("odd", EPOCH), {"stored": large}, id="1-0")
    await pair.until_next_block_arrives(within=20.0)
    await pair.until_next_block_arrives(within=5.0)


async def test_subscriber_bounds_events_of_each_worker(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    large, key = [bytes(15) + b"o"] * 60_000, stream_key("odd", EPOCH)
    for number in range(1, 61):
        await pair.add(f"{number}-0", *entry(number, number, *large), key=key)
    await pair.until_next_block_arrives()
    assert pair.subscriber._follows["odd"].applied < 60
    assert caplog.text.count("more than 100000 hashes a second") == 1


async def test_router_recovers_from_deleted_stream_and_snapshot(pair: Pair) -> None:
    for key in (STREAM, SNAPSHOT):
        await transact(pair.redis, ("DEL", key))
        await pair.until_next_block_arrives()
