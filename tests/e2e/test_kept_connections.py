"""A router is rolled under clients that keep their connections, behind a load balancer."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_client_examples import program
from tests.support.balancer import Balancer, balanced
from tests.support.repository import ROOT
from tests.support.router.lone_router import LoneRouter, lone_router
from tests.support.waiting import until_observed

pytestmark = pytest.mark.e2e

PROGRAMS = ROOT / "tests" / "support" / "kept_connections"
IN_PYTHON = (sys.executable, PROGRAMS / "http_client.py")
FLAGS = {"ready_without_workers": True, "drain_timeout_s": 10.0}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@asynccontextmanager
async def under_clients(
    commands: Sequence[Sequence[str | Path]], url: str, outcomes: list[dict[str, object]]
) -> AsyncIterator[None]:
    """Runs clients, which send requests one after the other; afterwards has their `outcomes`."""
    clients = [
        await asyncio.create_subprocess_exec(*map(str, command), url, stdin=PIPE, stdout=PIPE)
        for command in commands
    ]
    try:
        yield
        for client in clients:
            out, _ = await asyncio.wait_for(client.communicate(b""), 20.0)
            outcomes.append(json.loads(out))
    finally:
        for client in clients:
            if client.returncode is None:
                client.kill()
                await client.wait()


@asynccontextmanager
async def held(router: LoneRouter) -> AsyncIterator[None]:
    """Keeps a drain from its end by a request whose body is not complete before the block ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(router.http_address))
    head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    body = b'{"prompt": "import os"}'
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:-1])
    await writer.drain()
    yield
    writer.write(body[-1:])
    answer = await asyncio.wait_for(reader.read(), 10.0)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"\r\nconnection: close\r\n" in answer
    writer.close()


async def roll(balancer: Balancer, old: LoneRouter) -> None:
    """Ends a router under its clients, and checks what it says meanwhile to new ones."""
    port = port_of(old.http_address)
    async with held(old), httpx.AsyncClient(base_url=old.http_address) as other:
        old.signal(signal.SIGTERM)
        await until_health_is(other, 503)
        balancer.ready.remove(port)
        said = [await other.post("/tokenize", json={"prompt": "import os"}) for _ in range(2)]
        assert [(a.status_code, a.headers.get("connection")) for a in said] == [(200, "close")] * 2
        await until_observed(lambda: not balancer.num_open[port], what="that clients have moved")

        async def refused() -> httpx.Response:
            while (answer := await other.post("/tokenize", json={})).status_code != 503:
                await asyncio.sleep(0.05)
            return answer

        answer = await asyncio.wait_for(refused(), 10.0)
        assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
    await until_observed(lambda: not old.is_running, what="the end of the router")


async def until_health_is(client: httpx.AsyncClient, status: int) -> None:
    async with asyncio.timeout(10.0):
        while (await client.get("/health")).status_code != status:
            await asyncio.sleep(0.02)


async def rolled(commands: Sequence[Sequence[str | Path]]) -> list[dict[str, object]]:
    """Returns the outcomes of clients under which one of two routers is rolled."""
    outcomes: list[dict[str, object]] = []
    with lone_router(**FLAGS) as old, lone_router(**FLAGS) as new:
        async with balanced([port_of(old.http_address)]) as (balancer, address):
            url = f"http://{address}/tokenize"
            async with under_clients(commands, url, outcomes):
                all_there = len(commands)
                await until_observed(
                    lambda: balancer.num_open[port_of(old.http_address)] >= all_there, 30.0
                )
                balancer.ready.append(port_of(new.http_address))
                await asyncio.sleep(0.3)
                await roll(balancer, old)
                await asyncio.sleep(0.3)
                assert balancer.num_open[port_of(new.http_address)] == all_there
    return outcomes


def check(outcomes: list[dict[str, object]]) -> None:
    for outcome in outcomes:
        assert outcome["failures"] == []
        assert int(str(outcome["answered"])) > 20


async def test_rolled_router_loses_no_request_of_kept_connections():
    check(await rolled([(*IN_PYTHON, "httpx"), (*IN_PYTHON, "urllib3")]))


@pytest.mark.nightly
async def test_rolled_router_loses_no_request_of_other_languages(tmp_path):
    built = tmp_path / "http_client"
    source = PROGRAMS / "http_client.go"
    building = await asyncio.create_subprocess_exec(
        program("go"), "build", "-o", str(built), str(source)
    )
    assert await building.wait() == 0
    check(await rolled([(built,), (program("node"), PROGRAMS / "http_client.mjs")]))
