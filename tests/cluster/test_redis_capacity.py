"""Memory and traffic of a Redis, against the bounds in `docs/operations.md`."""

import os
import re

import pytest
from redis.asyncio import Redis

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.events.publisher import EventPublisher
from baton.cluster.events.subscriber import EventSubscriber
from baton.cluster.index import LocalityIndex
from baton.cluster.keys import record_key, workers_key
from baton.cluster.redis.client import connect, transact
from baton.cluster.registry.registration import Registration
from baton.cluster.registry.registry import WorkerRecord
from tests.support.redis_servers import RedisServer
from tests.support.repository import ROOT
from tests.support.waiting import until

PAGE = ROOT / "docs" / "operations.md"
NUM_BLOCKS = 50_000
BLOCKS_PER_BATCH = 32
_TIMEOUT = 120.0


def promised() -> dict[str, int]:
    """The page's bounds, by the beginning of what they are for."""
    row = re.compile(r"^\| ((?:memory|sent|received)[^|]*) \| (\d+) bytes \|$", re.MULTILINE)
    return {what: int(number) for what, number in row.findall(PAGE.read_text())}


def figure(server: RedisServer, section: str, name: str) -> int:
    value = server.info(section)[name]
    assert isinstance(value, int)
    return value


class Cache:
    """A worker's, full of blocks that are told of as they come and go."""

    def __init__(self, publisher: EventPublisher) -> None:
        self._publisher = publisher
        self._blocks: list[bytes] = []

    async def store(self, number: int) -> None:
        """So many more; where it is full, as many leave."""
        for _ in range(0, number, BLOCKS_PER_BATCH):
            stored = tuple(os.urandom(16) for _ in range(BLOCKS_PER_BATCH))
            over = max(0, len(self._blocks) + BLOCKS_PER_BATCH - NUM_BLOCKS)
            removed, self._blocks = tuple(self._blocks[:over]), self._blocks[over:]
            self._blocks += stored
            self._publisher.publish(KvEvents(stored=stored, removed=removed))
            # As an engine's steps come: not all at once.
            await until(self._is_published, _TIMEOUT, "the events' way to Redis")

    def _is_published(self) -> bool:
        return self._publisher.published == self._publisher.sequence


def connected(server: RedisServer) -> Redis:
    return connect(f"redis://{server.node}/0")


@pytest.mark.nightly
async def test_blocks_cost_redis_at_most_what_the_page_says(supported_server):
    server, bounds = supported_server, promised()
    async with connected(server) as redis, connected(server) as reader:
        empty = figure(server, "memory", "used_memory")
        publisher = EventPublisher(redis, "w", 1)
        publisher.start()
        cache = Cache(publisher)
        await cache.store(NUM_BLOCKS)
        received = figure(server, "stats", "total_net_input_bytes")
        most = 0
        for _ in range(8):
            await cache.store(NUM_BLOCKS // 4)
            most = max(most, figure(server, "memory", "used_memory") - empty)
        received = figure(server, "stats", "total_net_input_bytes") - received
        check(most / NUM_BLOCKS, bounds, "memory for each block")
        check(received / (2 * NUM_BLOCKS), bounds, "received for each block")

        sent = figure(server, "stats", "total_net_output_bytes")
        index = LocalityIndex()
        subscriber = EventSubscriber(reader, index)
        subscriber.start()
        subscriber.follow("w", 1)
        full = NUM_BLOCKS - BLOCKS_PER_BATCH
        await until(lambda: index.num_hashes("w") >= full, _TIMEOUT, "the router's start")
        sent = figure(server, "stats", "total_net_output_bytes") - sent
        check(sent / NUM_BLOCKS, bounds, "sent to each starting router")
        await subscriber.stop()
        await publisher.stop()


async def test_record_costs_redis_at_most_what_the_page_says(supported_server):
    server = supported_server
    async with connected(server) as redis:
        worker = Registration(redis, record(1))
        worker.start()
        await until(lambda: server.ask("SCARD", workers_key()) == 1, _TIMEOUT, "registration")
        keys = workers_key(), record_key(worker.record.id)
        # Of all its fields: by default Redis weighs five of them, chosen at random. A hash table
        # that has just grown weighs 128 bytes more until its fields have moved, as chance has it.
        exactly = ("SAMPLES", 0)
        taken = await transact(redis, *(("MEMORY", "USAGE", key, *exactly) for key in keys))
        check(sum(taken), promised(), "memory for the record")
        await worker.stop()


def check(measured: float, bounds: dict[str, int], what: str) -> None:
    """It is within the page's bound, and the bound is one that says something."""
    (bound,) = (number for row, number in bounds.items() if row.startswith(what))
    print(f"{what}: {measured:.1f} of {bound} bytes")
    assert bound / 3 < measured <= bound


def record(number: int) -> WorkerRecord:
    """With a layout as long as that of a model with two cache groups."""
    return WorkerRecord(
        id=f"decode-7d9c5b6f4-{number:05}",
        role="decode",
        endpoint="10.123.45.67:50051",
        kv_endpoint="10.123.45.67:50052",
        epoch=1_763_000_000_000 + number,
        model="an-organisation/a-model-of-8b",
        fingerprint=os.urandom(32),
        layout=os.urandom(600),
        tokenizer_hash=os.urandom(32),
        kv_dtype="bfloat16",
        block_size=16,
        max_model_len=131_072,
        num_blocks=50_000,
        max_num_batched_tokens=2048,
        metrics_endpoint="10.123.45.67:9464",
        admin_endpoint="10.123.45.67:50053",
        version="10.11.12rc1",
    )
