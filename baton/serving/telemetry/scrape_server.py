"""HTTP server for a process's metrics and health checks, bounded against slow clients.

The number of connections is limited, and for each of them the bytes of its request, one answer, and
the seconds for both. A new connection replaces the oldest one, so that clients that read nothing
cannot keep others out. Runs on the event loop of the process, whose state it reports, and never
waits for a client.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

from baton.serving.listening import listen

MAX_CONNECTIONS = 8
MAX_REQUEST_BYTES = 8192
EXCHANGE_SECONDS = 5.0

Render = Callable[[str], tuple[bytes, str]]
"""Page renderer: returns body and content type for a client's Accept header."""

Check = Callable[[], bool]
"""Health check: returns True if healthy."""

_BACKLOG = 16

logger = logging.getLogger(__name__)


class ScrapeServer:
    """HTTP server for GET requests, one per connection."""

    def __init__(
        self,
        pages: Mapping[str, Render],
        host: str,
        port: int,
        *,
        checks: Mapping[str, Check] = MappingProxyType({}),
        exchange_seconds: float = EXCHANGE_SECONDS,
    ) -> None:
        """Serves `pages` and `checks` by their paths; a check is answered with 200 or 503, as
        Kubernetes' probes expect. `port` 0 takes any free one."""
        self._pages = dict(pages)
        self._checks = checks
        self._host = host
        self._port = port
        self._exchange_seconds = exchange_seconds
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Port that the server listens on. Valid after `start`."""
        return self._port

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def add(self, pages: Mapping[str, Render]) -> None:
        """Adds pages, by path."""
        self._pages |= pages

    async def start(self) -> int:
        """Listens and returns the port. Raises `FailedPreconditionError` if it cannot."""
        listening = listen(self._host, self._port, "--metrics-port", _BACKLOG)
        self._port = listening.getsockname()[1]
        self._server = await asyncio.start_server(
            self._accept, sock=listening, limit=MAX_REQUEST_BYTES, backlog=_BACKLOG
        )
        return self._port

    async def stop(self) -> None:
        """Stops listening, and aborts open connections. Idempotent."""
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
        while await reader.read(MAX_REQUEST_BYTES):  # to the end: the client has all by then
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
            logger.exception("%s could not be rendered", path)
            return _response("500 Internal Server Error", b"see the log of this process\n")
        return _response("200 OK", body, content_type, is_head=is_head)


def _parsed(head: bytes) -> tuple[str, str, Mapping[str, str]]:
    """Returns method, path and headers; empty if missing."""
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
