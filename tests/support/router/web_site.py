"""Web server on loopback whose paths have scripted answers."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

BODY = b"an image"

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def whole(status: str, body: bytes = b"", *headers: str) -> Answer:
    async def write(writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + body)

    return write


def redirect(location: str) -> Answer:
    return whole("302 Found", b"", f"location: {location}")


class Site:
    """Web server.

    Attributes:
        answers: what each path is answered with.
        heads: the requests that were read.
        num_connections: connections that were opened, with TLS after the handshake.
    """

    def __init__(self, scheme: str) -> None:
        self.answers: dict[str, Answer] = {"/a.png": whole("200 OK", BODY)}
        self.heads: list[str] = []
        self.num_connections = 0
        self.port = 0
        self._scheme = scheme

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"{self._scheme}://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            await self.answers[head.split()[1]](writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def running(
    host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Site]:
    site = Site("http" if tls is None else "https")
    tasks = set()

    def start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        site.num_connections += 1
        tasks.add(asyncio.create_task(site.serve(reader, writer)))

    server = await asyncio.start_server(start, host, port, ssl=tls)
    site.port = server.sockets[0].getsockname()[1]
    try:
        yield site
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
