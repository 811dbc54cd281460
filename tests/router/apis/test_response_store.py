"""Stored responses in a real Redis: for a while, of one tenant, and not too many."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from baton.cluster.keys import response_bytes_key
from baton.cluster.redis.client import connect, prefix_of
from baton.errors import NotFoundError, UnavailableError
from baton_router.apis.responses.limits import ResponseLimits
from baton_router.apis.responses.store import ResponseStore
from tests.support.redis_servers import RedisServer

TENANT = "team-a"
LONG = 60.0  # seconds
SECRET = "0123456789abcdef" * 2


def id_of(number: int) -> str:
    return f"resp_{number:016x}{SECRET}"


def store_on(redis: Redis, ttl: float = LONG, most: int = 10) -> ResponseStore:
    return ResponseStore(redis, ResponseLimits(ttl_s=ttl, max_bytes=1000, per_tenant=most))


async def test_store_returns_what_was_put_until_it_is_deleted(redis):
    store = store_on(redis)
    assert await store.put(TENANT, id_of(1), b"content")
    assert await store.get(TENANT, id_of(1)) == b"content"
    await store.delete(TENANT, id_of(1))
    for call in (store.get(TENANT, id_of(1)), store.delete(TENANT, id_of(1))):
        with pytest.raises(NotFoundError, match="was deleted, has expired"):
            await call
    assert await redis.keys("*") == []


async def test_stored_response_expires_after_its_ttl(redis):
    store = store_on(redis, ttl=0.1)
    assert await store.put(TENANT, id_of(1), b"content")
    await asyncio.sleep(0.15)
    with pytest.raises(NotFoundError, match=r"has expired \(after 0\.1 s\)"):
        await store.get(TENANT, id_of(1))
    assert await redis.keys("*") == []


async def test_stored_response_is_unknown_to_another_tenant(redis):
    store = store_on(redis)
    assert await store.put(TENANT, id_of(1), b"content")
    for call in (store.get("team-b", id_of(1)), store.delete("team-b", id_of(1))):
        with pytest.raises(NotFoundError):
            await call
    assert await store.get(TENANT, id_of(1)) == b"content"


async def test_store_drops_the_oldest_beyond_its_number(redis):
    store = store_on(redis, most=3)
    assert await store.put("team-b", id_of(9), b"of another tenant")
    for number in range(5):
        assert await store.put(TENANT, id_of(number), b"content")
        await asyncio.sleep(0.002)  # the order is by milliseconds
    for number in (0, 1):
        with pytest.raises(NotFoundError):
            await store.get(TENANT, id_of(number))
    for number in (2, 3, 4):
        assert await store.get(TENANT, id_of(number)) == b"content"
    assert await store.get("team-b", id_of(9)) == b"of another tenant"
    assert len(await redis.keys("*")) == 3 + 1 + 2 + 1


async def test_store_refuses_a_response_above_its_bytes(redis):
    store = store_on(redis)
    assert not await store.put(TENANT, id_of(1), b"x" * 1001)
    assert await redis.keys("*") == []


async def test_store_leaves_half_of_redis_memory_free(tmp_path):
    with RedisServer(tmp_path) as running:
        redis = connect(f"redis://{running.node}")
        store, used = store_on(redis), int(str(running.info("memory")["used_memory"]))
        running.ask("CONFIG", "SET", "maxmemory", int(1.9 * used))
        assert not await store.put(TENANT, id_of(1), b"content")
        running.ask("CONFIG", "SET", "maxmemory", 10 * used)
        assert await store.put(TENANT, id_of(1), b"content")
        await redis.aclose()


class FullStore:
    """A store in a Redis whose memory is half full with what two tenants have stored."""

    def __init__(self, running: RedisServer) -> None:
        self._running = running
        self._stored: Counter[str] = Counter()
        limits = ResponseLimits(max_bytes=2 * SIZE, per_tenant=1000)
        self.redis = connect(f"redis://{running.node}")
        self.store = ResponseStore(self.redis, limits)

    async def put(self, tenant: str, times: int = 1) -> None:
        for _ in range(times):
            assert await self.try_put(tenant)

    async def try_put(self, tenant: str) -> bool:
        number = self._stored[tenant]
        self._stored[tenant] += 1
        await asyncio.sleep(0.002)  # the order is by milliseconds
        return await self.store.put(tenant, id_of(number), bytes(SIZE))

    async def kept(self, tenant: str) -> list[bool]:
        """Returns of each response of a tenant whether it is there, in their order."""
        found = []
        for number in range(self._stored[tenant]):
            try:
                found.append(bool(await self.store.get(tenant, id_of(number))))
            except NotFoundError:
                found.append(False)
        return found

    def fill(self, room: int) -> None:
        """Lets the responses of before be half of Redis' memory, with room for a few more."""
        used = int(str(self._running.info("memory")["used_memory"]))
        self._running.ask("CONFIG", "SET", "maxmemory", 2 * (used + room * SIZE))


SIZE = 200_000


@pytest_asyncio.fixture
async def full(tmp_path) -> AsyncIterator[FullStore]:
    with RedisServer(tmp_path) as running:
        made = FullStore(running)
        yield made
        await made.redis.aclose()


async def test_full_store_drops_oldest_of_largest_tenant(full):
    await full.put("many", 12)
    full.fill(room=3)
    await full.put("few")
    await full.put("few")
    kept = await full.kept("many")
    assert 8 <= sum(kept) < 12
    assert kept == sorted(kept), "the oldest are dropped"
    assert await full.kept("few") == [True, True]
    await full.put("many", 4)
    assert await full.kept("few") == [True, True]
    await full.put("few", 20)
    of_each = [await full.kept(tenant) for tenant in ("many", "few")]
    assert abs(sum(of_each[0]) - sum(of_each[1])) <= 2
    assert sum(of_each[0]) >= 4
    assert of_each == [sorted(kept) for kept in of_each]


async def test_full_store_drops_nothing_beside_other_data(full):
    await full.put("many", 4)
    full.fill(room=-5)
    assert not await full.try_put("few")
    assert await full.kept("many") == [True] * 4


async def test_full_store_counts_what_has_expired_no_more(full):
    await full.put("few", 6)
    full.fill(room=3)
    redis = full.redis
    key = response_bytes_key(prefix_of(redis))
    await redis.zadd(key, {"0" * 32: 10**9})
    await full.put("few", 6)
    assert await redis.zscore(key, "0" * 32) is None
    kept = await full.kept("few")
    assert sum(kept) >= 5
    assert await redis.zcard(key) == 1
    for number, is_kept in enumerate(kept):
        if is_kept:
            await full.store.delete("few", id_of(number))
    assert await redis.keys("*") == []


async def test_store_without_ttl_is_off_and_says_so(redis):
    store = store_on(redis, ttl=0)
    assert not store.is_on
    assert not await store.put(TENANT, id_of(1), b"content")
    with pytest.raises(NotFoundError, match="--responses-ttl-s 0"):
        await store.get(TENANT, id_of(1))


@pytest.mark.parametrize("given", ["", "resp_1", "resp_" + "g" * 48, "x" * 10_000, "resp_*"])
async def test_store_rejects_an_id_that_is_none(redis, given):
    with pytest.raises(NotFoundError):
        await store_on(redis).get(TENANT, given)


async def test_store_without_redis_stores_nothing_and_says_so(tmp_path):
    with RedisServer(tmp_path) as running:
        redis = connect(f"redis://{running.node}")
        store = store_on(redis)
        assert await store.put(TENANT, id_of(1), b"content")
        running.kill()
        assert not await store.put(TENANT, id_of(2), b"content")
        for call in (store.get(TENANT, id_of(1)), store.delete(TENANT, id_of(1))):
            with pytest.raises(UnavailableError, match="Redis does not answer"):
                await call
        await redis.aclose()


async def test_redis_never_has_the_text_of_a_response(redis):
    store = store_on(redis)
    assert await store.put(TENANT, id_of(1), b"secret text")
    (key,) = await redis.keys("*:0*")
    dump = b"".join([await redis.get(key), *await redis.keys("*")])
    assert b"secret text" not in dump
    assert TENANT.encode() not in dump
    assert SECRET.encode() not in dump
    other_secret = id_of(1).removesuffix(SECRET) + "0" * 32
    with pytest.raises(NotFoundError):
        await store.get(TENANT, other_secret)


async def test_store_ignores_what_was_changed_in_redis(redis):
    store = store_on(redis)
    for number in (1, 2):
        assert await store.put(TENANT, id_of(number), b"content")
    first, second = sorted(await redis.keys("*:0*"))
    await redis.set(first, await redis.get(second))
    await redis.set(second, b"x" * 100_000)
    for number in (1, 2):
        with pytest.raises(NotFoundError):
            await store.get(TENANT, id_of(number))


async def test_store_survives_keys_of_a_wrong_type(redis):
    store = store_on(redis)
    assert await store.put(TENANT, id_of(1), b"content")
    for key in await redis.keys("*"):
        await redis.delete(key)
        await redis.sadd(key, b"text")
    with pytest.raises(NotFoundError):
        await store.get(TENANT, id_of(1))
    assert not await store.put(TENANT, id_of(2), b"content")


async def test_store_replaces_sizes_of_a_wrong_type(redis):
    store = store_on(redis)
    for number in (1, 2):
        assert await store.put(TENANT, id_of(number), b"content")
        key = response_bytes_key(prefix_of(redis))
        assert await redis.zcard(key) == 1
        await redis.delete(key)
        await redis.sadd(key, b"text")
