"""Several Batons on one database of one Redis, each by the prefix in its URL, see nothing of each
other."""

from contextlib import AsyncExitStack
from dataclasses import replace

from baton.cluster.keys import role_lock_key
from baton.cluster.redis.client import prefix_of, transact
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.cluster.redis.lock import RedisLock
from tests.support.redis_loops import BLOCKS, RECORD, working
from tests.support.waiting import until

NAMES = ["blue", "green", ""]


async def test_batons_with_own_prefixes_on_one_redis_are_isolated(server: EmbeddedRedis) -> None:
    """Their workers have the same id and epoch."""
    async with AsyncExitStack() as stack:
        pairs = []
        for number, name in enumerate(NAMES, 1):
            url = f"{server.url}?prefix={name}" if name else server.url
            record = replace(RECORD, endpoint=f"{name}:1")
            pairs.append(await stack.enter_async_context(working(url, record)))
            pairs[-1].publish(BLOCKS[:number])
        for number, pair in enumerate(pairs, 1):
            await until(lambda pair=pair, number=number: pair.knows(number), within=5.0)
            turn = RedisLock(
                pair.client, role_lock_key(prefix_of(pair.client)), pair.record.endpoint
            )
            assert await turn.acquire(60.0), "it is its turn whatever the others do"
        assert all(pair.knows(number) for number, pair in enumerate(pairs, 1))
        (keys,) = await transact(pairs[0].client, ("KEYS", "*"))
    of_each = [{key for key in keys if key.startswith(_start(name))} for name in NAMES]
    assert sum(map(len, of_each)) == len(keys), "some begin with an unknown prefix"
    assert {len(of) for of in of_each} == {6}


def _start(name: str) -> bytes:
    return (f"{name}:" if name else "").encode() + b"{baton}:"
