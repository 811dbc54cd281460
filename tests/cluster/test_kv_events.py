import asyncio
import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from baton.cluster.events.compaction import Compaction, Slice
from baton.cluster.events.event_log import EventLog
from baton.cluster.events.kv_events import (
    EventBatch,
    KvEvents,
    decode_sequence,
    decode_slots,
    encode_sequence,
    entry_id,
    slots_offset,
)
from baton.cluster.events.publisher import EventPublisher
from baton.cluster.events.snapshot import IndexSnapshot
from baton.cluster.events.subscriber import EventSubscriber
from baton.cluster.index import LocalityIndex
from baton.cluster.keys import snapshot_key, stream_key
from baton.cluster.redis.client import transact
from baton.cluster.redis.embedded import EmbeddedRedis
from tests.support.redis_loops import BLOCKS, Loops
from tests.support.waiting import until

EPOCH = 7
STREAM, SNAPSHOT = stream_key("w", EPOCH), snapshot_key("w", EPOCH)

some_blocks = st.lists(st.sampled_from(BLOCKS), max_size=5).map(tuple)
some_events = st.builds(KvEvents, some_blocks, some_blocks, st.booleans())


def apply(held: set[bytes], events: KvEvents) -> set[bytes]:
    return (set() if events.cleared else held).difference(events.removed).union(events.stored)


class Held:
    """Content of Redis: a snapshot, and the stream after it."""

    def __init__(self) -> None:
        self.data = b""
        self.entries: list[EventBatch] = []

    def begin(self, part: Slice, batch: EventBatch) -> None:
        self.data = encode_sequence(part.sequence) + part.data
        self.entries.append(batch)

    def go_on(self, part: Slice, batch: EventBatch | None) -> None:
        begin, end = slots_offset(part.start), slots_offset(part.start) + len(part.data)
        self.data = (
            encode_sequence(part.sequence) + self.data[8:begin] + part.data + self.data[end:]
        )
        self.entries = [e for e in self.entries if e.last >= part.oldest]
        self.entries += [batch] if batch is not None else []

    def read(self, first_parts: "Held | None" = None, cut: int = 0) -> set[bytes] | None:
        """Returns the blocks found by a reader that read the slots before `cut` earlier; None where
        there is no complete snapshot, or the events since the earlier read are gone."""
        before = first_parts or self
        position = decode_sequence(before.data[:8])
        if not 0 < position <= decode_sequence(self.data[:8]):
            return None
        cut = slots_offset(cut)
        found = set(decode_slots(before.data[8:cut])) | set(decode_slots(self.data[cut:]))
        for batch in self.entries:
            if batch.last > position:
                if batch.first > position + 1:
                    break
                found, position = apply(found, batch.events), batch.last
        is_whole = position >= max(
            [decode_sequence(self.data[:8]), *(e.last for e in self.entries)]
        )
        assert is_whole or first_parts is not None, "a gap"
        return found if is_whole else None

    def copy(self) -> "Held":
        copy = Held()
        copy.data, copy.entries = self.data, list(self.entries)
        return copy


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(some_events, st.sampled_from(["send", "send", "lose", "look"]))),
    st.integers(1, 4),
    st.integers(0, 20),
)
def test_snapshot_plus_stream_equals_the_cached_blocks(
    steps: list[KvEvents | str], max_slots: int, cut: int
) -> None:
    """Also for a reader whose first parts of the snapshot are older than its last ones."""
    log, held, earlier = EventLog(max_pending=8), Held(), None
    compaction = Compaction(log.snapshot, max_slots)
    truth: set[bytes] = set()
    for step in steps:
        if isinstance(step, KvEvents):
            log.append(step)
            truth = apply(truth, step)
        elif step == "lose":
            log.fall_behind()
        elif step == "look":
            earlier = held.copy()
        elif log.behind:
            batch, earlier = log.rebase(), None
            compaction.restart()
            held.begin(compaction.advance(0, batch.last), batch)
        else:
            batch = log.take()
            num_hashes = 0 if batch is None else 1
            held.go_on(compaction.advance(num_hashes, log.sequence), batch)
        assert log.snapshot.hashes == truth
        assert len(log._pending) <= 8
        if step == "send":
            assert held.read() in (truth, None)
            assert earlier is None or held.read(earlier, cut) in (truth, None)
    for _ in range(20):  # and it is complete soon
        if log.behind:
            return
        held.go_on(compaction.advance(0, log.sequence), log.take())
    assert log.sequence == 0 or held.read() == truth


def test_snapshot_completes_within_an_eighth_of_its_hashes() -> None:
    snapshot = IndexSnapshot()
    snapshot.apply(KvEvents(stored=tuple(number.to_bytes(16, "big") for number in range(80_000))))
    compaction = Compaction(snapshot)
    sequence = written = 0
    while compaction.sequence == 0:
        sequence += 1
        written += len(compaction.advance(0, sequence).data)
    assert (sequence, written) == (5, 80_000 * 16)
    first, num_hashes = sequence + 1, 0
    while compaction.sequence < first:
        sequence, num_hashes = sequence + 1, num_hashes + 100
        part = compaction.advance(100, sequence)
        assert len(part.data) <= 16_384 * 16
    assert num_hashes <= 80_000 / 8
    assert part.oldest == 2, "a reader may still be at the snapshot before"


def test_snapshot_size_follows_the_size_of_the_cache() -> None:
    snapshot = IndexSnapshot()
    for number in range(1_000):
        snapshot.apply(KvEvents(stored=(number.to_bytes(16, "big"),)))
        if number >= 10:
            snapshot.apply(KvEvents(removed=((number - 10).to_bytes(16, "big"),)))
    assert (len(snapshot), snapshot.num_slots) == (10, 11)
    snapshot.apply(KvEvents(cleared=True))
    assert (len(snapshot), snapshot.encode(0, 11)) == (0, bytes(16 * 11))


@given(some_events, st.integers(1, 2**63), st.integers(0, 2**63))
def test_event_batch_round_trips_through_redis(events: KvEvents, first: int, more: int) -> None:
    batch = EventBatch(first, first + more, events)
    fields = {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in batch.to_fields().items()
    }
    assert EventBatch.from_fields(fields) == batch


def test_snapshot_encodes_sequence_number_and_hash_slots() -> None:
    snapshot = IndexSnapshot()
    snapshot.apply(KvEvents(stored=(b"a" * 16, b"c" * 16, b"b" * 16)))
    snapshot.apply(KvEvents(removed=(b"c" * 16,)))
    data = encode_sequence(258) + snapshot.encode(0, 3)
    assert data == b"\x02\x01\0\0\0\0\0\0" + b"a" * 16 + bytes(16) + b"b" * 16
    assert decode_sequence(data[:8]) == 258
    assert decode_slots(data[8:]) == (b"a" * 16, b"b" * 16)


@pytest.mark.parametrize("data", [b"1", b"a" * 15, b"a" * 17])
def test_decode_slots_rejects_truncated_data(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_slots(data)


class Events:
    """Publishers and subscribers that stop when the test ends."""

    def __init__(self, redis: Redis, loops: Loops) -> None:
        self.redis = redis
        self.loops = loops

    def publisher(self, max_pending: int = 1000, **options: float | None) -> EventPublisher:
        options = {"max_pending": max_pending, "begin_interval": 0.1} | options
        return self.loops.start(EventPublisher(self.redis, "w", EPOCH, **options))

    def subscriber(self) -> EventSubscriber:
        subscriber = EventSubscriber(self.redis, LocalityIndex(), resync_interval=0.1)
        self.loops.start(subscriber)
        subscriber.follow("w", EPOCH)
        return subscriber

    async def append(self, first: int, last: int, *stored: bytes, epoch: int = EPOCH) -> None:
        """Appends what a publisher sends as one batch."""
        fields = EventBatch(first, last, KvEvents(stored)).to_fields()
        line = [part for pair in fields.items() for part in pair]
        await transact(self.redis, ("XADD", stream_key("w", epoch), entry_id(last), *line))

    async def write_snapshot(self, sequence: int, *blocks: bytes, key: str = SNAPSHOT) -> None:
        """Writes what a publisher leaves there after a complete round."""
        await transact(self.redis, ("SET", key, encode_sequence(sequence) + b"".join(blocks)))

    async def snapshot(self) -> tuple[int, set[bytes]]:
        (data,) = await transact(self.redis, ("GET", SNAPSHOT))
        return decode_sequence(data[:8]), set(decode_slots(data[8:]))


@pytest.fixture
def kv(redis: Redis, loops: Loops) -> Events:
    return Events(redis, loops)


def held(subscriber: EventSubscriber) -> set[bytes]:
    return {block for block in BLOCKS if "w" in subscriber.index.match([block])}


async def test_subscriber_applies_events_in_order(kv: Events) -> None:
    publisher, subscriber = kv.publisher(), kv.subscriber()
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:4])))
    await until(lambda: subscriber.index.match(BLOCKS) == {"w": 4}, within=5.0)
    publisher.publish(KvEvents(removed=(BLOCKS[2],)))
    publisher.publish(KvEvents(stored=(BLOCKS[5],)))
    await until(lambda: held(subscriber) == {*BLOCKS[:2], BLOCKS[3], BLOCKS[5]}, within=5.0)
    publisher.publish(KvEvents(stored=(BLOCKS[6],), cleared=True))
    await until(lambda: held(subscriber) == {BLOCKS[6]}, within=5.0)
    await until(lambda: publisher.published == publisher.sequence == 5, within=5.0)


async def test_publisher_merges_events_of_one_iteration(kv: Events) -> None:
    publisher = kv.publisher()
    await until(lambda: publisher.published == 1, within=5.0)
    for block in BLOCKS:
        publisher.publish(KvEvents(stored=(block,)))
    publisher.publish(KvEvents())
    await until(lambda: publisher.published == 1 + len(BLOCKS), within=5.0)
    assert await transact(kv.redis, ("XLEN", STREAM)) == [2]


async def test_new_subscriber_starts_from_redis_alone(kv: Events) -> None:
    publisher = kv.publisher(max_slots=2)
    for block in BLOCKS[:5]:
        publisher.publish(KvEvents(stored=(block,)))
        await until(lambda: publisher.published == publisher.sequence, within=5.0)
    await publisher.stop()
    assert 0 < (await kv.snapshot())[0] < publisher.sequence
    subscriber = kv.subscriber()
    await until(lambda: subscriber.is_warm, within=5.0)
    assert subscriber.index.match(BLOCKS) == {"w": 5}


async def test_subscriber_reads_a_long_snapshot_of_an_active_worker(kv: Events) -> None:
    many = [number.to_bytes(16, "little") for number in range(1, 150_000)]
    publisher = kv.publisher()
    for start in range(0, len(many), 1_000):
        publisher.publish(KvEvents(stored=tuple(many[start : start + 1_000])))
    await until(lambda: publisher._compaction.sequence > 0, within=5.0)
    subscriber = kv.subscriber()
    for number in range(0, 5_000, 2):
        publisher.publish(KvEvents(removed=(many[number],)))
        await asyncio.sleep(0)
    await until(
        lambda: subscriber.is_warm and publisher.published == publisher.sequence, within=20.0
    )
    await until(lambda: subscriber._follows["w"].applied == publisher.published, within=20.0)
    held = [bool(subscriber.index.match([block])) for block in many[:6_000]]
    assert held == [number % 2 == 1 or number >= 5_000 for number in range(6_000)]
    assert subscriber.index.num_hashes("w") == len(many) - 2_500


async def test_subscriber_reloads_the_snapshot_after_a_gap(kv: Events) -> None:
    await kv.append(1, 2, *BLOCKS[:2])
    subscriber = kv.subscriber()
    await until(lambda: held(subscriber) == set(BLOCKS[:2]), within=5.0)
    await kv.write_snapshot(6, *BLOCKS[4:7])
    await kv.append(8, 9, BLOCKS[9])
    await until(lambda: held(subscriber) == {*BLOCKS[:2], BLOCKS[9]}, within=5.0)
    await kv.write_snapshot(0, *BLOCKS[4:6])
    await asyncio.sleep(0.3)
    assert held(subscriber) == {*BLOCKS[:2], BLOCKS[9]}, "one that is not complete is none"
    await kv.write_snapshot(8, *BLOCKS[4:7])
    await until(lambda: held(subscriber) == {*BLOCKS[4:7], BLOCKS[9]}, within=5.0)


async def test_subscriber_treats_a_malformed_entry_as_a_gap(
    kv: Events, caplog: pytest.LogCaptureFixture
) -> None:
    await kv.append(1, 1, BLOCKS[0])
    await transact(kv.redis, ("XADD", STREAM, "2-0", "stored", "odd"))
    await kv.append(3, 3, BLOCKS[3])
    subscriber = kv.subscriber()
    await until(lambda: held(subscriber) == {BLOCKS[0], BLOCKS[3]}, within=5.0)
    await kv.write_snapshot(2, BLOCKS[1])
    await until(lambda: held(subscriber) == {BLOCKS[1], BLOCKS[3]}, within=5.0)
    assert caplog.text.count("ignoring an event of worker 'w'") == 1


async def test_publisher_replaces_an_overflowing_log_by_a_snapshot(kv: Events) -> None:
    publisher, subscriber = kv.publisher(max_pending=4), kv.subscriber()
    await until(lambda: publisher.published == 1, within=5.0)
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:8])))
    publisher.publish(KvEvents(removed=(BLOCKS[0],)))
    await until(lambda: held(subscriber) == set(BLOCKS[1:8]), within=5.0)
    assert (await kv.snapshot())[1] == set(BLOCKS[1:8])


async def test_publisher_refills_a_flushed_redis_without_new_events(kv: Events) -> None:
    publisher = kv.publisher(refresh_interval=0.1)
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
    await until(lambda: publisher.published == 2, within=5.0)
    await transact(kv.redis, ("FLUSHALL",))
    subscriber = kv.subscriber()
    await until(lambda: subscriber.index.match(BLOCKS) == {"w": 3}, within=5.0)


async def test_publisher_refills_a_flushed_redis_with_the_next_event(kv: Events) -> None:
    publisher, subscriber = kv.publisher(), kv.subscriber()
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
    await until(lambda: subscriber.index.match(BLOCKS) == {"w": 3}, within=5.0)
    await transact(kv.redis, ("FLUSHALL",))
    publisher.publish(KvEvents(stored=(BLOCKS[3],)))
    newcomer = kv.subscriber()
    await until(lambda: subscriber.index.match(BLOCKS) == {"w": 4}, within=5.0)
    await until(lambda: newcomer.index.match(BLOCKS) == {"w": 4}, within=5.0)


async def test_publisher_detects_a_stream_restored_from_a_backup(kv: Events) -> None:
    publisher = kv.publisher(refresh_interval=0.1)
    await until(lambda: publisher.published == 1, within=5.0)
    (copy,) = await transact(kv.redis, ("DUMP", STREAM))
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
    await until(lambda: publisher.published == 2, within=5.0)
    await transact(kv.redis, ("RESTORE", STREAM, 0, copy, "REPLACE"))
    subscriber = kv.subscriber()
    await until(lambda: subscriber.index.match(BLOCKS) == {"w": 3}, within=5.0)


async def test_events_survive_a_redis_killed_and_replaced(
    kv: Events, server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, subscriber = kv.publisher(refresh_interval=0.1), kv.subscriber()
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
    await until(lambda: subscriber.index.match(BLOCKS) == {"w": 3}, within=5.0)
    os.kill(server.pid, signal.SIGKILL)
    for block in BLOCKS[3:6]:
        publisher.publish(KvEvents(stored=(block,)))
    await until(
        lambda: "KV event publisher of w: continuing without Redis" in caplog.text, within=5.0
    )
    await until(lambda: "KV event subscriber: continuing without Redis" in caplog.text, within=5.0)
    assert subscriber.index.match(BLOCKS) == {"w": 3}
    with EmbeddedRedis(server.port):
        await until(lambda: subscriber.index.match(BLOCKS) == {"w": 6}, within=5.0)
        await kv.loops.stop()
    assert len(caplog.records) == 4


async def test_publish_never_waits_for_a_hung_redis(kv: Events, server: EmbeddedRedis) -> None:
    publisher, subscriber = kv.publisher(max_pending=4), kv.subscriber()
    await until(lambda: publisher.published == 1, within=5.0)
    os.kill(server.pid, signal.SIGSTOP)
    for _ in range(1_000):
        publisher.publish(KvEvents(stored=tuple(BLOCKS)))
        publisher.publish(KvEvents(removed=tuple(BLOCKS[1:])))
    await until(lambda: subscriber.stale, within=5.0)
    os.kill(server.pid, signal.SIGCONT)
    await until(lambda: held(subscriber) == {BLOCKS[0]}, within=5.0)


async def test_subscriber_starts_empty_at_a_new_epoch(kv: Events) -> None:
    await kv.append(1, 1, BLOCKS[0])
    subscriber = kv.subscriber()
    await until(lambda: held(subscriber) == {BLOCKS[0]}, within=5.0)
    subscriber.follow("w", EPOCH + 1)
    assert held(subscriber) == set()
    await kv.append(2, 2, BLOCKS[1])
    await kv.append(1, 1, BLOCKS[2], epoch=EPOCH + 1)
    await until(lambda: held(subscriber) == {BLOCKS[2]}, within=5.0)


async def test_successor_publishes_the_cache_under_a_new_epoch(kv: Events) -> None:
    publisher, subscriber = kv.publisher(), kv.subscriber()
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:4])))
    publisher.publish(KvEvents(removed=(BLOCKS[3],)))
    await until(lambda: held(subscriber) == set(BLOCKS[:3]), within=5.0)
    successor = publisher.successor(EPOCH + 1)
    successor.publish(KvEvents(stored=(BLOCKS[3], BLOCKS[4])))
    kv.loops.start(successor)
    subscriber.follow("w", EPOCH + 1)
    await until(lambda: held(subscriber) == set(BLOCKS[:5]), within=5.0)
    successor.publish(KvEvents(removed=(BLOCKS[1],)))
    await until(lambda: held(subscriber) == set(BLOCKS[:5]) - {BLOCKS[1]}, within=5.0)


async def test_unfollow_drops_all_blocks_of_a_worker_at_once(kv: Events) -> None:
    await kv.append(1, 1, BLOCKS[0])
    subscriber = kv.subscriber()
    await until(lambda: held(subscriber) == {BLOCKS[0]}, within=5.0)
    subscriber.unfollow("w")
    assert held(subscriber) == set()
    await kv.append(2, 2, BLOCKS[1])
    await kv.write_snapshot(3, BLOCKS[5], key=snapshot_key("v", 1))
    subscriber.follow("v", 1)
    await until(lambda: subscriber.index.match([BLOCKS[5]]) == {"v": 1}, within=5.0)
    assert held(subscriber) == set()


async def test_keys_of_a_dead_worker_expire(kv: Events) -> None:
    publisher = kv.publisher()
    publisher.publish(KvEvents(stored=(BLOCKS[0],)))
    await until(lambda: publisher.published == 2, within=5.0)
    lifetimes = await transact(kv.redis, ("TTL", STREAM), ("TTL", SNAPSHOT))
    assert all(50 < seconds <= 60 for seconds in lifetimes)
