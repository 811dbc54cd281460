"""Signed records, events and gossip: forged, unsigned and wrongly signed ones are refused."""

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.events.publisher import EventPublisher
from baton.cluster.events.subscriber import EventSubscriber
from baton.cluster.gossip import Gossip
from baton.cluster.index import LocalityIndex
from baton.cluster.keys import (
    gossip_key,
    record_key,
    signatures_key,
    snapshot_key,
    stream_key,
    workers_key,
)
from baton.cluster.redis.client import connect, transact
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.cluster.redis.signing import MAX_AGE, SigningKeys, signing_keys
from baton.cluster.registry.registration import Registration
from baton.cluster.registry.watcher import RegistryWatcher
from baton.errors import FailedPreconditionError
from tests.cluster.test_hostile_events import ODD, entry
from tests.cluster.test_hostile_registry import replace_key
from tests.support.redis_loops import BLOCKS, RECORD, Loops
from tests.support.waiting import until

ONE, TWO = "1" * 32, "2" * 64
Connect = Callable[..., Redis]


@pytest.fixture
async def connect_with(server: EmbeddedRedis, tmp_path: Path, loops: Loops):
    """Connects with keys, which are one file per text; the loops end before the connections."""
    async with AsyncExitStack() as stack:

        def client(*keys: str) -> Redis:
            path = tmp_path / ("-".join(key[:1] for key in keys) or "none")
            path.write_text("\n".join(keys))
            signing_keys = SigningKeys(path, interval=0.2) if keys else None
            redis = connect(server.url, signing_keys=signing_keys)
            stack.push_async_callback(redis.aclose)
            return redis

        yield client
        await loops.stop()


def watch(redis: Redis, loops: Loops) -> RegistryWatcher:
    return loops.start(RegistryWatcher(redis, lambda *_: None, interval=0.03, grace=1.0))


def publish(redis: Redis, loops: Loops, refresh_interval: float) -> EventPublisher:
    return loops.start(
        EventPublisher(redis, "w", 7, refresh_interval=refresh_interval, begin_interval=0.1)
    )


def subscribe(redis: Redis, loops: Loops, index: LocalityIndex) -> EventSubscriber:
    return loops.start(EventSubscriber(redis, index, inspection_interval=0.5, resync_interval=0.1))


def register(redis: Redis, loops: Loops, worker: str) -> Registration:
    return loops.start(Registration(redis, replace(RECORD, id=worker), interval=0.1))


async def test_watcher_refuses_unsigned_and_wrongly_signed_records(
    connect_with: Connect, loops: Loops
) -> None:
    watcher = watch(connect_with(ONE), loops)
    register(connect_with(), loops, "unsigned")
    register(connect_with(TWO), loops, "other-key")
    register(connect_with(ONE), loops, "real")
    await until(lambda: len(watcher.refused) == 2, within=5.0)
    await until(lambda: list(watcher.records) == ["real"], within=5.0)
    assert "not signed" in watcher.refused["unsigned"]
    assert "another key" in watcher.refused["other-key"]


async def test_watcher_without_keys_accepts_signed_records(
    connect_with: Connect, loops: Loops
) -> None:
    watcher = watch(connect_with(), loops)
    register(connect_with(ONE), loops, "signed")
    await until(lambda: list(watcher.records) == ["signed"], within=5.0)


@pytest.mark.parametrize("field", ["endpoint", "epoch", "draining", "signed_at", "more"])
async def test_watcher_refuses_record_changed_after_signing(
    connect_with: Connect, loops: Loops, field: str
) -> None:
    redis = connect_with(ONE)
    registration = register(redis, loops, "w")
    watcher = watch(redis, loops)
    await until(lambda: "w" in watcher.records, within=5.0)
    before = watcher.records["w"]
    await registration._loop.stop()
    await transact(redis, ("HSET", record_key("w"), field, 10**12))
    await until(lambda: "w" in watcher.refused, within=5.0)
    assert watcher.records.get("w", before) == before


async def test_watcher_refuses_record_copied_to_another_id(
    connect_with: Connect, loops: Loops
) -> None:
    redis = connect_with(ONE)
    register(redis, loops, "w")
    watcher = watch(redis, loops)
    await until(lambda: "w" in watcher.records, within=5.0)
    (copy,) = await transact(redis, ("HGETALL", record_key("w")))
    fields = [part for pair in copy.items() for part in pair]
    await transact(redis, ("HSET", record_key("copy"), *fields), ("SADD", workers_key(), "copy"))
    await until(lambda: "copy" in watcher.refused, within=5.0)
    assert list(watcher.records) == ["w"]


def test_signature_of_record_expires_and_covers_its_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(ONE)
    keys = signing_keys(str(tmp_path / "keys"))
    assert keys is not None
    fields = {n.encode(): str(v).encode() for n, v in {"a": 1, "signed_at": 0}.items()}
    old = time.time_ns() // 1_000_000 - int(1000 * (MAX_AGE + 5))
    fields[b"signed_at"] = str(old).encode()
    parts = [b"key", *(part for field in sorted(fields.items()) for part in field)]
    fields[b"signature"] = keys.sign(*parts)
    keys.check_fields("key", fields, max_age=None)
    with pytest.raises(ValueError, match="ago"):
        keys.check_fields("key", fields)
    with pytest.raises(ValueError, match="another key"):
        keys.check_fields("other", fields, max_age=None)


async def test_subscriber_refuses_unsigned_and_wrongly_signed_events(
    connect_with: Connect, loops: Loops
) -> None:
    redis, index = connect_with(ONE), LocalityIndex()
    publisher = publish(redis, loops, refresh_interval=0.2)
    subscriber = subscribe(redis, loops, index)
    for worker in ("w", "unsigned", "other-key"):
        subscriber.follow(worker, 7)
    for worker, client in {"unsigned": connect_with(), "other-key": connect_with(TWO)}.items():
        forger = loops.start(EventPublisher(client, worker, 7))
        forger.publish(KvEvents(stored=(ODD,)))
        await until(lambda forger=forger: forger.published == forger.sequence, within=5.0)
    await transact(redis, ("XADD", stream_key("w", 7), "900-0", *entry(2, 900, ODD)))
    publisher.publish(KvEvents(stored=(BLOCKS[0],)))
    await until(lambda: index.match(BLOCKS[:1]) == {"w": 1}, within=10.0)
    assert index.match([ODD]) == {}


async def test_subscriber_refuses_snapshot_changed_after_signing(
    connect_with: Connect, loops: Loops
) -> None:
    redis, many = connect_with(ONE), [number.to_bytes(16) for number in range(1, 301)]
    publisher = publish(redis, loops, refresh_interval=60.0)
    publisher.publish(KvEvents(stored=tuple(many)))
    await until(lambda: publisher._compaction.sequence > 0, within=5.0)
    before, after, key = LocalityIndex(), LocalityIndex(), snapshot_key("w", 7)
    subscribe(redis, loops, before).follow("w", 7)
    await until(lambda: before.match(many) == {"w": 300}, within=5.0)
    await publisher.stop()
    await transact(redis, ("SETRANGE", key, 8 + 16 * 200, ODD), ("DEL", stream_key("w", 7)))
    subscriber = subscribe(redis, loops, after)
    subscriber.follow("w", 7)
    await until(lambda: subscriber._follows["w"].resync_at > 0, within=5.0)
    assert after.match([ODD]) == {}
    assert after.match(many) == {}
    unsigned = LocalityIndex()
    subscribe(connect_with(), loops, unsigned).follow("w", 7)
    await until(lambda: unsigned.match([ODD]) == {"w": 1}, within=5.0)


async def test_publisher_restores_lost_signatures(connect_with: Connect, loops: Loops) -> None:
    redis, index = connect_with(ONE), LocalityIndex()
    publisher = publish(redis, loops, refresh_interval=0.1)
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
    await until(lambda: publisher.published == publisher.sequence, within=5.0)
    for write in (("SET", "x"), ("RPUSH", "x")):
        await replace_key(redis, signatures_key("w", 7), write)
        await until(lambda: publisher.published == publisher.sequence, within=5.0)
    subscribe(redis, loops, index).follow("w", 7)
    await until(lambda: index.match(BLOCKS) == {"w": 3}, within=10.0)


async def test_gossip_refuses_unsigned_and_wrongly_signed_payloads(
    connect_with: Connect, loops: Loops
) -> None:
    def speak(name: str, *keys: str) -> Gossip:
        return loops.start(Gossip(connect_with(*keys), name, name.encode, interval=0.05))

    ours = speak("ours", ONE)
    speak("friend", ONE)
    speak("unsigned")
    speak("other-key", TWO)
    await until(lambda: len(ours._payloads) == 3 and ours.others == [b"friend"], within=5.0)
    redis = connect_with(ONE)
    (copy,) = await transact(redis, ("HGET", gossip_key(), "friend"))
    await transact(redis, ("HSET", gossip_key(), "copy", copy))
    await until(lambda: b"copy" in ours._payloads, within=5.0)
    assert ours.others == [b"friend"]


async def test_keys_rotate_without_losing_a_record(
    connect_with: Connect, loops: Loops, tmp_path: Path
) -> None:
    """Three steps: all processes verify the new key, then all sign with it, then none verifies
    the old one."""
    redis, changes = connect_with(ONE), []
    watcher = loops.start(
        RegistryWatcher(redis, lambda *change: changes.append(change), interval=0.03, grace=5.0)
    )
    register(redis, loops, "w")
    publisher = publish(redis, loops, refresh_interval=0.1)
    publisher.publish(KvEvents(stored=tuple(BLOCKS[:3])))
    await until(lambda: "w" in watcher.records, within=5.0)
    for keys in ((ONE, TWO), (TWO, ONE), (TWO,)):
        (tmp_path / "1").write_text("# keys\n" + "\n".join(keys))
        await until(lambda keys=keys: len(redis.signing_keys._file.current()) == len(keys))
        await until(lambda keys=keys: redis.signing_keys.first == keys[0].encode(), within=5.0)
        await until(lambda: not watcher.refused, within=5.0)
    assert len(changes) == 1
    newcomer = LocalityIndex()
    subscriber = subscribe(connect_with(TWO), loops, newcomer)
    subscriber.follow("w", 7)
    await until(lambda: newcomer.match(BLOCKS) == {"w": 3}, within=10.0)


@pytest.mark.parametrize("text", ["", "# none\n", "short\n", "x" * 32 + "\nshort"])
def test_signing_key_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(FailedPreconditionError, match="openssl rand -hex 32"):
        SigningKeys(path)
    with pytest.raises(FailedPreconditionError, match="cannot read"):
        SigningKeys(tmp_path / "none")
