"""A router is rolled under clients that keep their connections, behind load balancers."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_client_examples import built, program
from tests.support.balancer import Balancer, balanced
from tests.support.repository import ROOT
from tests.support.router.lone_router import LoneRouter, lone_router
from tests.support.waiting import until_observed

pytestmark = pytest.mark.e2e

PROGRAMS = ROOT / "tests" / "support" / "kept_connections"
IN_PYTHON = (sys.executable, PROGRAMS / "http_client.py")
FLAGS = {"ready_without_workers": True, "drain_timeout_s": 20.0}
BODY = b'{"prompt": "import os"}'
HEAD = (
    "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    f"content-length: {len(BODY)}\r\n\r\n"
).encode()


def http_port(router: LoneRouter) -> int:
    return int(router.http_address.rpartition(":")[2])


def grpc_port(router: LoneRouter) -> int:
    return int(router.endpoint.rpartition(":")[2])


@dataclass(frozen=True)
class Outcome:
    """Outcome of the requests of one client."""

    answered: int
    failures: list[str]


@asynccontextmanager
async def running_clients(
    commands: Sequence[Sequence[str | Path]], outcomes: list[Outcome]
) -> AsyncIterator[None]:
    """Runs clients, which send requests one after the other; has their outcomes afterwards."""
    clients = [
        await asyncio.create_subprocess_exec(*map(str, command), stdin=PIPE, stdout=PIPE)
        for command in commands
    ]
    try:
        yield
        for client in clients:
            out, _ = await asyncio.wait_for(client.communicate(b""), 20.0)
            outcomes.append(Outcome(**json.loads(out)))
    finally:
        for client in clients:
            if client.returncode is None:
                client.kill()
                await client.wait()


@asynccontextmanager
async def unfinished_request(router: LoneRouter) -> AsyncIterator[None]:
    """Keeps a drain from its end by a request that is not whole before the block ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", http_port(router))
    try:
        writer.write(HEAD + BODY[:-1])
        await writer.drain()
        yield
        writer.write(BODY[-1:])
        answer = await asyncio.wait_for(reader.read(), 10.0)
    finally:
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"\r\nconnection: close\r\n" in answer


async def roll(old: LoneRouter, balancer: Balancer, port: int) -> None:
    """Ends a router under its clients, which have to move, and checks its answers to others.

    Args:
        port: of the router, as the balancer has it.
    """
    with httpx.Client(base_url=old.http_address) as other:

        def answer() -> httpx.Response:
            return other.post("/tokenize", json={"prompt": "import os"})

        async with unfinished_request(old):
            old.signal(signal.SIGTERM)
            await until_observed(lambda: other.get("/health").status_code == 503)
            balancer.ready.remove(port)
            served = await asyncio.to_thread(answer)
            assert (served.status_code, served.headers["connection"]) == (200, "close")
            await until_observed(lambda: not balancer.num_open[port], what="the clients' move")
            await asyncio.sleep(1.2)  # each request to it makes the notice longer
            await until_observed(lambda: answer().status_code == 503, what="the notice's end")
            headers = (await asyncio.to_thread(answer)).headers
            assert (headers["retry-after"], headers["connection"]) == ("1", "close")
        await until_observed(lambda: not old.is_running, what="the end of the router")


async def rolled(
    commands: Sequence[Sequence[str | Path]],
    port_of: Callable[[LoneRouter], int] = http_port,
    url: str = "http://{}/tokenize",
) -> list[Outcome]:
    """Returns the outcomes of clients under which one of two routers is rolled. Commands get the
    address of the balancer."""
    outcomes: list[Outcome] = []
    with lone_router(**FLAGS) as old, lone_router(**FLAGS) as new:
        async with balanced([port_of(old)]) as (balancer, address):
            to_balancer = [(*command, url.format(address)) for command in commands]
            async with running_clients(to_balancer, outcomes):
                await until_observed(lambda: balancer.num_open[port_of(old)] == len(commands), 30.0)
                balancer.ready.append(port_of(new))
                await asyncio.sleep(0.3)
                await roll(old, balancer, port_of(old))
                await asyncio.sleep(0.3)
                assert balancer.num_open[port_of(new)] == len(commands)
    assert all(outcome.answered > 20 for outcome in outcomes)
    return outcomes


async def test_rolled_router_loses_no_request_of_kept_connections():
    outcomes = await rolled([(*IN_PYTHON, "httpx"), (*IN_PYTHON, "urllib3")])
    assert [outcome.failures for outcome in outcomes] == [[], []]


async def test_rolled_router_moves_channel_of_plain_stubs():
    """gRPC cancels a call that is on its way as the connection is released; no other is lost."""
    command = (sys.executable, PROGRAMS / "grpc_client.py")
    (outcome,) = await rolled([command], grpc_port, "{}")
    assert outcome.failures in ([], ["CANCELLED CANCELLED"])


@pytest.mark.nightly
async def test_rolled_router_loses_no_request_in_other_languages(tmp_path):
    source, binary = PROGRAMS / "http_client.go", tmp_path / "http_client"
    built(program("go"), "build", "-o", binary, source, cwd=tmp_path)
    outcomes = await rolled([(binary,), (program("node"), PROGRAMS / "http_client.mjs")])
    assert [outcome.failures for outcome in outcomes] == [[], []]
