import asyncio
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from baton.errors import FailedPreconditionError
from baton.serving.telemetry.scrape_server import (
    MAX_CONNECTIONS,
    MAX_REQUEST_BYTES,
    Render,
    ScrapeServer,
)
from tests.support.waiting import until

HOST = "127.0.0.1"
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


def told(accept: str) -> tuple[bytes, str]:
    return f"for {accept}\n".encode(), "text/plain"


def other(_accept: str) -> tuple[bytes, str]:
    return b"[]", "application/json"


@asynccontextmanager
async def scraped(render: Render = told, **settings: Any) -> AsyncIterator[ScrapeServer]:
    server = ScrapeServer({"/metrics": render, "/other": other}, HOST, 0, **settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def connect(server: ScrapeServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(HOST, server.port)


async def asked(server: ScrapeServer, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer."""
    reader, writer = await connect(server)
    writer.write(request)
    async with asyncio.timeout(10.0):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


async def test_scrape_server_serves_metrics_and_other_pages():
    async with scraped() as server:

        def read(path: str) -> tuple[bytes, str]:
            request = urllib.request.Request(
                f"http://{HOST}:{server.port}{path}", headers={"Accept": "all/things"}
            )
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.read(), response.headers["Content-Type"]

        assert await asyncio.to_thread(read, "/metrics") == (b"for all/things\n", "text/plain")
        assert await asyncio.to_thread(read, "/other") == (b"[]", "application/json")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET / HTTP/1.1", b"404 Not Found"),
        (b"GET /metricsx HTTP/1.1", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1", b"405 Method Not Allowed"),
        (b"\xff\x00", b"404 Not Found"),
        (b"GET /metrics?name=x HTTP/1.0", b"200 OK"),
    ],
)
async def test_scrape_server_refuses_other_paths_and_methods(line, status):
    async with scraped() as server:
        head, _ = await asked(server, line + b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)


async def test_scrape_server_reports_health_check_by_status():
    said = {"/well": True, "/ill": False}
    checks = {path: partial(said.get, path) for path in said}
    async with scraped(checks=checks) as server:
        for path, status in (("/well", b"200 OK"), ("/ill", b"503 Service Unavailable")):
            head, body = await asked(server, f"GET {path} HTTP/1.1\r\n\r\n".encode())
            assert head.startswith(b"HTTP/1.1 " + status)
            assert body == status + b"\n"
        said["/ill"] = True
        head, body = await asked(server, b"HEAD /ill HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert body == b""
        head, _ = await asked(server, b"POST /well HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 405")


async def test_scrape_server_answers_head_without_body():
    async with scraped() as server:
        head, body = await asked(server, GET.replace(b"GET", b"HEAD"))
        assert b"Content-Length: 5" in head
        assert body == b""


async def test_scrape_server_survives_failing_collector(caplog):
    def fails(_accept: str) -> tuple[bytes, str]:
        raise ValueError("no")

    async with scraped(fails) as server:
        for _ in range(2):
            head, _ = await asked(server, GET)
            assert head.startswith(b"HTTP/1.1 500")
    assert "could not be rendered" in caplog.text


async def test_scrape_server_names_flag_when_port_is_taken():
    async with scraped() as server:
        port = server.port
        with pytest.raises(FailedPreconditionError) as caught:
            await ScrapeServer({}, HOST, port).start()
    assert str(caught.value) == (
        f"port {port} on 127.0.0.1 is taken; choose another with --metrics-port"
    )


@pytest.mark.parametrize("says", [b"", b"GET /metrics", GET], ids=["nothing", "half", "all"])
async def test_scrape_server_stays_reachable_beside_idle_clients(says):
    # More than the kernel holds, so that an answer stays here until it is read.
    body = b"x" * (16 * 2**20)
    async with scraped(lambda _: (body, "text/plain")) as server:
        lazy = []
        for _ in range(5 * MAX_CONNECTIONS):
            reader, writer = await connect(server)
            writer.write(says)
            lazy.append((reader, writer))
            await asyncio.sleep(0)
            assert server.num_connections <= MAX_CONNECTIONS
        _, answer = await asked(server, GET)
        assert answer == body
        assert server.num_connections <= MAX_CONNECTIONS
        for _, writer in lazy:
            writer.transport.abort()


async def test_scrape_server_drops_slow_client():
    body = b"x" * (16 * 2**20)
    async with scraped(lambda _: (body, "text/plain"), exchange_seconds=0.05) as server:
        _, writer = await connect(server)
        writer.write(GET)
        await until(lambda: server.num_connections)
        await until(lambda: not server.num_connections)
        writer.transport.abort()


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["a request", "behind a request"])
async def test_scrape_server_drops_client_that_sends_too_much(end):
    async with scraped() as server:
        reader, writer = await connect(server)
        writer.write((GET if end else b"") + b"x" * (4 * MAX_REQUEST_BYTES))
        writer.write_eof()
        async with asyncio.timeout(10.0):
            answer = b""
            with suppress(ConnectionResetError):
                answer = await reader.read()
            await until(lambda: not server.num_connections)
        assert answer == b"" or end
        writer.close()


async def test_scrape_server_aborts_open_exchanges_when_stopped():
    async with scraped() as server:
        reader, writer = await connect(server)
        writer.write(b"GET")
        await until(lambda: server.num_connections)
        await server.stop()
        assert not server.num_connections
        with pytest.raises(OSError):
            await connect(server)
        writer.transport.abort()
        del reader
