"""Serves a process's metrics and its health over HTTP, to whoever comes and however slowly they
read.

What it holds is bounded: so many connections, each with a request of so many bytes, an answer, and
so many seconds for both. A new connection takes the place of the oldest one, so that those who read
nothing cannot keep others out. Runs on the event loop of the process, whose state it is told, and
waits for nobody.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

from baton.serving.listening import cannot_listen

MAX_CONNECTIONS = 8
MAX_REQUEST_BYTES = 8192
EXCHANGE_SECONDS = 5.0

Render = Callable[[str], tuple[bytes, str]]
"""What to answer to who accepts this: the body and its content type."""

Check = Callable[[], bool]
"""Whether something is as it should be."""

_BACKLOG = 16

logger = logging.getLogger(__name__)


class ScrapeServer:
    """Some pages to GET, one request a connection."""

    def __init__(
        self,
        pages: Mapping[str, Render],
        host: str,
        port: int,
        *,
        checks: Mapping[str, Check] = MappingProxyType({}),
        exchange_seconds: float = EXCHANGE_SECONDS,
    ) -> None:
        """`pages` and `checks` are named by their paths; a check is answered with 200 or 503, as
        Kubernetes' probes want it. `port` 0 takes any free one."""
        self._pages = dict(pages)
        self._checks = checks
        self._host = host
        self._port = port
        self._exchange_seconds = exchange_seconds
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_connections(self) -> int:
        return len(self._open)

    @property
    def port(self) -> int:
        """Where it listens. Valid after `start`."""
        return self._port

    def add(self, pages: Mapping[str, Render]) -> None:
        """Serves further pages, by path."""
        self._pages |= pages

    async def start(self) -> int:
        """Listens and returns the port. Raises `FailedPreconditionError` where it cannot."""
        try:
            self._server = await asyncio.start_server(
                self._accept, self._host, self._port, limit=MAX_REQUEST_BYTES, backlog=_BACKLOG
            )
        except OSError as error:
            raise cannot_listen(self._host, self._port, "--metrics-port", error) from error
        self._port = self._server.sockets[0].getsockname()[1]
        return self._port

    async def stop(self) -> None:
        """Listens no more, and breaks off what is being answered. Idempotent."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._open):
            writer.transport.abort()
        await asyncio.gather(*self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(self._exchange_seconds):
                await self._exchange(reader, writer)
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError) as error:
            logger.debug("no metrics for %s: %r", writer.get_extra_info("peername"), error)
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request, and waits until its answer has left this process."""
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(self._answer(head))
        writer.write_eof()
        writer.transport.set_write_buffer_limits(0)
        await writer.drain()
        while await reader.read(MAX_REQUEST_BYTES):  # to the end: the peer has got all by then
            pass

    def _answer(self, head: bytes) -> bytes:
        method, path, headers = _parsed(head)
        page = path.partition("?")[0]
        render, check = self._pages.get(page), self._checks.get(page)
        if render is None and check is None:
            there = ", ".join([*self._pages, *self._checks])
            return _response("404 Not Found", f"there is {there}\n".encode())
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", b"to be read with GET\n")
        is_head = method == "HEAD"
        if render is None:
            assert check is not None
            status = "200 OK" if check() else "503 Service Unavailable"
            return _response(status, f"{status}\n".encode(), is_head=is_head)
        try:
            body, content_type = render(headers.get("accept", ""))
        except Exception:
            logger.exception("%s could not be told", path)
            return _response("500 Internal Server Error", b"see the log of this process\n")
        return _response("200 OK", body, content_type, is_head=is_head)


def _parsed(head: bytes) -> tuple[str, str, Mapping[str, str]]:
    """Method, path and headers; empty for what is not there."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return method, rest.partition(" ")[0], headers


def _response(
    status: str,
    body: bytes,
    content_type: str = "text/plain; charset=utf-8",
    *,
    is_head: bool = False,
) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if is_head else body)
