"""What Baton takes of a Redis, against what `docs/operations.md` tells people to have."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis_servers import RedisServer, system_redis

from baton.cluster.events import KvEvents
from baton.cluster.index import LocalityIndex
from baton.cluster.publisher import EventPublisher
from baton.cluster.redis import connect, transact
from baton.cluster.registry import Registration, WorkerRecord
from baton.cluster.subscriber import EventSubscriber

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
NUM_BLOCKS = 100_000
BLOCKS_PER_BATCH = 32
_PATIENCE = 120.0


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of the system's Redis, 7 or later, which keeps nothing on disk."""
    server = RedisServer(tmp_path, "--save", "", binary=system_redis())
    yield f"redis://{server.node}/0"
    server.kill()


def promised() -> dict[str, int]:
    """The page's bounds, by the beginning of what they are for."""
    row = re.compile(r"^\| ((?:memory|sent|received)[^|]*) \| (\d+) bytes \|$", re.MULTILINE)
    return {what: int(number) for what, number in row.findall(PAGE.read_text())}


async def figure(redis: Redis, section: str, name: str) -> int:
    (info,) = await transact(redis, ("INFO", section))
    found = re.search(rf"^{name}:(\d+)\r?$", info.decode(), re.MULTILINE)
    assert found is not None
    return int(found[1])


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.002)


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
            await until(self._is_published, "events did not reach Redis")

    def _is_published(self) -> bool:
        return self._publisher.published == self._publisher.sequence


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Redis]:
    async with connect(url) as redis:
        yield redis


@pytest.mark.slow
async def test_blocks_take_no_more_of_redis_than_the_page_says(url):
    bounds = promised()
    async with connected(url) as redis, connected(url) as reader:
        empty = await figure(redis, "memory", "used_memory")
        publisher = EventPublisher(redis, "w", 1)
        publisher.start()
        cache = Cache(publisher)
        await cache.store(NUM_BLOCKS)
        received = await figure(redis, "stats", "total_net_input_bytes")
        most = 0
        for _ in range(8):
            await cache.store(NUM_BLOCKS // 4)
            most = max(most, await figure(redis, "memory", "used_memory") - empty)
        received = await figure(redis, "stats", "total_net_input_bytes") - received
        check(most / NUM_BLOCKS, bounds, "memory for each block")
        check(received / (2 * NUM_BLOCKS), bounds, "received for each block")

        sent = await figure(redis, "stats", "total_net_output_bytes")
        index = LocalityIndex()
        subscriber = EventSubscriber(reader, index)
        subscriber.start()
        subscriber.follow("w", 1)
        full = NUM_BLOCKS - BLOCKS_PER_BATCH
        await until(lambda: index.num_blocks("w") >= full, "the router's start")
        sent = await figure(redis, "stats", "total_net_output_bytes") - sent
        check(sent / NUM_BLOCKS, bounds, "sent to each router")
        await subscriber.stop()
        await publisher.stop()


@pytest.mark.slow
async def test_a_worker_takes_no_more_of_redis_than_the_page_says(url):
    async with connected(url) as redis:
        empty = await figure(redis, "memory", "used_memory_dataset")
        workers = [Registration(redis, record(i)) for i in range(64)]
        for worker in workers:
            worker.start()
        await until(lambda: not any(worker.stale for worker in workers), "registration")
        await asyncio.sleep(1.0)
        (listed,) = await transact(redis, ("SCARD", "{baton}:workers"))
        assert listed == 64
        taken = await figure(redis, "memory", "used_memory_dataset") - empty
        check(taken / 64, promised(), "memory for each worker")
        for worker in workers:
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
    )
