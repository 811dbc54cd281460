"""Gossip and distributed locks of routers, over a real Redis."""

import asyncio
import time

from redis.asyncio import Redis

from baton.cluster.gossip import Gossip
from baton.cluster.keys import gossip_key
from baton.cluster.redis.client import connect, transact
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.cluster.redis.lock import RedisLock
from tests.support.redis_loops import Loops
from tests.support.waiting import until

KEY = "{baton}:turn"


def speaking(redis: Redis, loops: Loops, *names: str, max_age: float = 5.0) -> list[Gossip]:
    """A router of each name."""

    def gossip_of(name: str) -> Gossip:
        return Gossip(redis, name, lambda: f"I am {name}".encode(), interval=0.02, max_age=max_age)

    return [loops.start(gossip_of(name)) for name in names]


async def test_gossip_reaches_all_other_routers(redis: Redis, loops: Loops) -> None:
    a, b, c = speaking(redis, loops, "a", "b", "c")
    await until(lambda: sorted(a.others) == [b"I am b", b"I am c"], within=5.0)
    await until(lambda: sorted(b.others) == [b"I am a", b"I am c"], within=5.0)
    await until(lambda: sorted(c.others) == [b"I am a", b"I am b"], within=5.0)


async def test_gossip_forgets_a_router_that_falls_silent(redis: Redis, loops: Loops) -> None:
    a, b = speaking(redis, loops, "a", "b", max_age=0.2)
    await until(lambda: a.others == [b"I am b"], within=5.0)
    await b.stop()
    await until(lambda: a.others == [], within=5.0)
    deadline = time.monotonic() + 5.0
    while (await transact(redis, ("HGETALL", gossip_key())))[0].keys() != {b"a"}:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_gossip_resumes_after_redis_is_lost(
    server: EmbeddedRedis, redis: Redis, loops: Loops
) -> None:
    a, b = speaking(redis, loops, "a", "b", max_age=0.3)
    await until(lambda: a.others == [b"I am b"], within=5.0)
    port = server.port
    server.stop()
    await until(lambda: a.others == b.others == [], within=5.0)
    with EmbeddedRedis(port):
        await until(lambda: a.others == [b"I am b"], within=10.0)


async def test_redis_lock_has_one_owner_until_it_expires(
    server: EmbeddedRedis, redis: Redis
) -> None:
    other = connect(server.url)
    a, b = RedisLock(redis, KEY, "a"), RedisLock(other, KEY, "b")
    taken = await asyncio.gather(*(turn.acquire(30.0) for turn in (a, b)))
    assert sorted(taken) == [False, True]
    owner, waiting = (a, b) if taken[0] else (b, a)
    assert await owner.acquire(0.1)
    deadline = time.monotonic() + 5.0
    while not await waiting.acquire(30.0):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert not await owner.acquire(1.0)
    await other.aclose()


async def test_redis_lock_is_not_acquired_without_redis(
    server: EmbeddedRedis, redis: Redis
) -> None:
    turn = RedisLock(redis, KEY, "a")
    server.stop()
    assert not await turn.acquire(1.0)
