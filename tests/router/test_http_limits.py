"""Limits of the HTTP front, by real connections to a real server."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from baton_router.http.connection import ConnectionLimits
from baton_router.http.server import HttpServer
from tests.support.waiting import until

WHOLE = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"
TIMEOUT = 10.0


class App:
    """Answers at once, and to "/slow" when it is told to."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.num_begun = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        if scope["path"] == "/slow":
            await self.release.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> tuple[int, Any]:
        """Status and body; 0 where the connection has ended without one."""
        async with asyncio.timeout(TIMEOUT):
            try:
                head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
            except (asyncio.IncompleteReadError, ConnectionError):
                return 0, None
            length = int(head.partition("content-length: ")[2].split("\r\n")[0])
            body = await self._reader.readexactly(length)
        return int(head.split(" ")[1]), body if body == b"ok" else json.loads(body)["error"]

    async def is_closed(self) -> bool:
        async with asyncio.timeout(TIMEOUT):
            try:
                return await self._reader.read() == b""
            except ConnectionError:
                return True


class Front:
    def __init__(self, app: App, port: int) -> None:
        self.app = app
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        return Client(reader, writer)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def front(**limits: Any) -> AsyncIterator[Front]:
    app = App()
    server = HttpServer(app, "127.0.0.1", limits=ConnectionLimits(**limits))
    running = Front(app, await server.start(0))
    try:
        yield running
    finally:
        app.release.set()
        running.close()
        await server.stop()


async def test_http_front_times_out_missing_request_head():
    async with front(head_seconds=0.3) as running:
        silent, slow = await running.connect(), await running.connect()
        await slow.send(b"GET / HTTP/1.1\r\nhost: ")
        for client in (silent, slow):
            status, error = await client.answer()
            assert (status, error["code"]) == (408, "headers_timeout")
            assert await client.is_closed()
        assert running.app.num_begun == 0


async def test_http_front_times_out_dripping_request_head():
    async with front(head_seconds=0.5) as running:
        client = await running.connect()
        began = asyncio.get_running_loop().time()
        answer = asyncio.create_task(client.answer())
        for byte in WHOLE[:15]:
            await client.send(bytes([byte]))
            await asyncio.wait([answer], timeout=0.2)
            if answer.done():
                break
        assert (await answer)[0] == 408
        assert asyncio.get_running_loop().time() - began >= 0.5


async def test_http_front_times_every_head_but_no_answer():
    async with front(head_seconds=0.3) as running:
        client = await running.connect()
        await client.send(WHOLE % b"slow")
        await asyncio.sleep(0.6)
        running.app.release.set()
        assert await client.answer() == (200, b"ok")
        await client.send(WHOLE % b"")
        assert await client.answer() == (200, b"ok")
        await client.send(b"GET / HT")
        assert (await client.answer())[0] == 408


@pytest.mark.parametrize("filler", [b"x: %s\r\n", b"/%s"], ids=["headers", "path"])
async def test_http_front_refuses_too_large_head(filler):
    async with front(max_header_bytes=1024) as running:
        client = await running.connect()
        start = b"GET " if filler.startswith(b"/") else b"GET / HTTP/1.1\r\n"
        await client.send(start + filler % (b"a" * 2000))
        status, error = await client.answer()
        assert (status, error["code"]) == (431, "headers_too_large")
        assert await client.is_closed()
        assert running.app.num_begun == 0


async def test_http_front_answers_non_http_with_error_body():
    async with front() as running:
        client = await running.connect()
        await client.send(b"\x00\x01 nonsense\r\n\r\n")
        status, error = await client.answer()
        assert (status, error["type"]) == (400, "invalid_request_error")


async def test_http_front_replaces_longest_idle_connection_at_limit():
    async with front(max_connections=2) as running:
        idle, younger = await running.connect(), await running.connect()
        for client in (idle, younger):
            await client.send(WHOLE % b"")
            assert await client.answer() == (200, b"ok")
        newest = await running.connect()
        await newest.send(WHOLE % b"")
        assert await newest.answer() == (200, b"ok")
        assert await idle.is_closed()
        await younger.send(WHOLE % b"")
        assert await younger.answer() == (200, b"ok")


async def test_http_front_refuses_connection_when_all_are_busy():
    async with front(max_connections=2) as running:
        busy = [await running.connect() for _ in range(2)]
        for client in busy:
            await client.send(WHOLE % b"slow")
        await until(lambda: running.app.num_begun == 2, within=TIMEOUT)
        for refused in [await running.connect() for _ in range(5)]:
            status, error = await refused.answer()
            assert (status, error["code"]) == (503, "unavailable")
            assert await refused.is_closed()
        running.app.release.set()
        for client in busy:
            assert await client.answer() == (200, b"ok")
        again = await running.connect()
        await again.send(WHOLE % b"")
        assert await again.answer() == (200, b"ok")
