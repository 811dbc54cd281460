import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from baton.cluster.embedded import EmbeddedRedis
from baton.cluster.event_log import EventLog
from baton.cluster.events import (
    EventBatch,
    KvEvents,
    Snapshot,
    entry_id,
)
from baton.cluster.index import LocalityIndex
from baton.cluster.keys import snapshot_key, stream_key
from baton.cluster.publisher import EventPublisher
from baton.cluster.redis import transact
from baton.cluster.subscriber import EventSubscriber

Eventually = Callable[..., Awaitable[None]]

BLOCKS = [bytes([number]) * 16 for number in range(20)]
EPOCH = 7
STREAM, SNAPSHOT = stream_key("w", EPOCH), snapshot_key("w", EPOCH)

some_blocks = st.lists(st.sampled_from(BLOCKS), max_size=5).map(tuple)
some_events = st.builds(KvEvents, some_blocks, some_blocks, st.booleans())


def apply(held: set[bytes], events: KvEvents) -> set[bytes]:
    return (set() if events.cleared else held).difference(events.removed).union(events.stored)


@given(st.lists(st.one_of(some_events, st.sampled_from(["take", "lose", "rebase"]))))
def test_a_reader_of_the_log_has_the_mirror_or_notices_a_gap(steps: list[KvEvents | str]) -> None:
    log = EventLog(max_pending=8)
    truth: set[bytes] = set()
    reader, position = set(), 0
    for step in steps:
        batch = None
        if isinstance(step, KvEvents):
            log.append(step)
            truth = apply(truth, step)
        elif step == "take":
            batch = log.take()
        elif step == "lose" and log.take() is not None:
            log.fall_behind()
        elif step == "rebase" and log.behind:
            batch = log.rebase()
        if batch is not None and batch.first == position + 1:
            reader, position = apply(reader, batch.events), batch.last
        elif batch is not None:
            reader, position = set(log.snapshot().hashes), log.snapshot().sequence
        if batch is not None:
            assert reader == truth
        assert set(log.snapshot().hashes) == truth
        assert len(log._pending) <= 8


@given(some_events, st.integers(1, 2**63), st.integers(0, 2**63))
def test_batches_and_snapshots_survive_the_way_through_redis(
    events: KvEvents, first: int, more: int
) -> None:
    batch = EventBatch(first, first + more, events)
    fields = {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in batch.to_fields().items()
    }
    assert EventBatch.from_fields(fields) == batch
    snapshot = Snapshot(first, events.stored)
    assert Snapshot.from_bytes(snapshot.to_bytes()) == snapshot


def test_a_snapshot_is_a_sequence_number_and_hashes() -> None:
    data = Snapshot(258, (b"a" * 16, b"b" * 16)).to_bytes()
    assert data == b"\x02\x01\0\0\0\0\0\0" + b"a" * 16 + b"b" * 16


@pytest.mark.parametrize("data", [b"", b"1234567", b"12345678" + b"a" * 15])
def test_a_malformed_snapshot_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        Snapshot.from_bytes(data)


class Events:
    """Publishers and subscribers that stop when the test ends."""

    def __init__(self, redis: Redis, stack: AsyncExitStack) -> None:
        self.redis = redis
        self.stack = stack

    def publisher(
        self,
        snapshot_batches: int = 1000,
        refresh_interval: float = 15.0,
        max_pending: int = 1000,
    ) -> EventPublisher:
        publisher = EventPublisher(
            self.redis,
            "w",
            EPOCH,
            snapshot_batches=snapshot_batches,
            refresh_interval=refresh_interval,
            max_pending=max_pending,
        )
        publisher.start()
        self.stack.push_async_callback(publisher.stop)
        return publisher

    def subscriber(self) -> EventSubscriber:
        subscriber = EventSubscriber(self.redis, LocalityIndex())
        subscriber.start()
        self.stack.push_async_callback(subscriber.stop)
        subscriber.follow("w", EPOCH)
        return subscriber

    async def append(self, first: int, last: int, *stored: bytes) -> None:
        """What a publisher sends as one batch."""
        fields = EventBatch(first, last, KvEvents(stored)).to_fields()
        line = [part for pair in fields.items() for part in pair]
        await transact(self.redis, ("XADD", STREAM, entry_id(last), *line))

    async def snapshot(self) -> Snapshot:
        (data,) = await transact(self.redis, ("GET", SNAPSHOT))
        return Snapshot.from_bytes(data)


@pytest.fixture
async def kv(redis: Redis) -> AsyncIterator[Events]:
    async with AsyncExitStack() as stack:
        yield Events(redis, stack)


def held(subscriber: EventSubscriber) -> set[bytes]:
    return {block for block in BLOCKS if "w" in subscriber._index.match([block])}


async def test_events_arrive_in_order(kv: Events, eventually: Eventually) -> None:
    publisher, subscriber = kv.publisher(), kv.subscriber()
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:4])))
    await eventually(lambda: subscriber._index.match(BLOCKS) == {"w": 4})
    publisher.publish(KvEvents(removed=(BLOCKS[2],)))
    publisher.publish(KvEvents(stored=(BLOCKS[5],)))
    await eventually(lambda: held(subscriber) == {*BLOCKS[:2], BLOCKS[3], BLOCKS[5]})
    publisher.publish(KvEvents(stored=(BLOCKS[6],), cleared=True))
    await eventually(lambda: held(subscriber) == {BLOCKS[6]})
    assert publisher.published == publisher.sequence == 5


async def test_many_events_in_one_turn_are_one_entry(kv: Events, eventually: Eventually) -> None:
    publisher = kv.publisher()
    await eventually(lambda: publisher.published == 1)
    for block in BLOCKS:
        publisher.publish(KvEvents(stored=(block,)))
    publisher.publish(KvEvents())
    await eventually(lambda: publisher.published == 1 + len(BLOCKS))
    assert await transact(kv.redis, ("XLEN", STREAM)) == [2]


async def test_a_new_router_starts_from_redis_alone(kv: Events, eventually: Eventually) -> None:
    publisher = kv.publisher(snapshot_batches=2)
    for block in BLOCKS[:5]:
        publisher.publish(KvEvents(stored=(block,)))
        await eventually(lambda: publisher.published == publisher.sequence)
    await publisher.stop()
    assert 0 < (await kv.snapshot()).sequence < publisher.sequence
    subscriber = kv.subscriber()
    await eventually(lambda: subscriber._index.match(BLOCKS) == {"w": 5})


async def test_the_stream_alone_serves_where_it_begins_at_the_first_event(
    kv: Events, eventually: Eventually
) -> None:
    await kv.append(1, 2, *BLOCKS[:2])
    subscriber = kv.subscriber()
    await eventually(lambda: held(subscriber) == set(BLOCKS[:2]))


async def test_a_gap_sends_the_subscriber_back_to_the_snapshot(
    kv: Events, eventually: Eventually
) -> None:
    await kv.append(1, 2, *BLOCKS[:2])
    subscriber = kv.subscriber()
    await eventually(lambda: held(subscriber) == set(BLOCKS[:2]))
    await transact(kv.redis, ("SET", SNAPSHOT, Snapshot(6, tuple(BLOCKS[4:7])).to_bytes()))
    await kv.append(8, 9, BLOCKS[9])
    await eventually(lambda: held(subscriber) == {*BLOCKS[:2], BLOCKS[9]})
    await transact(kv.redis, ("SET", SNAPSHOT, Snapshot(8, tuple(BLOCKS[4:7])).to_bytes()))
    await eventually(lambda: held(subscriber) == {*BLOCKS[4:7], BLOCKS[9]})


async def test_a_malformed_entry_counts_as_a_gap(
    kv: Events, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    await kv.append(1, 1, BLOCKS[0])
    await transact(kv.redis, ("XADD", STREAM, "2-0", "stored", "odd"))
    await kv.append(3, 3, BLOCKS[3])
    subscriber = kv.subscriber()
    await eventually(lambda: held(subscriber) == {BLOCKS[0], BLOCKS[3]})
    await transact(kv.redis, ("SET", SNAPSHOT, Snapshot(2, (BLOCKS[1],)).to_bytes()))
    await eventually(lambda: held(subscriber) == {BLOCKS[1], BLOCKS[3]})
    assert caplog.text.count("ignoring an event of worker 'w'") == 1


async def test_what_does_not_fit_into_memory_is_replaced_by_a_snapshot(
    kv: Events, eventually: Eventually
) -> None:
    publisher, subscriber = kv.publisher(max_pending=4), kv.subscriber()
    await eventually(lambda: publisher.published == 1)
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:8])))
    publisher.publish(KvEvents(removed=(BLOCKS[0],)))
    await eventually(lambda: held(subscriber) == set(BLOCKS[1:8]))
    assert (await kv.snapshot()).hashes == tuple(BLOCKS[1:8])


async def test_a_flushed_redis_is_filled_again_without_new_events(
    kv: Events, eventually: Eventually
) -> None:
    publisher = kv.publisher(refresh_interval=0.1)
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
    await eventually(lambda: publisher.published == 2)
    await transact(kv.redis, ("FLUSHALL",))
    subscriber = kv.subscriber()
    await eventually(lambda: subscriber._index.match(BLOCKS) == {"w": 3})


async def test_a_flushed_redis_is_filled_again_with_the_next_event(
    kv: Events, eventually: Eventually
) -> None:
    publisher, subscriber = kv.publisher(), kv.subscriber()
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
    await eventually(lambda: subscriber._index.match(BLOCKS) == {"w": 3})
    await transact(kv.redis, ("FLUSHALL",))
    publisher.publish(KvEvents(stored=(BLOCKS[3],)))
    newcomer = kv.subscriber()
    await eventually(lambda: subscriber._index.match(BLOCKS) == {"w": 4})
    await eventually(lambda: newcomer._index.match(BLOCKS) == {"w": 4})


async def test_a_stream_restored_from_an_old_copy_is_noticed(
    kv: Events, eventually: Eventually
) -> None:
    publisher = kv.publisher(refresh_interval=0.1)
    await eventually(lambda: publisher.published == 1)
    (copy,) = await transact(kv.redis, ("DUMP", STREAM))
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
    await eventually(lambda: publisher.published == 2)
    await transact(kv.redis, ("RESTORE", STREAM, 0, copy, "REPLACE"))
    subscriber = kv.subscriber()
    await eventually(lambda: subscriber._index.match(BLOCKS) == {"w": 3})


async def test_events_survive_a_redis_that_is_killed_and_replaced(
    kv: Events, server: EmbeddedRedis, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, subscriber = kv.publisher(refresh_interval=0.1), kv.subscriber()
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
    await eventually(lambda: subscriber._index.match(BLOCKS) == {"w": 3})
    os.kill(server.pid, signal.SIGKILL)
    for block in BLOCKS[3:6]:
        publisher.publish(KvEvents(stored=(block,)))
    await eventually(lambda: "KV event publisher of w: going on without Redis" in caplog.text)
    await eventually(lambda: "KV event subscriber: going on without Redis" in caplog.text)
    assert subscriber._index.match(BLOCKS) == {"w": 3}
    with EmbeddedRedis(server.port):
        await eventually(lambda: subscriber._index.match(BLOCKS) == {"w": 6})
        await kv.stack.aclose()
    assert len(caplog.records) == 4


async def test_publishing_never_waits_for_a_redis_that_hangs(
    kv: Events, server: EmbeddedRedis, eventually: Eventually
) -> None:
    publisher, subscriber = kv.publisher(max_pending=4), kv.subscriber()
    await eventually(lambda: publisher.published == 1)
    os.kill(server.pid, signal.SIGSTOP)
    for _ in range(1_000):
        publisher.publish(KvEvents(stored=tuple(BLOCKS)))
        publisher.publish(KvEvents(removed=tuple(BLOCKS[1:])))
    await eventually(lambda: subscriber.stale)
    os.kill(server.pid, signal.SIGCONT)
    await eventually(lambda: held(subscriber) == {BLOCKS[0]})


async def test_a_new_epoch_starts_from_nothing(kv: Events, eventually: Eventually) -> None:
    await kv.append(1, 1, BLOCKS[0])
    subscriber = kv.subscriber()
    await eventually(lambda: held(subscriber) == {BLOCKS[0]})
    subscriber.follow("w", EPOCH + 1)
    assert held(subscriber) == set()
    await kv.append(2, 2, BLOCKS[1])
    fields = EventBatch(1, 1, KvEvents((BLOCKS[2],))).to_fields()
    line = [part for pair in fields.items() for part in pair]
    await transact(kv.redis, ("XADD", stream_key("w", EPOCH + 1), "1-0", *line))
    await eventually(lambda: held(subscriber) == {BLOCKS[2]})


async def test_a_worker_not_followed_any_more_is_gone_at_once(
    kv: Events, eventually: Eventually
) -> None:
    await kv.append(1, 1, BLOCKS[0])
    subscriber = kv.subscriber()
    await eventually(lambda: held(subscriber) == {BLOCKS[0]})
    subscriber.unfollow("w")
    assert held(subscriber) == set()
    await kv.append(2, 2, BLOCKS[1])
    await transact(kv.redis, ("SET", snapshot_key("v", 1), Snapshot(3, (BLOCKS[5],)).to_bytes()))
    subscriber.follow("v", 1)
    await eventually(lambda: subscriber._index.match([BLOCKS[5]]) == {"v": 1})
    assert held(subscriber) == set()


async def test_what_a_dead_worker_left_expires(kv: Events, eventually: Eventually) -> None:
    publisher = kv.publisher()
    publisher.publish(KvEvents(stored=(BLOCKS[0],)))
    await eventually(lambda: publisher.published == 2)
    lifetimes = await transact(kv.redis, ("TTL", STREAM), ("TTL", SNAPSHOT))
    assert all(50 < seconds <= 60 for seconds in lifetimes)
