"""Metrics of a process's round trips to Redis."""

import asyncio

import pytest
from redis.exceptions import RedisError

from baton.cluster.redis.client import connect, read_streams, transact
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.cluster.redis.loop import RedisLoop
from baton.cluster.redis.round_trips import RoundTrips
from tests.support.waiting import until


async def test_round_trips_are_counted_by_kind_and_outcome(server: EmbeddedRedis) -> None:
    counted = RoundTrips()
    async with connect(server.url, counted) as redis:
        await transact(redis, ("PING",), ("PING",))
        await transact(redis, ("SET", "{baton}:x", 1))
        await read_streams(redis, {b"{baton}:s": "0-0"}, 10, 30)
        assert counted.num_answered == {"command": 2, "read": 1}
        assert counted.seconds["read"] >= 0.03  # it has waited for news
        assert counted.seconds["command"] > 0
        with pytest.raises(RedisError):
            await transact(redis, ("NO_SUCH_COMMAND",))
        server.stop()
        with pytest.raises((RedisError, OSError)):
            await transact(redis, ("PING",))
    assert counted.num_answered == {"command": 2, "read": 1}
    assert counted.num_failed == {"command": 2, "read": 0}


async def test_cancelled_round_trip_does_not_count_as_failed(server: EmbeddedRedis) -> None:
    counted = RoundTrips()
    async with connect(server.url, counted) as redis:
        reading = asyncio.create_task(read_streams(redis, {b"{baton}:s": "0-0"}, 10, 5000))
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert counted.num_answered["read"] + counted.num_failed["read"] == 0


async def test_redis_loop_staleness_grows_until_redis_answers() -> None:
    answers = True

    async def step() -> float:
        if not answers:
            raise OSError("gone")
        return 0.0

    loop = RedisLoop("loop", step)
    loop.start()
    await until(lambda: not loop.staleness, within=5.0)
    answers = False
    await until(lambda: loop.staleness, within=5.0)
    first = loop.staleness
    await until(lambda: loop.staleness > first, within=5.0)
    answers = True
    await until(lambda: not loop.staleness, within=5.0)
    await loop.stop()
