"""Several Batons on one database of one Redis, each by the prefix in its URL, see nothing of each
other."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from redis.asyncio import Redis

from baton.cluster.embedded import EmbeddedRedis
from baton.cluster.events import KvEvents
from baton.cluster.index import LocalityIndex
from baton.cluster.keys import role_turn_key
from baton.cluster.notices import Notices
from baton.cluster.publisher import EventPublisher
from baton.cluster.redis import connect, prefix_of, transact
from baton.cluster.registry import Registration, WorkerRecord
from baton.cluster.subscriber import EventSubscriber
from baton.cluster.turn import Turn
from baton.cluster.watcher import RegistryWatcher
from tests.support.waiting import until

RECORD = WorkerRecord(
    id="w",
    role="decode",
    endpoint="",
    kv_endpoint="",
    epoch=1,
    model="tiny",
    fingerprint=b"f",
    layout=b"",
    tokenizer_hash=b"t" * 16,
    kv_dtype="float32",
    block_size=16,
    max_model_len=2048,
    num_blocks=1000,
)


@dataclass(frozen=True)
class Baton:
    """One worker, which is called the same in all of them, and one router."""

    redis: Redis
    block: bytes
    records: dict[str, WorkerRecord | None]
    index: LocalityIndex
    notices: Notices
    turn: Turn


@asynccontextmanager
async def baton(server: EmbeddedRedis, name: str) -> AsyncIterator[Baton]:
    async with AsyncExitStack() as stack:
        redis = connect(f"{server.url}?prefix={name}" if name else server.url)
        stack.push_async_callback(redis.aclose)
        block, index = name.rjust(16, "-").encode(), LocalityIndex()
        records: dict[str, WorkerRecord | None] = {}
        publisher = EventPublisher(redis, "w", 1)
        publisher.publish(KvEvents(stored=(block,)))
        subscriber = EventSubscriber(redis, index)
        subscriber.follow("w", 1)
        notices = Notices(redis, f"router of {name}", name.encode, interval=0.02)
        for running in (
            Registration(redis, replace(RECORD, endpoint=name)),
            publisher,
            RegistryWatcher(redis, records.__setitem__, interval=0.02),
            subscriber,
            notices,
        ):
            running.start()
            stack.push_async_callback(running.stop)
        turn = Turn(redis, role_turn_key(prefix_of(redis)), name)
        yield Baton(redis, block, records, index, notices, turn)


async def test_they_see_nothing_of_each_other(server: EmbeddedRedis) -> None:
    names = ["blue", "green", ""]
    async with AsyncExitStack() as stack:
        batons = [await stack.enter_async_context(baton(server, name)) for name in names]
        for one in batons:
            await until(lambda one=one: bool(one.records))
            await until(lambda one=one: one.index.match([one.block]) == {"w": 1})
        for one, name in zip(batons, names, strict=True):
            record = one.records["w"]
            assert record is not None
            assert record.endpoint == name
            assert [len(one.index.match([other.block])) for other in batons].count(1) == 1
            assert one.notices.others == []
            assert await one.turn.take(60.0), "it is its turn whatever the others do"
        (keys,) = await transact(batons[0].redis, ("KEYS", "*"))
    of_each = {name: {k for k in keys if k.startswith(_start(name))} for name in names}
    assert sum(map(len, of_each.values())) == len(keys), "some begin with nobody's prefix"
    assert {len(of) for of in of_each.values()} == {6}


def _start(name: str) -> bytes:
    return (f"{name}:" if name else "").encode() + b"{baton}:"
