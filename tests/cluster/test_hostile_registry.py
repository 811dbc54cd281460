"""Registry with keys of wrong types and forged records: each is ignored alone."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from baton.cluster.keys import record_key, workers_key
from baton.cluster.redis.client import transact
from baton.cluster.registry.registration import Registration
from baton.cluster.registry.registry import WorkerRecord
from baton.cluster.registry.watcher import RegistryWatcher
from tests.support.redis_loops import RECORD, Loops
from tests.support.waiting import until

WRONG_TYPES: list[Any] = [
    ("SET", "x"),
    ("RPUSH", "x"),
    ("SADD", "x"),
    ("ZADD", 1, "x"),
    ("XADD", "1-0", "x", "x"),
    ("HSET", "x", "x"),
]
Changes = list[tuple[str, WorkerRecord | None]]


async def replace_key(redis: Redis, key: str, write: tuple[Any, ...]) -> None:
    """Makes `key` one of the type that `write` writes."""
    await transact(redis, ("DEL", key), (write[0], key, *write[1:]))


def watching(
    redis: Redis,
    loops: Loops,
    on_change: Callable[..., None] = lambda *_: None,
    grace: float = 1.0,
) -> RegistryWatcher:
    return loops.start(RegistryWatcher(redis, on_change, interval=0.03, grace=grace))


def registering(redis: Redis, loops: Loops, record: WorkerRecord = RECORD) -> Registration:
    return loops.start(Registration(redis, record, interval=0.1))


@pytest.mark.parametrize("write", WRONG_TYPES, ids=lambda write: write[0])
async def test_watcher_sees_new_worker_beside_keys_of_wrong_type(
    redis: Redis, loops: Loops, write: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    keys = [record_key(f"odd-{number}") for number in range(200)]
    await transact(redis, *((write[0], key, *write[1:]) for key in keys))
    await transact(redis, ("SADD", workers_key(), *(f"odd-{number}" for number in range(200))))
    watcher = watching(redis, loops)
    await until(lambda: not watcher.stale, within=5.0)
    registering(redis, loops)
    await until(lambda: dict(watcher.records) == {RECORD.id: RECORD}, within=5.0)
    assert len(watcher.refused) == 200
    assert len(caplog.records) == 1, "one line a minute for all of them"


@pytest.mark.parametrize("write", WRONG_TYPES, ids=lambda write: write[0])
async def test_watcher_keeps_worker_whose_record_changes_type(
    redis: Redis, loops: Loops, write: tuple[Any, ...]
) -> None:
    changes: Changes = []
    watcher = watching(redis, loops, lambda *change: changes.append(change))
    registration = registering(redis, loops)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    await replace_key(redis, record_key(RECORD.id), write)
    if write[0] != "HSET":
        async with asyncio.timeout(5.0):
            while RECORD.id not in watcher.refused:  # written again: it may be repaired unseen
                await replace_key(redis, record_key(RECORD.id), write)
                await asyncio.sleep(0.01)
    await until(lambda: not watcher.refused, within=5.0)
    assert not registration.stale
    assert changes == [(RECORD.id, RECORD)]


@pytest.mark.parametrize("write", [w for w in WRONG_TYPES if w[0] != "SADD"], ids=lambda w: w[0])
async def test_registration_replaces_list_of_wrong_type(
    redis: Redis, loops: Loops, write: tuple[Any, ...]
) -> None:
    changes: Changes = []
    watcher = watching(redis, loops, lambda *change: changes.append(change))
    registering(redis, loops)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    await replace_key(redis, workers_key(), write)
    newcomer = replace(RECORD, id="new")
    registering(redis, loops, newcomer)
    await until(lambda: watcher.records.get("new") == newcomer, within=5.0)
    assert changes == [(RECORD.id, RECORD), ("new", newcomer)]


async def test_watcher_reads_on_while_list_is_of_wrong_type(redis: Redis, loops: Loops) -> None:
    watcher = watching(redis, loops)
    registration = registering(redis, loops)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    await registration._loop.stop()
    draining = replace(RECORD, draining=True)
    await replace_key(redis, workers_key(), ("SET", "x"))
    await transact(redis, ("HSET", record_key(RECORD.id), "draining", 1))
    await until(lambda: watcher.records[RECORD.id] == draining, within=5.0)
    assert not watcher.stale


@pytest.mark.parametrize(
    "field",
    [("epoch", "9" * 5000), ("endpoint", "x" * 2_000_000), ("num_blocks", "-1"), ("role", "both")],
    ids=lambda field: field[0],
)
async def test_watcher_refuses_forged_fields_until_rewritten(
    redis: Redis, loops: Loops, field: tuple[str, str]
) -> None:
    changes: Changes = []
    watcher = watching(redis, loops, lambda *change: changes.append(change))
    registering(redis, loops)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    await transact(redis, ("HSET", record_key(RECORD.id), *field))
    await until(lambda: not watcher.refused, within=5.0)
    assert changes == [(RECORD.id, RECORD)]


async def test_watcher_refuses_record_with_countless_fields(redis: Redis, loops: Loops) -> None:
    watcher = watching(redis, loops)
    extra = [part for number in range(1000) for part in (f"f{number}", "x")]
    await transact(
        redis, ("HSET", record_key("big"), *extra), ("SADD", workers_key(), "big", "\xff" * 900)
    )
    registering(redis, loops)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    assert dict(watcher.refused) == {"big": "it has too many fields"}
    await transact(redis, ("HSET", record_key(RECORD.id), *extra))  # and a real one recovers
    await until(lambda: RECORD.id not in watcher.refused, within=5.0)
    assert dict(watcher.records) == {RECORD.id: RECORD}


async def test_watcher_prunes_unreadable_ids_and_refused_records(
    redis: Redis, loops: Loops
) -> None:
    await transact(redis, ("SADD", workers_key(), b"\xff\xfe", "odd"), ("SET", "x", "y"))
    await replace_key(redis, record_key("odd"), ("SET", "x"))
    watcher = watching(redis, loops, grace=0.3)
    registering(redis, loops)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
    await until(lambda: watcher.listed == {RECORD.id}, within=5.0)
    assert not watcher._unreadable


async def test_watcher_finds_worker_among_more_ids_than_it_reads(
    redis: Redis, loops: Loops
) -> None:
    for start in range(0, 12_000, 1000):
        ids = (f"forged-{number}" for number in range(start, start + 1000))
        await transact(redis, ("SADD", workers_key(), *ids))
    watcher = watching(redis, loops)
    registering(redis, loops)
    await until(lambda: RECORD.id in watcher.records, within=5.0)
