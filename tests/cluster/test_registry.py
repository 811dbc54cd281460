import logging
import os
import signal
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from baton.cluster.keys import record_key, workers_key
from baton.cluster.prefix import PrefixNamespace
from baton.cluster.redis.client import transact
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.cluster.registry.registration import Registration
from baton.cluster.registry.registry import WorkerRecord, new_epoch
from baton.cluster.registry.watcher import RegistryWatcher
from tests.support.redis_loops import RECORD, Loops
from tests.support.waiting import until


class Cluster:
    """Registrations and a watcher, all fast, that stop when the test ends."""

    def __init__(self, redis: Redis, loops: Loops) -> None:
        self.redis = redis
        self.loops = loops
        self.changes: list[tuple[str, WorkerRecord | None]] = []

    def register(
        self, record: WorkerRecord, interval: float = 0.05, ttl: float = 1.0
    ) -> Registration:
        return self.loops.start(Registration(self.redis, record, interval=interval, ttl=ttl))

    def watch(self, grace: float = 10.0) -> RegistryWatcher:
        def on_change(*change: object) -> None:
            self.changes.append(change)

        return self.loops.start(RegistryWatcher(self.redis, on_change, interval=0.03, grace=grace))

    async def write(self, record: WorkerRecord) -> None:
        """Writes a worker's record once, without a heartbeat."""
        fields = [part for pair in record.to_fields().items() for part in pair]
        await transact(
            self.redis,
            ("HSET", record_key(record.id), *fields),
            ("SADD", workers_key(), record.id),
        )


@pytest.fixture
def cluster(redis: Redis, loops: Loops) -> Cluster:
    return Cluster(redis, loops)


def test_record_round_trips_through_redis_fields() -> None:
    record = replace(RECORD, draining=True, keeps_role=True)
    fields = {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in record.to_fields().items()
    }
    assert WorkerRecord.from_fields(fields | {b"unknown": b"?"}) == record


def test_record_without_version_pairs_only_with_its_like() -> None:
    fields = {name.encode(): str(value).encode() for name, value in RECORD.to_fields().items()}
    named = WorkerRecord.from_fields(fields | {b"version": b"1.2.3"})
    del fields[b"version"]
    unnamed = WorkerRecord.from_fields(fields)
    assert (named.version, unnamed.version) == ("1.2.3", "")
    assert unnamed.pairing == replace(unnamed, id="other", epoch=9).pairing
    others = [named, replace(named, version="1.2.4"), replace(named, fingerprint=b"")]
    others += [replace(named, layout=b"")]
    assert len({other.pairing for other in [unnamed, *others]}) == 5


@pytest.mark.parametrize("change", [{b"role": b"both"}, {b"epoch": b"x"}, {b"model": b"\xff"}])
def test_malformed_record_raises_value_error(change: dict[bytes, bytes]) -> None:
    fields = {name.encode(): b"1" for name in RECORD.to_fields()} | {b"role": b"decode"}
    with pytest.raises(ValueError):
        WorkerRecord.from_fields(fields | change)


def test_record_without_a_field_raises_value_error() -> None:
    with pytest.raises(ValueError, match="missing"):
        WorkerRecord.from_fields({b"id": b"a"})


def test_record_namespace_is_that_of_its_chain_hashes() -> None:
    assert RECORD.namespace == PrefixNamespace(b"\x00\xff", b"\xfe", "float32", 16)


def test_new_epoch_grows_with_the_clock() -> None:
    first = new_epoch()
    assert first > 1_700_000_000_000
    assert new_epoch() >= first


async def test_watcher_sees_a_worker_join_drain_and_leave(cluster: Cluster) -> None:
    watcher = cluster.watch()
    assert watcher.stale
    registration = cluster.register(RECORD)
    await until(lambda: dict(watcher.records) == {RECORD.id: RECORD}, within=5.0)
    assert not watcher.stale
    draining = replace(RECORD, draining=True)
    registration.update(draining)
    await until(lambda: watcher.records[RECORD.id] == draining, within=5.0)
    await registration.stop()
    await until(lambda: not watcher.records, within=2.0)
    assert cluster.changes == [(RECORD.id, RECORD), (RECORD.id, draining), (RECORD.id, None)]


async def test_expired_record_is_removed_and_its_id_pruned(cluster: Cluster) -> None:
    registration = cluster.register(RECORD, ttl=0.3)
    watcher = cluster.watch(grace=0.5)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    await registration._loop.stop()
    await until(lambda: not watcher.records, within=5.0)
    await until(lambda: not watcher.listed, within=5.0)
    assert await transact(cluster.redis, ("SMEMBERS", workers_key())) == [set()]


async def test_stop_leaves_the_record_of_a_successor(cluster: Cluster) -> None:
    watcher = cluster.watch()
    old = cluster.register(RECORD)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    await old._loop.stop()
    successor = replace(RECORD, epoch=RECORD.epoch + 1)
    cluster.register(successor)
    await until(lambda: watcher.records[RECORD.id] == successor, within=5.0)
    await old.stop()
    assert await transact(cluster.redis, ("EXISTS", record_key(RECORD.id))) == [1]


RIVAL = replace(RECORD, endpoint="127.0.0.1:7003", epoch=RECORD.epoch + 1)


def says(caplog: pytest.LogCaptureFixture, *words: str) -> bool:
    return any(all(word in message for word in words) for message in caplog.messages)


async def test_first_of_two_workers_with_one_id_keeps_it(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Both say so, with both addresses, and nothing changes when the second one ends."""
    watcher = cluster.watch()
    cluster.register(RECORD)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    second = cluster.register(RIVAL)
    shown = replace(RECORD, rival=RIVAL.endpoint)
    await until(lambda: watcher.records[RECORD.id] == shown, within=5.0)
    addresses = RECORD.endpoint, RIVAL.endpoint
    for what in ("is held by", "is that of the worker"):
        await until(lambda what=what: says(caplog, what, *addresses), within=5.0)
    await second.stop()
    await until(lambda: watcher.records[RECORD.id] == RECORD, within=5.0)
    assert {record for _, record in cluster.changes} == {RECORD, shown}


@pytest.mark.parametrize("ending", ["stops", "dies", "drains"])
async def test_second_worker_takes_id_once_first_one_ends(cluster: Cluster, ending: str) -> None:
    watcher = cluster.watch()
    first = cluster.register(RECORD)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    cluster.register(RIVAL)
    await until(lambda: watcher.records[RECORD.id].rival == RIVAL.endpoint, within=5.0)
    match ending:
        case "stops":
            await first.stop()
        case "dies":
            await first._loop.stop()
        case "drains":
            first.update(replace(RECORD, draining=True))
    await until(lambda: watcher.records.get(RECORD.id) == RIVAL, within=5.0)
    num_changes = len(cluster.changes)
    await first.stop()
    other = replace(RECORD, id="other")
    cluster.register(other)
    await until(lambda: "other" in watcher.records, within=5.0)
    assert cluster.changes[num_changes:] == [("other", other)]


async def test_restarted_worker_takes_its_id_at_once(cluster: Cluster) -> None:
    """Its record has its endpoint, whatever the epoch."""
    watcher = cluster.watch()
    first = cluster.register(RECORD, ttl=30.0)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    await first._loop.stop()
    restarted = replace(RECORD, epoch=RECORD.epoch + 1)
    cluster.register(restarted, ttl=30.0)
    await until(lambda: watcher.records[RECORD.id] == restarted, within=5.0)


async def test_record_that_no_worker_renews_holds_no_id(cluster: Cluster) -> None:
    """Neither one without an end, nor one that outlives every renewal."""
    for record, milliseconds in ((replace(RIVAL, id="v"), None), (RIVAL, 10**6)):
        await cluster.write(record)
        if milliseconds:
            key = record_key(record.id)
            await transact(cluster.redis, ("PEXPIRE", key, milliseconds))
        cluster.register(replace(RECORD, id=record.id, epoch=RIVAL.epoch + 1))
    watcher = cluster.watch()
    await until(
        lambda: {r.endpoint for r in watcher.records.values()} == {RECORD.endpoint}, within=5.0
    )


async def test_watcher_keeps_workers_through_a_redis_flush(cluster: Cluster) -> None:
    watcher = cluster.watch()
    cluster.register(RECORD, interval=0.3)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    for _ in range(3):
        await transact(cluster.redis, ("FLUSHALL",))
        await until(lambda: not watcher.listed, within=5.0)
        await until(lambda: watcher.listed == {RECORD.id}, within=5.0)
    assert cluster.changes == [(RECORD.id, RECORD)]


async def test_watcher_drops_an_unlisted_worker_after_the_grace_period(
    cluster: Cluster,
) -> None:
    watcher = cluster.watch(grace=0.4)
    await cluster.write(RECORD)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    await transact(cluster.redis, ("FLUSHALL",))
    await until(lambda: not watcher.listed, within=5.0)
    assert RECORD.id in watcher.records
    await until(lambda: not watcher.records, within=5.0)


async def test_registry_recovers_after_redis_is_killed_and_replaced(
    cluster: Cluster,
    server: EmbeddedRedis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    watcher = cluster.watch()
    cluster.register(RECORD)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    os.kill(server.pid, signal.SIGKILL)
    await until(lambda: watcher.stale, within=5.0)
    await until(lambda: "registration of w: continuing without" in caplog.text, within=5.0)
    assert dict(watcher.records) == {RECORD.id: RECORD}
    with EmbeddedRedis(server.port):
        await until(lambda: not watcher.stale, within=5.0)
        await until(lambda: watcher.listed == {RECORD.id}, within=5.0)
        await cluster.loops.stop()
    assert cluster.changes == [(RECORD.id, RECORD)]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 4, "one when trouble starts and one when it ends, for either loop"
    assert not any(record.exc_info for record in warnings)


async def test_watcher_turns_stale_and_keeps_workers_on_hung_redis(
    cluster: Cluster, server: EmbeddedRedis
) -> None:
    watcher = cluster.watch()
    cluster.register(RECORD, ttl=10.0)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    os.kill(server.pid, signal.SIGSTOP)
    await until(lambda: watcher.stale, within=5.0)
    os.kill(server.pid, signal.SIGCONT)
    await until(lambda: not watcher.stale, within=5.0)
    assert cluster.changes == [(RECORD.id, RECORD)]


async def test_watcher_ignores_an_older_epoch_until_the_newer_is_gone(cluster: Cluster) -> None:
    watcher = cluster.watch(grace=0.4)
    await cluster.write(RECORD)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    older = replace(RECORD, epoch=RECORD.epoch - 1)
    await cluster.write(older)
    await until(lambda: len(cluster.changes) == 3, within=5.0)
    assert cluster.changes == [(RECORD.id, RECORD), (RECORD.id, None), (RECORD.id, older)]


async def test_watcher_ignores_and_logs_a_malformed_record_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await transact(cluster.redis, ("HSET", record_key("odd"), "role", "?"))
    await transact(cluster.redis, ("SADD", workers_key(), "odd"))
    watcher = cluster.watch()
    cluster.register(RECORD)
    await until(lambda: list(watcher.records) == [RECORD.id], within=5.0)
    polls = watcher._seen[RECORD.id]
    await until(lambda: watcher._seen[RECORD.id] > polls, within=5.0)
    assert caplog.text.count("ignoring the record of worker 'odd'") == 1


async def test_watcher_continues_after_a_listener_fails(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(worker: str, record: WorkerRecord | None) -> None:
        raise RuntimeError("no")

    watcher = cluster.loops.start(RegistryWatcher(cluster.redis, fail, interval=0.03))
    cluster.register(RECORD)
    cluster.register(replace(RECORD, id="decode-0", role="decode"))
    await until(lambda: len(watcher.records) == 2, within=5.0)
    assert "listener failed" in caplog.text
