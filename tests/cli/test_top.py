"""`baton top`, on a real cluster."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from textual.widgets import DataTable, Static

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.top.app import Top
from baton.cli.top.snapshot import Snapshot, SnapshotReader, WorkerSnapshot
from baton.cli.top.tables import (
    REQUEST_COLUMNS,
    WORKER_COLUMNS,
    bar,
    in_bytes,
    request_rows,
    worker_rows,
)
from baton.cli.top.tables import headline as top_line
from baton.client.client import AsyncClient, Client, Load, RequestInfo, RoleBalance, Worker
from baton.sampling import SamplingParams
from tests.cli.conftest import baton
from tests.support.waiting import until

LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


@asynccontextmanager
async def long_request(cluster: LocalCluster, request_id: str) -> AsyncIterator[None]:
    """One that is being answered for the length of the block."""
    async with AsyncClient(cluster.address) as client:
        generation = client.generate("def long(one):\n" * 8, LONG, request_id=request_id)
        async for _ in generation:
            break
        try:
            yield
        finally:
            generation.cancel()


@pytest.mark.e2e
def test_top_once_prints_workers_and_exits(cluster: LocalCluster) -> None:
    ended = baton("top", "--once", "--interval", "0.2", "--admin", cluster.admin_address)
    assert (ended.returncode, ended.stderr) == (0, "")
    first, *_ = ended.stdout.splitlines()
    assert first.startswith(cluster.admin_address)
    assert "pressure: encode 0.00 prefill" in first
    assert all(column in ended.stdout for column in WORKER_COLUMNS)
    assert "prefill-0" in ended.stdout
    assert "decode-0" in ended.stdout


@pytest.mark.e2e
def test_top_json_prints_one_object_per_line(cluster: LocalCluster) -> None:
    with Client(cluster.address) as client:
        client.generate("def counted():\n" * 4, SamplingParams(max_tokens=8)).text()
    ended = baton("top", "--json", "--once", "--interval", "0.2", "--admin", cluster.admin_address)
    (line,) = ended.stdout.splitlines()
    seen = json.loads(line)
    assert seen["router"]["state"] == "ready"
    loads = {one["worker"]["id"]: one["load"] for one in seen["workers"]}
    assert loads.keys() == {"prefill-0", "decode-0"}
    assert loads["decode-0"]["num_transferred_bytes"] > 0
    assert loads["decode-0"]["num_transfers"] > 0
    assert loads["decode-0"]["num_blocks"] == 130
    assert seen["requests"] == []


@pytest.mark.e2e
async def test_list_requests_shows_workers_and_phase_of_a_request(cluster: LocalCluster) -> None:
    async with long_request(cluster, "told"), AsyncClient(cluster.admin_address) as client:
        (told,) = await client.list_requests()
        assert (told.request_id, told.phase) == ("told", "decode")
        assert (told.prefill_worker, told.decode_worker) == ("prefill-0", "decode-0")
        assert told.num_output_tokens >= 1
        assert told.time_to_first_token is not None
        assert 0 < told.time_to_first_token <= told.age


@pytest.mark.e2e
async def test_top_screen_shows_requests_and_freezes_on_pause(
    cluster: LocalCluster,
) -> None:
    async with SnapshotReader(cluster.admin_address) as reader:
        app = Top(reader, 0.1)
        async with app.run_test(size=(160, 40)) as pilot:
            await pilot.pause()
            assert rows(app, "workers") == ["decode-0", "prefill-0"]
            assert len(app.query_one("#workers", DataTable).columns) == len(WORKER_COLUMNS)
            assert len(app.query_one("#requests", DataTable).columns) == len(REQUEST_COLUMNS)
            async with long_request(cluster, "shown"):
                await until(lambda: rows(app, "requests") == ["shown"])
                await until(lambda: "running 1" in headline(app))
                await pilot.press("p")
            await app.read()
            assert rows(app, "requests") == ["shown"]
            await pilot.press("p")
            await until(lambda: rows(app, "requests") == [])
            await pilot.press("q")
        assert not app.is_running


@pytest.mark.e2e
async def test_top_keeps_polling_a_router_that_does_not_answer() -> None:
    async with SnapshotReader("127.0.0.1:1") as reader:
        app = Top(reader, 0.1)
        async with app.run_test() as pilot:
            await pilot.pause()
            await until(lambda: headline(app).startswith("127.0.0.1:1  "))
            assert app.is_running


class LateReader(SnapshotReader):
    """Reader that fails for lack of an answer only when the test allows it."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1")
        self.is_looking, self.may_end = asyncio.Event(), asyncio.Event()
        self._is_first = True

    async def read(self) -> Snapshot:
        if not self._is_first:
            self.is_looking.set()
            await self.may_end.wait()
        self._is_first = False
        return await super().read()


def test_top_shows_encode_workers_and_their_pressure() -> None:
    used = {"num_waiting_encoder_tokens": 576, "num_encoder_blocks": 8}
    load = Load("ready", "", 1.0, *[0] * 9, **used, num_held_encoder_blocks=2)
    worker = Worker("w", "encode", "a:2", 1, "ready", 0, 0, "a:3", "1.0")
    balance = RoleBalance(0.5, 0.25, None, "", False, encode_pressure=1.25)
    shown = Snapshot(0.0, load, balance, (WorkerSnapshot(worker, load),), ())
    assert "pressure: encode 1.25 prefill 0.50 decode 0.25" in str(top_line(shown, "a:1"))
    (row,) = (dict(zip(WORKER_COLUMNS, row, strict=True)) for row in worker_rows(shown))
    assert str(row["role"]) == "encode"
    assert str(row["to encode"]) == "576"
    assert str(row["encoder use"]).endswith(" 25%")


def test_top_shows_times_per_step_and_per_token() -> None:
    load = Load("ready", "", 1.0, *[0] * 9)
    new = Worker("w", "decode", "a:2", 1, "ready", 0, 0, "a:3", "1.0")
    slow = replace(new, step_seconds=0.0672, slowness=12.0)
    told = RequestInfo("r", 2.5, "decode", 9, 11, "", "w", 0.5, 0, tenant="acme")
    waiting = replace(told, num_output_tokens=0, time_to_first_token=None)
    workers = tuple(WorkerSnapshot(worker, load) for worker in (new, slow))
    balance = RoleBalance(0.0, 0.0, None, "", False)
    shown = Snapshot(0.0, load, balance, workers, (told, waiting))
    steps = [dict(zip(WORKER_COLUMNS, row, strict=True))["ms/step"] for row in worker_rows(shown)]
    assert [(str(cell), cell.style) for cell in steps] == [("", ""), ("67.2", "red")]
    found = [dict(zip(REQUEST_COLUMNS, row, strict=True)) for row in request_rows(shown)]
    assert [str(row["ms/token"]) for row in found] == ["200.0", ""]
    assert str(found[0]["tenant"]) == "acme"


def test_headline_names_versions_while_workers_differ() -> None:
    router = Load("ready", "", 1.0, *[0] * 9)
    worker = WorkerSnapshot(Worker("w", "decode", "a:2", 1, "ready", 0, 0, "a:3", "1.0"), router)
    newer = replace(worker, worker=replace(worker.worker, version="2.0"))
    one = Snapshot(0.0, router, RoleBalance(0.0, 0.0, None, "", False), (worker, worker), ())
    assert "versions" not in top_line(one, "a:1")
    said = top_line(replace(one, workers=(worker, newer)), "a:1")
    assert str(said).endswith("  versions: 1.0, 2.0")


def test_top_names_models_of_workers_where_several_exist() -> None:
    load = Load("ready", "", 1.0, *[0] * 9)
    one = Worker("w0", "decode", "a:2", 1, "ready", 0, 0, "a:3", "1.0", "chat")
    other = replace(one, id="w1", model="coder")
    for workers, shown in (((one, other), ["w0 (chat)", "w1 (coder)"]), ((one,), ["w0"])):
        found = tuple(WorkerSnapshot(worker, load) for worker in workers)
        balance = RoleBalance(0.0, 0.0, None, "", False)
        rows = worker_rows(Snapshot(0.0, load, balance, found, ()))
        assert [str(row[0]) for row in rows] == shown


def test_top_shows_pauses_of_router_and_worker() -> None:
    going_on = Load("ready", "", 1.0, *[0] * 9)
    paused = replace(going_on, is_paused=True)
    worker = WorkerSnapshot(Worker("w", "decode", "a:2", 1, "ready", 0, 0, "a:3", "1.0"), going_on)
    balance = RoleBalance(0.0, 0.0, None, "", False)
    for load, state, said in ((going_on, "ready", False), (paused, "paused", True)):
        shown = Snapshot(0.0, load, balance, (replace(worker, load=load),), ())
        assert [str(row[2]) for row in worker_rows(shown)] == [state]
        assert ("admission is paused" in top_line(shown, "a:1")) == said


async def test_top_shows_nothing_of_a_poll_that_ends_after_quit() -> None:
    async with LateReader() as reader:
        app = Top(reader, 0.05)
        async with app.run_test() as pilot:
            await asyncio.wait_for(reader.is_looking.wait(), 10)
            await app.screen.query("*").remove()  # as it is done first of all at the end
            reader.may_end.set()
            await pilot.pause(0.2)


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_345_678, "12.3 MB"), (5e15, "5000.0 TB")],
)
def test_in_bytes_picks_a_fitting_unit(number: float, shown: str) -> None:
    assert in_bytes(number) == shown


def test_bar_shows_the_used_share() -> None:
    assert str(bar(0, 0, 4)) == "░░░░   0%"
    assert str(bar(1, 2, 4)) == "██░░  50%"
    assert str(bar(3, 2, 4)) == "████ 150%"


def rows(app: Top, table: str) -> list[str]:
    """Returns the first column of a table."""
    shown = app.query_one(f"#{table}", DataTable)
    return [str(shown.get_row_at(i)[0]) for i in range(shown.row_count)]


def headline(app: Top) -> str:
    return str(app.query_one("#headline", Static).render())
