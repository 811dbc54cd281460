"""Fleet beside forged records: they cost little, and real workers are found."""

from dataclasses import replace

import pytest

from baton.cluster.keys import record_key, workers_key
from baton.cluster.redis.client import connect, transact
from baton.cluster.registry.registry import WorkerRecord
from baton_router.routing.fleet.fleet import _MAX_ON_TRIAL
from baton_router.routing.fleet.waiting_records import WaitingRecords
from tests.router.routing.fleet.test_fleet import record_of, registered, worker_and_fleet
from tests.support.router.records import RECORD
from tests.support.waiting import until


def forged(number: int) -> WorkerRecord:
    """Returns a record with an endpoint of its own, where no server listens."""
    endpoint = f"127.1.{number // 250}.{number % 250 + 1}:1"
    return replace(RECORD, id=f"forged-{number}", endpoint=endpoint, epoch=10**12 + number)


async def write(url: str, *records: WorkerRecord) -> None:
    """Writes records without a heartbeat, and without an end."""
    async with connect(url) as redis:
        for start in range(0, len(records), 100):
            commands = []
            for record in records[start : start + 100]:
                fields = [part for pair in record.to_fields().items() for part in pair]
                commands.append(("HSET", record_key(record.id), *fields))
                commands.append(("SADD", workers_key(), record.id))
            await transact(redis, *commands)


async def test_fleet_finds_workers_beside_2000_forged_records(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with worker_and_fleet(poll_interval=0.3) as (server, fleet, redis_server):
        await server.set_ready(True)
        async with registered(redis_server, record_of(server, id="first")):
            await until(lambda: [m.state for m in fleet.members] == ["ready"], within=5.0)
            await write(redis_server.url, *map(forged, range(2000)))
            await until(lambda: len(fleet.members) > 10, within=10.0)
            async with registered(redis_server, record_of(server, id="new")):
                names = {"first", "new"}
                await until(
                    lambda: {m.record.id for m in fleet.members if m.state == "ready"} == names,
                    within=30.0,
                )
            assert len(fleet.members) <= _MAX_ON_TRIAL + 2
    assert caplog.text.count("forged-") < 10


async def test_fleet_ignores_workers_beyond_max_workers(caplog: pytest.LogCaptureFixture) -> None:
    async with worker_and_fleet() as (server, fleet, redis_server):
        fleet._max_workers = 3
        await server.set_ready(True)
        await write(redis_server.url, *(record_of(server, id=f"w{n}") for n in range(6)))
        await until(lambda: [m.state for m in fleet.members] == ["ready"] * 3, within=10.0)
        await until(lambda: "--max-workers" in caplog.text, within=5.0)
    assert caplog.text.count("--max-workers") == 1


@pytest.mark.parametrize("layout", [b"\xff\xff", b"\x0a\x02\x08\x01"], ids=["garbled", "no blocks"])
async def test_fleet_ignores_record_of_malformed_layout(
    layout: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker_and_fleet() as (server, fleet, redis_server):
        await server.set_ready(True)
        await write(redis_server.url, record_of(server, id="odd", layout=layout))
        async with registered(redis_server, record_of(server)):
            await until(lambda: [m.record.id for m in fleet.members] == ["w"], within=5.0)
    assert caplog.text.count("ignoring the record of worker 'odd'") == 1
    assert "Traceback" not in caplog.text


def test_waiting_records_prefer_fewest_trials_then_newest() -> None:
    waiting = WaitingRecords()
    for name in "abc":
        waiting.add(replace(RECORD, id=name))
    waiting.add_again(waiting.take())
    waiting.add(replace(RECORD, id="d"))
    waiting.remove("b")
    assert [waiting.take().id for _ in range(3)] == ["d", "a", "c"]
    assert not waiting
