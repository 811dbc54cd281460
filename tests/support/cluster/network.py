"""A network between the processes of a cluster that can be cut, one way or both, and damaged.

Each worker tells the others an address behind which a proxy listens, and so does Redis. A proxy
knows by a connection's other end which process it comes from, so that a fault is that of one link:
what is between router and worker is told from what is between two workers. A cut is silence and no
end of a connection, as where packets are lost: bytes wait, and flow when it is over.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import psutil

from baton.cli.local_cluster import LocalCluster

# Where others are told to look; the processes themselves listen on 127.0.0.1.
HOST = "127.0.0.2"
REDIS = "redis"
_CHUNK = 2**16

Damage = Callable[[bytes], list[bytes] | None]
"""What becomes of one piece of a stream: the pieces in its place; None: the connection ends."""


@dataclass
class Way:
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
    """Between whoever connects (`there`) and whoever is connected to (`back` again)."""

    there: Way = field(default_factory=Way)
    back: Way = field(default_factory=Way)


class Network:
    """Use: made of a cluster that has not started, `with` it around all of the cluster's life.

    `in_place`: decode workers that may read blocks in the memory of the host; the others' blocks
    cross the network.
    """

    def __init__(self, cluster: LocalCluster, in_place: Collection[str] = ()) -> None:
        self._cluster = cluster
        self._links: dict[tuple[str, str], Link] = {}
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        assert cluster.redis is not None
        self._redis_port = int(cluster.redis_url.rpartition(":")[2].partition("/")[0])
        for process in cluster.processes:
            proxied = {"redis_url": f"redis://{HOST}:{self._redis_port}/0"}
            if process.role != "router":
                connector = "auto" if process.name in in_place else "grpc"
                proxied |= {"advertise_host": HOST, "kv_connector": connector}
            process._flags = {**process._flags, **proxied}

    def __enter__(self) -> "Network":
        self._thread.start()
        ports = {p.name: p.port for p in self._cluster.processes if p.role != "router"}
        for name, port in {**ports, REDIS: self._redis_port}.items():
            opening = self._listen(name, port)
            asyncio.run_coroutine_threadsafe(opening, self._loop).result(5.0)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    def link(self, there: str, back: str) -> Link:
        """Between two processes by name, the one that connects first; or Redis."""
        return self._links.setdefault((there, back), Link())

    def heal(self) -> None:
        """All faults are over."""
        for link in self._links.values():
            for way in (link.there, link.back):
                way.is_cut, way.delay, way.damage = False, 0.0, None

    @contextlib.contextmanager
    def cut(self, there: str, back: str, direction: str = "both") -> Iterator[None]:
        """Between the two, "there", "back" or "both" ways, for the length of the block."""
        link = self.link(there, back)
        link.there.is_cut = direction in ("there", "both")
        link.back.is_cut = direction in ("back", "both")
        try:
            yield
        finally:
            link.there.is_cut = link.back.is_cut = False

    # The proxies, in a thread of their own.

    async def _listen(self, name: str, port: int) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._relay(name, port, reader, writer)

        self._servers.append(await asyncio.start_server(serve, HOST, port))

    async def _relay(
        self, name: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        peer = writer.get_extra_info("peername")[1]
        owner = self._owner(peer)
        # The kernel's list may leave out an entry while it changes. Whoever finds no Redis tries
        # again and again, and has gone by now.
        if not owner and name != REDIS:
            await asyncio.sleep(0.02)
            owner = self._owner(peer)
        await relay(self.link(owner, name), reader, writer, port)

    def _owner(self, port: int) -> str:
        """The name of the process whose end of a connection has this port; "" for another."""
        for process in self._cluster.processes:
            with contextlib.suppress(psutil.Error, AssertionError):
                found = psutil.Process(process.pid).net_connections("tcp")
                if any(c.laddr and c.laddr.port == port for c in found):
                    return process.name
        return ""

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.1)  # connections close in turns of the loop that follow


async def relay(
    link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
) -> None:
    """Carries one connection on to a port of this host, until either end of it is gone."""
    try:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.transport.abort()
        return
    pumps = [
        asyncio.create_task(_pump(link.there, reader, there_writer)),
        asyncio.create_task(_pump(link.back, there_reader, writer)),
    ]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for end in (writer, there_writer):
            end.transport.abort()


async def _pump(way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := await reader.read(_CHUNK):
            await asyncio.sleep(way.delay)
            while way.is_cut:  # noqa: ASYNC110 - is set from another thread
                await asyncio.sleep(0.01)
            pieces = way.take(data)
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
