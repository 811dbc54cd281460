"""Kept connections of the HTTP front while it drains, by real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from baton_router.apis.edge.server import HttpServer
from baton_router.routing.admission.quotas import Quotas
from tests.support.router.front import routes_to
from tests.support.router.scripted import card, fleet_of
from tests.support.waiting import until

NOTICE = 2.0
# What a client takes at most between two requests, in these tests.
SOON = 0.5


class App:
    """Answers at once, and to "/stream" and "/late" after `release`: the one begins at once."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.num_begun = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        if scope["path"] == "/late":
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            await self.release.wait()
        await send({"type": "http.response.body", "body": b"b"})


class Connection:
    """Client with one connection to a server."""

    def __init__(self, port: int) -> None:
        limits = httpx.Limits(max_connections=1)
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits)

    async def closes_after(self, path: str = "/") -> bool:
        """Returns whether the answer has `Connection: close`."""
        answer = await self._client.get(path)
        assert answer.status_code == 200
        return answer.headers.get("connection") == "close"

    async def close(self) -> None:
        await self._client.aclose()


@asynccontextmanager
async def served() -> AsyncIterator[tuple[HttpServer, App, list[Connection]]]:
    """Yields a server, what it serves, and three clients that keep a connection each."""
    app = App()
    server = HttpServer(app, "127.0.0.1")
    port = await server.start(0)
    clients = [Connection(port) for _ in range(3)]
    try:
        for client in clients:
            assert not await client.closes_after()
        yield server, app, clients
    finally:
        app.release.set()
        for client in clients:
            await client.close()
        await server.stop()


async def test_kept_connection_serves_one_more_request_in_drain():
    async with served() as (server, app, (client, *_)):
        app.release.set()
        await server.begin_drain()
        draining = asyncio.create_task(server.release_connections(NOTICE))
        assert await client.closes_after("/stream")
        assert await client.closes_after()  # by a new connection
        assert not draining.done()
        await draining


@pytest.mark.parametrize("num_turns", range(6))
async def test_connection_made_as_drain_begins_is_not_kept(num_turns):
    """Some turns of the event loop are between its acceptance and its first data."""
    app = App()
    server = HttpServer(app, "127.0.0.1")
    port = await server.start(0)
    await asyncio.sleep(0.1)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setblocking(False)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await server.begin_drain()
        reader, writer = await asyncio.open_connection(sock=client.dup())
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5.0)
        writer.close()
    await server.stop()
    assert b"\r\nconnection: close\r\n" in head


async def test_quiet_connections_end_notice_of_drain():
    async with served() as (server, _, _):
        loop = asyncio.get_running_loop()
        began = loop.time()
        await server.begin_drain()
        await server.release_connections(60.0)
        assert 0.8 < loop.time() - began < 10.0
        assert not server._server.open_connections


async def test_drain_without_connections_has_no_notice():
    server = HttpServer(App(), "127.0.0.1")
    await server.start(0)
    async with asyncio.timeout(SOON):
        await server.begin_drain()
        await server.release_connections(60.0)
    await server.stop()


async def test_answer_begun_before_drain_leaves_room_for_next():
    """Its client was not told that the connection ends, and may send at once."""
    async with served() as (server, app, (streaming, late, _)):
        stream = asyncio.create_task(streaming.closes_after("/stream"))
        other = asyncio.create_task(late.closes_after("/late"))
        await until(lambda: app.num_begun == 5)
        await server.begin_drain()
        draining = asyncio.create_task(server.release_connections(60.0))
        app.release.set()
        assert not await stream
        assert await other
        assert await streaming.closes_after()
        await draining


async def test_connections_close_after_answer_past_notice():
    async with served() as (server, app, (streaming, *_)):
        stream = asyncio.create_task(streaming.closes_after("/stream"))
        await until(lambda: app.num_begun == 4)
        await server.begin_drain()
        await server.release_connections(0.1)
        assert [c.is_busy for c in server._server.open_connections if c.may_be_reused] == []
        app.release.set()
        await stream
        await until(lambda: not server._server.open_connections)


async def test_draining_router_serves_until_notice_ends():
    async with fleet_of() as fleet:
        routes = routes_to(fleet, card(), Quotas())
        transport = httpx.ASGITransport(routes.app())
        path, body = "/tokenize", {"prompt": "import os"}
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            await routes._requests.begin_drain()
            assert (await client.get("/health")).status_code == 503
            assert (await client.post(path, json=body)).status_code == 200
            await routes._requests.drain()
            refused = await client.post(path, json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "draining" in refused.json()["error"]["message"]
