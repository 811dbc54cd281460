"""The other process of `bench.transfer.transfer`: what hands 256 MiB over, in every way that is
compared.

It says where it listens, as one line of JSON, and serves until its standard input ends. A line of
it is a lease id in hexadecimal: a prompt is computed, and its blocks wait. Its arguments are the
bytes of a block and, for TLS, a folder of certificates.
"""

import asyncio
import json
import os
import random
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import torch

from baton.cli.local.tls_folder import TlsFolder
from baton.engine.executor.cache.kv_layout import KvShape, plan_layout, pool_bytes
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.cache.shared_memory import SharedMemory
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.version import version
from baton.worker.memory import keep_freed_memory
from baton.worker.pairing import Pairing
from baton_kvtransfer.connector import Connector
from baton_kvtransfer.connectors.grpc.connector import GrpcConnector
from baton_kvtransfer.connectors.nixl.connector import NixlConnector
from baton_kvtransfer.connectors.shm.connector import ShmConnector
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.handle import FirstToken
from baton_kvtransfer.lease.lease import Claim
from baton_kvtransfer.lease.table import LeaseTable
from baton_kvtransfer.offers import Offers
from baton_kvtransfer.service import KvTransferService, ServedPools, add_to_server
from bench.transfer import bare as transfer_bare

NUM_BYTES = transfer_bare.NUM_BYTES
BLOCK_SIZE = 16
CLAIMANT = "decode"
EPOCH = 1
_HEADS = KvShape(8, 64, 64)


def pool_of(block_bytes: int) -> KvPool:
    """A shared pool of just so many bytes."""
    per_layer = BLOCK_SIZE * _HEADS.num_kv_heads * 128 * 4
    layout = plan_layout([_HEADS] * (block_bytes // per_layer), torch.float32, BLOCK_SIZE)
    assert layout.block_bytes == block_bytes
    num_blocks = NUM_BYTES // block_bytes
    memory = SharedMemory.allocate("bench", pool_bytes(layout, num_blocks))
    return KvPool(layout, num_blocks, torch.device("cpu"), memory)


def connectors_of(pool: KvPool) -> list[Connector]:
    """Returns the connectors that are compared."""
    return [ShmConnector([pool]), NixlConnector([pool], "lo"), GrpcConnector()]


def pairing_of(pool: KvPool) -> Pairing:
    return Pairing(version(), b"bench", (pool.layout,))


def source_blocks(num_blocks: int) -> tuple[int, ...]:
    """Returns a prompt's block ids in a used pool: in random order."""
    return tuple(random.Random(0).sample(range(1, num_blocks + 1), num_blocks))


def fill(pool: KvPool) -> None:
    """The same content wherever it is called."""
    words = np.arange(pool.layout.block_bytes // 8, dtype=np.int64)
    for block in range(1, pool.num_blocks + 1):
        pool.write_block(block, (words + block * 1_000_003).tobytes())


async def _keep(table: LeaseTable, lease_id: bytes, pool: KvPool) -> None:
    num_tokens = pool.num_blocks * BLOCK_SIZE
    with table.open(Claim(lease_id, CLAIMANT), BlockRange(num_tokens, BLOCK_SIZE)) as lease:
        lease.advance((source_blocks(pool.num_blocks),), pool.num_blocks)
        lease.complete(FirstToken(0, 1), lambda: None)
        await lease.over()


def _serve_raw(listener: socket.socket) -> None:
    """Sends the same bytes to each client that connects; runs in a thread."""
    content = memoryview(bytes(4 * 2**20))
    while True:
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1):
                for _ in range(NUM_BYTES // len(content)):
                    connection.sendall(content)


async def main(block_bytes: int, tls: TlsFolder | None) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    pool = pool_of(block_bytes)
    fill(pool)
    table = LeaseTable()
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    loop.run_in_executor(None, _serve_raw, listener)
    async with AsyncExitStack() as stack:
        connectors = connectors_of(pool)
        for connector in connectors:
            stack.push_async_callback(connector.close)
        offers = Offers(connectors)
        await offers.open()
        served = ServedPools([pool], pairing_of(pool), EPOCH, offers)
        own = {} if tls is None else tls.own("worker")
        server = Server(ServingSettings.model_validate({n: str(path) for n, path in own.items()}))
        server.add(add_to_server, KvTransferService(table, lambda: served))
        server.add(lambda _, to: transfer_bare.add_to_server(to), None)
        await server.start()
        print(json.dumps([server.endpoint, listener.getsockname()[1]]), flush=True)
        tasks = set()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            tasks.add(asyncio.create_task(_keep(table, bytes.fromhex(line.strip()), pool)))
            print("ready", flush=True)
        os._exit(0)  # the thread of the raw socket waits for one more reader


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), TlsFolder(Path(sys.argv[2])) if sys.argv[2:] else None))
