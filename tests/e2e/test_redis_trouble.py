"""Redis flushed, slow, or set back to an earlier day, while requests run: no client notices."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.cluster.redis.client import connect, transact
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import is_greedy, prompt_of
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.wide import listed
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.slow]

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
LONG = SamplingParams(max_tokens=1200, ignore_eos=True)


@asynccontextmanager
async def under_load(cluster: LocalCluster) -> AsyncIterator[None]:
    """Four clients ask again and again, and one reads a long answer; all get the right tokens."""
    over, served = asyncio.Event(), 0

    async def ask_again(client: AsyncClient, seed: int) -> None:
        nonlocal served
        prompt = prompt_of(20 + seed, seed=seed)
        expected = None
        while not over.is_set():
            tokens = await client.generate(prompt, PARAMS).token_ids()
            expected = expected or tokens
            assert tokens == expected
            served += 1
        assert is_greedy(locate("tiny"), prompt, expected)

    async with AsyncClient(cluster.address, timeout=20.0, wait_for_ready=True) as client:
        long = asyncio.create_task(client.generate(prompt_of(9), LONG).token_ids())
        tasks = [asyncio.create_task(ask_again(client, seed)) for seed in range(4)]
        yield
        over.set()
        await asyncio.gather(*tasks)
        assert len(await long) == LONG.max_tokens
    assert served > 20
    await until_nothing_is_held(cluster)


async def test_redis_flush_loses_no_worker_and_no_request(pair):
    redis = connect(pair.redis_url)
    async with under_load(pair):
        for _ in range(5):
            await transact(redis, ("FLUSHALL",))
            await asyncio.sleep(0.4)
            assert {w.state for w in listed(pair).values()} == {"ready"}
    await redis.aclose()
    assert len(listed(pair)) == 4


async def test_redis_hanging_for_two_seconds_delays_no_request(pair):
    assert pair.redis is not None
    async with under_load(pair):
        for _ in range(2):
            os.kill(pair.redis.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(2.0)
            finally:
                os.kill(pair.redis.pid, signal.SIGCONT)
            await asyncio.sleep(0.2)
            assert {w.state for w in listed(pair).values()} == {"ready"}


@pytest.mark.nightly
async def test_redis_restored_from_a_backup_revives_no_dead_worker(pair):
    redis = connect(pair.redis_url)
    before = {name: worker.epoch for name, worker in listed(pair).items()}
    copy = await copy_of(redis)
    pair.kill("decode-1")
    pair.restart("decode-1")
    async with under_load(pair):
        for _ in range(3):
            await transact(redis, ("FLUSHALL",), *restoring(copy))
            await asyncio.sleep(0.7)
    await redis.aclose()
    now = {name: worker.epoch for name, worker in listed(pair).items()}
    assert now["decode-1"] > before.pop("decode-1")
    assert before.items() <= now.items()
    await until_observed(
        lambda: {w.state for w in listed(pair).values()} == {"ready"}, within=2.0, what="readiness"
    )


async def test_router_places_by_its_own_prefixes_without_redis(pair):
    """Each time it would be another worker's turn."""
    assert pair.redis is not None
    pair.redis.stop()
    try:
        await asyncio.sleep(0.5)
        async with AsyncClient(pair.address, timeout=20.0) as client:
            for seed in range(4):
                prompt = prompt_of(300, seed=time.monotonic_ns() % 10_000 + seed)
                expected = await client.generate(prompt, PARAMS).token_ids()
                again = client.generate(prompt, PARAMS)
                assert await again.token_ids() == expected
                assert again.finished.usage.num_cached_prompt_tokens >= 288
    finally:
        pair.redis.start()
    await until_observed(lambda: len(listed(pair)) == 4, within=5.0, what="the workers' return")


async def copy_of(redis) -> dict[bytes, bytes]:
    (keys,) = await transact(redis, ("KEYS", "*"))
    return dict(zip(keys, await transact(redis, *(("DUMP", key) for key in keys)), strict=True))


def restoring(copy: dict[bytes, bytes]) -> list[tuple[str | bytes | int, ...]]:
    return [("RESTORE", key, 0, value) for key, value in copy.items()]
