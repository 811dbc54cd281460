"""Warm start of a router: time until it knows the prefixes of all workers, from Redis alone.

Workers have published for a while, so that their snapshots are in the midst of a round and a tail
of events follows. Then only Redis is left.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from itertools import count

from redis.asyncio import Redis

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.events.publisher import EventPublisher
from baton.cluster.events.subscriber import EventSubscriber
from baton.cluster.index import LocalityIndex
from baton.cluster.prefix import BlockHash
from baton.cluster.redis.client import connect
from baton.cluster.redis.embedded import EmbeddedRedis
from bench.report import Row

NUM_BLOCKS = 1_000_000
SIZES = (8, 64)
AIM = 1.0  # seconds
EPOCH = 1

_BATCH = 512  # blocks that a worker stores at once
_CHURN = 0.05  # of its blocks are replaced once it is full
_TIMEOUT = 60.0


def rows(repeats: int) -> list[Row]:
    """Seconds from the start to an index that has it all, with 8 and with 64 workers."""
    return [row for size in SIZES for row in asyncio.run(_rows_of(size, repeats))]


async def _rows_of(num_workers: int, repeats: int) -> list[Row]:
    with EmbeddedRedis() as server:
        redis = connect(server.url)
        held = await publish(redis, num_workers, NUM_BLOCKS)
        found = sorted([await _seconds_to_warm(server.url, held) for _ in range(repeats)])
        await redis.aclose()
    seconds = found[len(found) // 2]
    case = f"{num_workers} workers: {NUM_BLOCKS:,} blocks from Redis alone"
    return [Row(case, seconds, "s", "the aim", AIM, AIM / seconds, 1.0)]


async def publish(redis: Redis, num_workers: int, num_blocks: int) -> dict[str, set[BlockHash]]:
    """Has so many workers publish until they hold so many blocks together, and some more that take
    the place of others. Returns what each holds; then they are gone."""
    numbers = count(1)
    return dict(
        [
            await _publish_one(redis, f"worker-{i}", num_blocks // num_workers, numbers)
            for i in range(num_workers)
        ]
    )


async def _publish_one(
    redis: Redis, worker: str, num_blocks: int, numbers: "count[int]"
) -> tuple[str, set[BlockHash]]:
    publisher = EventPublisher(redis, worker, EPOCH)
    held = [_hash(next(numbers)) for _ in range(num_blocks)]
    publisher.start()
    for start in range(0, num_blocks, _BATCH):
        await _publish(publisher, KvEvents(stored=tuple(held[start : start + _BATCH])))
    num_replaced = int(num_blocks * _CHURN)
    for start in range(0, num_replaced, _BATCH):
        stop = min(start + _BATCH, num_replaced)
        fresh = [_hash(next(numbers)) for _ in range(start, stop)]
        await _publish(publisher, KvEvents(tuple(fresh), tuple(held[start:stop])))
        held[start:stop] = fresh
    await publisher.stop()
    return worker, set(held)


async def _publish(publisher: EventPublisher, events: KvEvents) -> None:
    publisher.publish(events)
    async with asyncio.timeout(_TIMEOUT):
        while publisher.published < publisher.sequence:  # noqa: ASYNC110 - looks from outside
            await asyncio.sleep(0)


async def _seconds_to_warm(url: str, held: dict[str, set[BlockHash]]) -> float:
    async with AsyncExitStack() as stack:
        redis, index = connect(url), LocalityIndex(2 * NUM_BLOCKS)
        stack.push_async_callback(redis.aclose)
        began = time.perf_counter()
        subscriber = EventSubscriber(redis, index)
        for worker in held:
            subscriber.follow(worker, EPOCH)
        subscriber.start()
        stack.push_async_callback(subscriber.stop)
        async with asyncio.timeout(_TIMEOUT):
            while not knows(index, held):  # noqa: ASYNC110 - looks from outside
                await asyncio.sleep(0.005)
        return time.perf_counter() - began


def knows(index: LocalityIndex, held: dict[str, set[BlockHash]]) -> bool:
    """Returns whether the index has the right number of blocks of each worker."""
    return all(index.num_hashes(worker) == len(blocks) for worker, blocks in held.items())


def holds_exactly(index: LocalityIndex, held: dict[str, set[BlockHash]]) -> bool:
    """Returns whether the index has each block on exactly the worker that holds it."""
    return knows(index, held) and all(
        index.match([block]) == {worker: 1} for worker, blocks in held.items() for block in blocks
    )


def _hash(number: int) -> BlockHash:
    """Unlike any other, and spread as a digest is."""
    return (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).to_bytes(16, "big")
