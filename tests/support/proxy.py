"""TCP proxy whose connections can be cut, one way or both, delayed and damaged.

A cut is silence and not the end of a connection, as where packets are lost: bytes wait, and flow
again when the cut ends.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

_CHUNK = 2**16

Damage = Callable[[bytes], list[bytes] | None]
"""What becomes of one piece of a stream: the pieces in its place; None: the connection ends."""


@dataclass
class Pipe:
    """One direction of a link.

    Attributes:
        is_cut: nothing comes through.
        delay: seconds that every piece takes.
        damage: applied to each piece.
        num_damaged: how many pieces were not left as they were.
    """

    is_cut: bool = False
    delay: float = 0.0
    damage: Damage | None = None
    num_damaged: int = 0

    def take(self, data: bytes) -> list[bytes] | None:
        if self.damage is None:
            return [data]
        pieces = self.damage(data)
        self.num_damaged += pieces != [data]
        return pieces


@dataclass
class Link:
    """Connection from a client to its server (`there`), and `back` again."""

    there: Pipe = field(default_factory=Pipe)
    back: Pipe = field(default_factory=Pipe)


class Proxy:
    """TCP proxy in front of a port of 127.0.0.1: carries each connection until either end is gone.

    Use: `async with`; at its end all connections are closed.
    """

    def __init__(self, port: int, link_of: Callable[[int], Awaitable[Link]]) -> None:
        """`link_of`: the link of a connection, by the port from which it comes."""
        self._target_port = port
        self._link_of = link_of
        self._connections: dict[asyncio.Task[None], socket.socket] = {}
        self._listener: socket.socket

    @classmethod
    def on(cls, link: Link, port: int) -> Self:
        """One link for all connections."""

        async def link_of(_port: int) -> Link:
            return link

        return cls(port, link_of)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def open(self, host: str = "127.0.0.1", port: int = 0) -> None:
        # Not by asyncio.start_server, which leaves a socket open that is accepted as it closes.
        self._listener = socket.create_server((host, port))
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        connections = dict(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        for connection in connections.values():
            connection.close()  # of a task that was canceled before its first step
        await asyncio.sleep(0.0)  # aborted transports close in the loop's next iteration

    def drop_connections(self) -> None:
        """Ends all connections of now; new ones are accepted."""
        for task in self._connections:
            task.cancel()

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _accept(self) -> None:
        connection, (_, port) = self._listener.accept()
        connection.setblocking(False)
        task = asyncio.create_task(self._forward(connection, port))
        self._connections[task] = connection
        task.add_done_callback(self._connections.pop)

    async def _forward(self, connection: socket.socket, port: int) -> None:
        link = await self._link_of(port)
        reader, writer = await asyncio.open_connection(sock=connection)
        ends, pumps = [writer], []
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target_port)
            ends.append(there[1])
            pumps = [
                asyncio.create_task(_pump(link.there, reader, there[1])),
                asyncio.create_task(_pump(link.back, there[0], writer)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            return  # nothing listens there
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in ends:
                end.transport.abort()


async def _pump(pipe: Pipe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := await reader.read(_CHUNK):
            await asyncio.sleep(pipe.delay)
            while pipe.is_cut:  # noqa: ASYNC110 - is set from another thread
                await asyncio.sleep(0.01)
            pieces = pipe.take(data)
            if pieces is None:
                return
            for piece in pieces:
                writer.write(piece)
                await writer.drain()


# Damages of large pieces, which are those with blocks in them.

_LARGE = 2**12


def once(damage: Damage) -> Damage:
    """The damage of the first large piece alone."""
    is_done = False

    def take(data: bytes) -> list[bytes] | None:
        nonlocal is_done
        if is_done or len(data) < _LARGE:
            return [data]
        is_done = True
        return damage(data)

    return take


def corrupted(data: bytes) -> list[bytes]:
    middle = len(data) // 2
    return [data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]]


def truncated(data: bytes) -> list[bytes]:
    return [data[: len(data) // 2]]


def reordered(data: bytes) -> list[bytes]:
    middle = len(data) // 2
    return [data[middle:], data[:middle]]


def duplicated(data: bytes) -> list[bytes]:
    return [data, data]


def ended(_data: bytes) -> None:
    return None
