"""Gossip and role-change lock with keys of wrong types and forged content."""

from typing import Any

import pytest
from redis.asyncio import Redis

from baton.cluster.keys import gossip_key, role_lock_key
from baton.cluster.redis.client import transact
from baton.cluster.redis.lock import RedisLock
from baton_router.routing.roles.pool_load import PoolDemand
from baton_router.routing.roles.rebalancer import _demand_in
from tests.cluster.test_among_routers import speaking
from tests.cluster.test_hostile_registry import WRONG_TYPES, replace_key
from tests.support.redis_loops import Loops
from tests.support.waiting import until


@pytest.mark.parametrize("write", WRONG_TYPES, ids=lambda write: write[0])
async def test_gossip_replaces_key_of_wrong_type(
    redis: Redis, loops: Loops, write: tuple[Any, ...]
) -> None:
    await replace_key(redis, gossip_key(), write)
    a, b = speaking(redis, loops, "a", "b")
    await until(lambda: b"I am b" in a.others and b"I am a" in b.others, within=5.0)
    assert len(a.others) <= 2


async def test_gossip_survives_2000_forged_and_huge_payloads(redis: Redis, loops: Loops) -> None:
    a, _ = speaking(redis, loops, "a", "b")
    await until(lambda: a.others == [b"I am b"], within=5.0)
    await transact(redis, ("HSET", gossip_key(), "huge", "1 " + "x" * 2_000_000))
    await until(lambda: a.others == [b"I am b"], within=5.0)
    forged = [part for number in range(2000) for part in (f"forged-{number}", "1 [9,9,9]")]
    await transact(redis, ("HSET", gossip_key(), *forged))
    await until(lambda: a.others == [b"I am b"], within=5.0)


@pytest.mark.parametrize(
    "payload",
    [
        b'["tiny", 1e300, 0, 0]',
        b'["tiny", NaN, 0, 0]',
        b'["tiny", -1, 0, 0]',
        b"[" * 100_000,
        b'["tiny", 1' + b"0" * 400 + b", 0, 0]",
        b'["other", 1, 0, 0]',
    ],
    ids=["huge", "nan", "negative", "nested", "overflow", "other model"],
)
def test_rebalancer_ignores_forged_demand(payload: bytes) -> None:
    assert _demand_in(payload, "tiny") == PoolDemand()


def test_rebalancer_reads_the_demand_for_its_model() -> None:
    assert _demand_in(b'["tiny", 1, 2, 3]', "tiny") == PoolDemand(1.0, 2.0, 3.0)


@pytest.mark.parametrize("write", WRONG_TYPES, ids=lambda write: write[0])
async def test_redis_lock_replaces_key_that_is_no_lock(
    redis: Redis, write: tuple[Any, ...]
) -> None:
    await replace_key(redis, role_lock_key(), write)
    assert await RedisLock(redis, role_lock_key(), "a").acquire(1.0)


@pytest.mark.parametrize("ttl", [("PERSIST",), ("EXPIRE", 10**7)], ids=["endless", "too long"])
async def test_redis_lock_takes_over_lock_of_boundless_ttl(
    redis: Redis, ttl: tuple[Any, ...]
) -> None:
    key = role_lock_key()
    await transact(redis, ("HSET", key, "name", "forged"), (ttl[0], key, *ttl[1:]))
    assert await RedisLock(redis, key, "a").acquire(1.0)
