"""Loops of workers and routers over a real Redis, which stop when the test ends."""

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol, TypeVar

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.events.publisher import EventPublisher
from baton.cluster.events.subscriber import EventSubscriber
from baton.cluster.gossip import Gossip
from baton.cluster.index import LocalityIndex
from baton.cluster.redis.client import connect
from baton.cluster.registry.registration import Registration
from baton.cluster.registry.registry import WorkerRecord
from baton.cluster.registry.watcher import RegistryWatcher

BLOCKS = [bytes([number]) * 16 for number in range(1, 21)]
RECORD = WorkerRecord(
    id="w",
    role="prefill",
    endpoint="127.0.0.1:7001",
    kv_endpoint="127.0.0.1:7002",
    epoch=7,
    model="tiny",
    fingerprint=b"\x00\xff",
    layout=b"\x08\x01",
    tokenizer_hash=b"\xfe",
    kv_dtype="float32",
    block_size=16,
    max_model_len=512,
    num_blocks=64,
)


class Loop(Protocol):
    def start(self) -> None: ...

    async def stop(self) -> None: ...


AnyLoop = TypeVar("AnyLoop", bound=Loop)


class Loops:
    """Starts loops; `stop` stops all of them, the last one first."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    def start(self, loop: AnyLoop) -> AnyLoop:
        loop.start()
        self._stack.push_async_callback(loop.stop)
        return loop

    async def stop(self) -> None:
        await self._stack.aclose()


class WorkerAndRouter:
    """A worker's side and a router's, each with a client of its own; a second router speaks."""

    def __init__(self, url: str, record: WorkerRecord, loops: Loops, stack: AsyncExitStack) -> None:
        ours, theirs = connect(url), connect(url)
        stack.push_async_callback(ours.aclose)
        stack.push_async_callback(theirs.aclose)
        self.record = record
        self.client = ours
        self._theirs = f"theirs {record.endpoint}"
        self.index = LocalityIndex()
        self.publisher = loops.start(
            EventPublisher(ours, record.id, record.epoch, refresh_interval=0.2, begin_interval=0.1)
        )
        self.registration = loops.start(Registration(ours, record, interval=0.1))
        self.watcher = loops.start(RegistryWatcher(theirs, lambda *_: None, interval=0.1))
        self.subscriber = loops.start(EventSubscriber(theirs, self.index, resync_interval=0.1))
        self.subscriber.follow(record.id, record.epoch)
        self.router, _ = (
            loops.start(Gossip(redis, name, name.encode, interval=0.1))
            for redis, name in ((ours, "ours"), (theirs, self._theirs))
        )

    def publish(self, blocks: Iterable[bytes]) -> None:
        """Publishes that the worker has stored `blocks`."""
        self.publisher.publish(KvEvents(stored=tuple(blocks)))

    def knows(self, num_blocks: int) -> bool:
        """Whether the router has the first `num_blocks` of `BLOCKS`, the worker's record and the
        other router's notice."""
        found = self.index.match(BLOCKS) == {self.record.id: num_blocks}
        hears = self.router.others == [self._theirs.encode()]
        return found and hears and dict(self.watcher.records) == {self.record.id: self.record}

    @property
    def is_stale(self) -> bool:
        return self.watcher.stale or self.subscriber.stale


@asynccontextmanager
async def working(url: str, record: WorkerRecord = RECORD) -> AsyncIterator[WorkerAndRouter]:
    """Runs a worker's side and a router's over the Redis at `url`."""
    async with AsyncExitStack() as stack:
        loops = Loops()
        pair = WorkerAndRouter(url, record, loops, stack)
        stack.push_async_callback(loops.stop)
        yield pair
