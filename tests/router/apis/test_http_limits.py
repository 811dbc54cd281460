"""Limits of the HTTP front, by real connections to a real server."""

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from baton.cli.certs import Authority
from baton.rpc.tls import Tls
from baton_router.apis.edge.middleware import Failures
from baton_router.apis.edge.server import HttpServer
from baton_router.apis.edge.settings import ConnectionLimits
from tests.support.waiting import until

POST_ROOT = b"POST / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /%s HTTP/1.1\r\nhost: x\r\n"
WHOLE = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"
TIMEOUT = 10.0


class App:
    """Answers at once, to "/slow" when it is told to, and to "/body" after the body."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.num_begun = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_begun += 1
        self.headers = dict(scope["headers"])
        if scope["path"] == "/slow":
            await self.release.wait()
        if scope["path"] == "/body":
            self.body = await Request(scope, receive).body()
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

    async def answer_to(self, data: bytes, size: int) -> tuple[int, Any]:
        """Sends `data` in pieces of `size` bytes, until there is an answer."""
        answer = asyncio.create_task(self.answer())
        for at in range(0, len(data), size):
            if not answer.done():
                await self.send(data[at : at + size])
                await asyncio.sleep(0)
        return await answer

    def hang_up(self) -> None:
        self._writer.transport.abort()

    async def is_closed(self) -> bool:
        async with asyncio.timeout(TIMEOUT):
            try:
                return await self._reader.read() == b""
            except ConnectionError:
                return True


class Front:
    def __init__(self, app: App, port: int, tls: ssl.SSLContext | None) -> None:
        self.app = app
        self._port = port
        self._tls = tls
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, *, secured: bool = True, source: str = "127.0.0.1") -> Client:
        """Connects from `source`, without TLS unless `secured`."""
        tls = self._tls if secured else None
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=tls, local_addr=(source, 0)
        )
        self._writers.append(writer)
        return Client(reader, writer)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def front(tls: Tls | None = None, **limits: Any) -> AsyncIterator[Front]:
    app = App()
    server = HttpServer(Failures(app), "127.0.0.1", tls, ConnectionLimits(**limits))
    client_tls = None if tls is None else ssl.create_default_context(cafile=tls.ca)
    running = Front(app, await server.start(0), client_tls)
    try:
        yield running
    finally:
        app.release.set()
        running.close()
        await server.stop()


async def test_http_front_times_out_missing_request_head():
    async with front(head_timeout_s=0.3) as running:
        silent, slow = await running.connect(), await running.connect()
        await slow.send(b"GET / HTTP/1.1\r\nhost: ")
        for client in (silent, slow):
            status, error = await client.answer()
            assert (status, error["code"]) == (408, "headers_timeout")
            assert await client.is_closed()
        assert running.app.num_begun == 0


async def test_http_front_times_out_dripping_request_head():
    async with front(head_timeout_s=0.5) as running:
        began = asyncio.get_running_loop().time()  # the timeout begins with the connection
        client = await running.connect()
        answer = asyncio.create_task(client.answer())
        for byte in WHOLE[:15]:
            await client.send(bytes([byte]))
            await asyncio.wait([answer], timeout=0.2)
            if answer.done():
                break
        assert (await answer)[0] == 408
        assert asyncio.get_running_loop().time() - began >= 0.5


async def test_http_front_times_every_head_but_no_answer():
    async with front(head_timeout_s=0.3) as running:
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


@pytest.mark.parametrize("size", [1, 300, 5000])
@pytest.mark.parametrize("num_headers", [1, 40])
async def test_http_front_refuses_large_head_in_any_pieces(size, num_headers):
    async with front(max_header_bytes=1024) as running:
        client = await running.connect()
        await client.send(WHOLE % b"")
        assert await client.answer() == (200, b"ok")
        filler = b"x: %s\r\n" % (b"a" * (1040 // num_headers))
        head = b"GET / HTTP/1.1\r\nhost: x\r\n" + filler * num_headers + b"\r\n"
        status, error = await client.answer_to(head, size)
        assert (status, error["code"]) == (431, "headers_too_large")
        assert await client.is_closed()
        assert running.app.num_begun == 1


async def test_http_front_serves_head_at_its_limit():
    async with front(max_header_bytes=1024) as running:
        client = await running.connect()
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\nx: %s\r\n\r\n" % (b"a" * 980))
        assert await client.answer() == (200, b"ok")


async def test_http_front_refuses_large_trailers():
    async with front(max_header_bytes=1024) as running:
        client = await running.connect()
        await client.send(POST_ROOT + b"transfer-encoding: chunked\r\n\r\n0\r\n")
        await client.send(b"x: %s\r\n\r\n" % (b"a" * 2000))
        assert (await client.answer())[0] == 431


async def test_http_front_takes_no_header_from_trailers():
    async with front() as running:
        client = await running.connect()
        body = b"transfer-encoding: chunked\r\n\r\n0\r\nauthorization: x\r\n\r\n"
        await client.send(POST_ROOT + body)
        assert await client.answer() == (200, b"ok")
        assert running.app.headers == {b"host": b"x", b"transfer-encoding": b"chunked"}


CHUNKED = b"transfer-encoding: chunked\r\n"
NO_BODY = b"\r\n0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "request_bytes",
    {
        "length then chunked": POST_ROOT + b"content-length: 4\r\n" + CHUNKED + NO_BODY,
        "chunked then length": POST_ROOT + CHUNKED + b"content-length: 4\r\n" + NO_BODY,
        "two lengths": POST_ROOT + b"content-length: 4\r\ncontent-length: 5\r\n\r\nabcd",
        "one length twice": POST_ROOT + b"content-length: 4\r\ncontent-length: 4\r\n\r\nabcd",
        "list of lengths": POST_ROOT + b"content-length: 4, 4\r\n\r\nabcd",
        "length with sign": POST_ROOT + b"content-length: +4\r\n\r\nabcd",
        "empty length": POST_ROOT + b"content-length: \r\n\r\nabcd",
        "folded header": POST_ROOT + b"x: a\r\n b\r\n\r\n",
        "folded coding": POST_ROOT + b"transfer-encoding:\r\n chunked\r\n" + NO_BODY,
        "space before colon": POST_ROOT + b"content-length : 0\r\n\r\n",
        "bare line feed": POST_ROOT + b"x: a\ncontent-length: 0\r\n\r\n",
        "line feeds alone": b"POST / HTTP/1.1\nhost: x\n\n",
        "bare carriage return": POST_ROOT + b"x: a\rcontent-length: 0\r\n\r\n",
        "null": POST_ROOT + b"x: a\0b\r\n\r\n",
        "two codings": POST_ROOT + CHUNKED * 2 + NO_BODY,
        "list of codings": POST_ROOT + b"transfer-encoding: gzip, chunked\r\n" + NO_BODY,
        "unknown coding": POST_ROOT + b"transfer-encoding: xchunked\r\n" + NO_BODY,
        "chunked in HTTP/1.0": b"POST / HTTP/1.0\r\nhost: x\r\n" + CHUNKED + NO_BODY,
        "HTTP/2.0": b"POST / HTTP/2.0\r\nhost: x\r\n\r\n",
        "no version": b"GET /\r\n\r\n",
        "no host": b"GET / HTTP/1.1\r\n\r\n",
        "two hosts": POST_ROOT + b"host: y\r\n\r\n",
        "no path": b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    }.items(),
    ids=lambda case: case[0] if isinstance(case, tuple) else str(case),
)
async def test_http_front_refuses_ambiguous_request(request_bytes, size):
    async with front() as running:
        client = await running.connect()
        _, given = request_bytes
        status, error = await client.answer_to(given, size)
        assert (status, error["code"]) == (400, "invalid_http"), error
        assert await client.is_closed()
        assert running.app.num_begun == 0


@pytest.mark.parametrize("size", [1, 1000])
async def test_http_front_refuses_malformed_chunk(size):
    async with front() as running:
        client = await running.connect()
        given = (POST % b"body") + CHUNKED + b"\r\n4\r\nabcd\r\nzz\r\n"
        status, error = await client.answer_to(given, size)
        assert (status, error["code"]) == (400, "invalid_http"), error
        assert await client.is_closed()


async def test_http_front_closes_instead_of_serving_pipelined():
    async with front() as running:
        client = await running.connect()
        await client.send((WHOLE % b"slow") + (WHOLE % b"") * 100)
        await until(lambda: running.app.num_begun == 1, within=TIMEOUT)
        await client.send(b"\0")
        running.app.release.set()
        assert await client.answer() == (200, b"ok")
        assert await client.is_closed()
        assert running.app.num_begun == 1


async def test_http_front_reads_on_after_early_answer():
    async with front() as running:
        client = await running.connect()
        await client.send(POST_ROOT + b"content-length: 40000\r\n\r\n")
        assert await client.answer() == (200, b"ok")
        await client.send(b"a" * 40000 + (WHOLE % b""))
        assert await client.answer() == (200, b"ok")


@pytest.mark.parametrize("pieces", [1, 2])
async def test_http_front_serves_client_that_offers_upgrade(pieces):
    """As Java's client does with every request."""
    async with front() as running:
        client = await running.connect()
        for _ in range(2):
            head = (
                POST % b"body"
            ) + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 4\r\n\r\n"
            for piece in [head + b"abcd"] if pieces == 1 else [head, b"abcd"]:
                await client.send(piece)
                await asyncio.sleep(0.05)
            assert await client.answer() == (200, b"ok")
            assert running.app.body == b"abcd"
        assert running.app.num_begun == 2


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


async def dripping(running: Front, source: str) -> Client:
    """A client in the middle of a body that does not end."""
    client, num_begun = await running.connect(source=source), running.app.num_begun
    await client.send((POST % b"body") + b"content-length: 9\r\n\r\na")
    await until(lambda: running.app.num_begun == num_begun + 1, within=TIMEOUT)
    return client


async def test_http_body_that_drips_is_displaced_at_limit():
    async with front(max_connections=3) as running:
        slow = [await dripping(running, "127.0.0.1") for _ in range(3)]
        await slow[0].send(b"bcd")  # it sent last, and has waited for longest
        other = await running.connect()
        await other.send(WHOLE % b"")
        assert await other.answer() == (200, b"ok")
        status, error = await slow[0].answer()
        assert (status, error["code"]) == (503, "unavailable")
        assert "gave way" in error["message"]
        for client in slow[1:]:
            await client.send(b"bcdefghi")
            assert await client.answer() == (200, b"ok")


async def test_http_address_with_most_connections_is_displaced():
    async with front(max_connections=6) as running:
        idle = await running.connect(source="127.0.0.3")
        await idle.send(WHOLE % b"")
        assert await idle.answer() == (200, b"ok")
        slow = [await dripping(running, "127.0.0.2") for _ in range(12)]
        others = [await running.connect(source="127.0.0.4") for _ in range(2)]
        for other in (*others, idle):
            await other.send(WHOLE % b"")
            assert await other.answer() == (200, b"ok")
        for client in slow[:9]:
            assert (await client.answer())[0] == 503
        for client in slow[9:]:
            await client.send(b"bcdefghi")
            assert await client.answer() == (200, b"ok")


async def test_http_address_with_fewer_connections_keeps_them():
    async with front(max_connections=4) as running:
        busy = [await running.connect(source="127.0.0.2") for _ in range(3)]
        for client in busy:
            await client.send(WHOLE % b"slow")
        await until(lambda: running.app.num_begun == 3, within=TIMEOUT)
        idle = await running.connect(source="127.0.0.3")
        more = await running.connect(source="127.0.0.2")
        assert (await more.answer())[0] == 503
        await idle.send(WHOLE % b"")
        assert await idle.answer() == (200, b"ok")
        running.app.release.set()


async def test_http_front_logs_hang_up_mid_body_in_one_line(caplog):
    caplog.set_level(logging.INFO)
    async with front() as running:
        for _ in range(3):
            client = await running.connect()
            await client.send((POST % b"body") + b"content-length: 9\r\n\r\nabc")
            await until(lambda: running.app.num_begun == 1, within=TIMEOUT)
            running.app.num_begun = 0
            client.hang_up()
        hang_ups = "POST /body: the client disconnected"
        await until(lambda: caplog.messages.count(hang_ups) == 3, within=TIMEOUT)
    assert all(record.levelno == logging.INFO for record in caplog.records)
    assert not any(record.exc_info for record in caplog.records)


@pytest.fixture(scope="module")
def server_tls(tmp_path_factory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority()
    issued = authority.issue("router", hosts=["127.0.0.1"])
    files = {"ca.pem": authority.own.cert, "router.pem": issued.cert, "router.key": issued.key}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return Tls(folder / "ca.pem", folder / "router.pem", folder / "router.key")


async def test_http_front_times_out_tls_handshake(server_tls):
    async with front(server_tls, head_timeout_s=0.3) as running:
        silent = await running.connect(secured=False)
        begun = await running.connect(secured=False)
        await begun.send(b"\x16\x03\x01\x02\x00")
        assert await silent.is_closed()
        assert await begun.is_closed()
        served = await running.connect()
        await served.send(WHOLE % b"")
        assert await served.answer() == (200, b"ok")


async def test_http_front_drops_oldest_tls_handshake_at_limit(server_tls):
    async with front(server_tls, max_connections=3) as running:
        silent = [await running.connect(secured=False) for _ in range(3)]
        for _ in range(2):
            served = await running.connect()
            await served.send(WHOLE % b"")
            assert await served.answer() == (200, b"ok")
        assert await silent[0].is_closed()
        more = [await running.connect(secured=False) for _ in range(5)]
        for client in [*silent[1:], *more[:2]]:
            assert await client.is_closed()
        await more[-1].send(b"GET / HTTP/1.1\r\n\r\n")  # no handshake
        assert await more[-1].is_closed()


async def test_http_front_drops_tls_handshakes_when_it_stops(server_tls):
    async with front(server_tls) as running:
        silent = await running.connect(secured=False)
        served = await running.connect()
    assert await silent.is_closed()
    assert await served.is_closed()
