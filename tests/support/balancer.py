"""TCP load balancer: each new connection goes to the next ready target, as by a Service of
Kubernetes. Those that are open stay where they are."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

_CHUNK = 2**16


class Balancer:
    """Balancer over ports of 127.0.0.1.

    Attributes:
        ready: ports that get new connections.
        num_open: open connections, by port.
    """

    def __init__(self, ready: Sequence[int]) -> None:
        self.ready = list(ready)
        self.num_open: Counter[int] = Counter()
        self._numbers = itertools.count()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries one connection until both of its directions have ended."""
        target = self.ready[next(self._numbers) % len(self.ready)]
        self.num_open[target] += 1
        try:
            from_target, to_target = await asyncio.open_connection("127.0.0.1", target)
            await asyncio.gather(_pump(reader, to_target), _pump(from_target, writer))
        except OSError:
            writer.close()
        finally:
            self.num_open[target] -= 1


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def balanced(ready: Sequence[int]) -> AsyncIterator[tuple[Balancer, str]]:
    """Yields a balancer, and its address, "host:port"."""
    balancer = Balancer(ready)
    server = await asyncio.start_server(balancer.forward, "127.0.0.1", 0)
    async with server:
        yield balancer, "{}:{}".format(*server.sockets[0].getsockname())
