"""A network between the processes of a cluster that can be cut, one way or both, and damaged.

Each worker tells the others an address behind which a proxy listens, and so does Redis. A proxy
knows by a connection's other end which process it comes from, so that a fault is that of one link:
what is between router and worker is told from what is between two workers.
"""

import asyncio
import contextlib
import re
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

from baton.cli.local.local_cluster import LocalCluster
from tests.support.proxy import Link, Proxy

# Where others are told to look; the processes themselves listen on 127.0.0.1.
HOST = "127.0.0.2"
REDIS = "redis"


class Network:
    """Use: made of a cluster that has not started, `with` it around all of the cluster's life.

    `in_place`: decode workers that may read blocks in the memory of the host; the others' blocks
    cross the network.
    """

    def __init__(self, cluster: LocalCluster, in_place: Collection[str] = ()) -> None:
        self._cluster = cluster
        self._links: dict[tuple[str, str], Link] = {}
        self._proxies: list[Proxy] = []
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
            for pipe in (link.there, link.back):
                pipe.is_cut, pipe.delay, pipe.damage = False, 0.0, None

    @contextlib.contextmanager
    def partition(self, there: str, back: str, direction: str = "both") -> Iterator[None]:
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
        async def link_of(peer: int) -> Link:
            owner = self._owner(peer, port)
            # The kernel's list may leave out an entry while it changes. A process that finds no
            # Redis tries again and again, and has gone by now.
            if not owner and name != REDIS:
                await asyncio.sleep(0.02)
                owner = self._owner(peer, port)
            return self.link(owner, name)

        proxy = Proxy(port, link_of)
        proxy.open(HOST, port)
        self._proxies.append(proxy)

    def _owner(self, port: int, proxy_port: int) -> str:
        """The name of the process that is connected from `port` to a proxy; "" for another.

        Reads the kernel's lists once, and not once for each process: workers that come back open
        dozens of connections together.
        """
        inode = _inode_of(port, proxy_port)
        for process in self._cluster.processes if inode else []:
            with contextlib.suppress(OSError, AssertionError):
                for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                    with contextlib.suppress(OSError):  # closed meanwhile
                        if str(descriptor.readlink()) == f"socket:[{inode}]":
                            return process.name
        return ""

    async def _close(self) -> None:
        await asyncio.gather(*(proxy.close() for proxy in self._proxies))


def _inode_of(port: int, proxy_port: int) -> str:
    """Returns the socket that is connected from `port` to a proxy; "" if none is."""
    # Both ends: connections of other processes to other addresses may have the same port. The
    # sockets of gRPC are of IPv6, with the same addresses at the end of longer ones.
    ends = re.compile(f"0100007F:{port:04X} [0-9A-F]*0200007F:{proxy_port:04X} ")
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines():
            if ends.search(line):
                return line.split()[9]
    return ""
