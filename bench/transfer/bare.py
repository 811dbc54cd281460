"""gRPC as it comes, for `bench.transfer.transfer`: as many bytes between two processes, nothing of
ours.

Without arguments it serves, and prints its port. With a port it reads from there: a line on its
standard input is the size of a message, and the seconds that all of them took are printed.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

NUM_BYTES = 256 * 2**20
SERVICE, METHOD = "bare", "Pull"


async def fetch(request: bytes, _context: Any) -> AsyncIterator[bytes]:
    """Messages of the size that is asked for, always the same."""
    size = int(request)
    message = os.urandom(2**16) * (size // 2**16)
    for _ in range(NUM_BYTES // size):
        yield message


def add_to_server(server: Any) -> None:
    handlers: dict[str, Any] = {METHOD: grpc.unary_stream_rpc_method_handler(fetch)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


async def seconds(channel: grpc.aio.Channel, message_bytes: int) -> float:
    """To read all of it."""
    await channel.channel_ready()
    start, received = time.perf_counter(), 0
    call: Any = channel.unary_stream(f"/{SERVICE}/{METHOD}")
    async for message in call(b"%d" % message_bytes):
        received += len(message)
    assert received == NUM_BYTES
    return time.perf_counter() - start


async def _serve() -> None:
    server = grpc.aio.server()
    add_to_server(server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


async def _read(port: str) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(await seconds(channel, int(line)), flush=True)


if __name__ == "__main__":
    asyncio.run(_read(sys.argv[1]) if sys.argv[1:] else _serve())
