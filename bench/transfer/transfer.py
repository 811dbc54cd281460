"""Transfer of 256 MiB of KV between two processes, by every connector.

The source's blocks lie anywhere in its pool, as in one that has been in use; the claimant's follow
each other, and in one case lie anywhere too. Timed is a whole fetch, from its first call to the
confirmation, into memory that has been written before. It is compared with moving the same bytes
without any request: one memcpy within this process into shared memory, one TCP socket, and
messages of the same size over bare grpc.aio, between processes of its own as they come, and with
the channel options and the allocator of ours; and, where it is installed, with one read of the same
blocks by NIXL alone.
"""

import asyncio
import json
import random
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

import grpc
import numpy as np
import torch

from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.scheduler.plan import ExternalAllocation
from baton.serving.grpc.channels import LARGE_FRAMES, Channels
from baton.worker.memory import keep_freed_memory
from baton_kvtransfer.client import KvFetcher
from baton_kvtransfer.connector import Integrity
from baton_kvtransfer.connectors.grpc.connector import MESSAGE_BYTES
from baton_kvtransfer.connectors.nixl.agent import is_installed
from baton_kvtransfer.lease.handle import Handle, TransferReport
from bench.child import Child
from bench.report import Row, medians
from bench.transfer import bare as transfer_bare
from bench.transfer.nixl import BareReader
from bench.transfer.source import (
    BLOCK_SIZE,
    CLAIMANT,
    EPOCH,
    NUM_BYTES,
    connectors_of,
    fill,
    pairing_of,
    pool_of,
    source_blocks,
)

SIZES = {"1 MiB": 2**20, "64 KiB": 2**16}
MEMCPY, SOCKET = "memcpy into shared memory", "a raw socket"
BARE, BARE_TUNED = "bare grpc.aio", "bare grpc.aio, tuned as ours"
SHM, SHM_CHECKED = "shm, fenced", "shm, with checksums"
SHM_SCATTERED, GRPC = "shm, scattered on both sides", "grpc, with checksums"
NIXL, NIXL_CHECKED = "nixl, fenced", "nixl, with checksums"
BARE_NIXL = "bare nixl"
_AIMS: list[tuple[str, str, float | None]] = [
    (SHM, MEMCPY, 0.8),
    (SHM_SCATTERED, MEMCPY, None),
    (SHM_CHECKED, MEMCPY, 0.5),
    (GRPC, BARE, 0.9),
    (GRPC, BARE_TUNED, None),
    (GRPC, SOCKET, None),
    (SOCKET, MEMCPY, None),
]
_NIXL_AIMS: list[tuple[str, str, float | None]] = [
    (SHM, NIXL, 1.5),
    (SHM, BARE_NIXL, 1.5),
    (SHM_CHECKED, NIXL_CHECKED, None),
    (NIXL, BARE_NIXL, None),
    (NIXL_CHECKED, BARE_NIXL, None),
    (BARE_NIXL, MEMCPY, None),
]

Measure = Callable[[], Awaitable[float]]


def run(repeats: int) -> list[Row]:
    """GB/s of each connector, for large blocks and small ones."""
    return [
        row
        for name, block_bytes in SIZES.items()
        for row in asyncio.run(_run(name, block_bytes, repeats))
    ]


async def _run(name: str, block_bytes: int, repeats: int) -> list[Row]:
    torch.set_num_threads(1)
    keep_freed_memory()
    async with _Claimant(block_bytes) as claimant:
        contenders: dict[str, Measure] = {
            MEMCPY: claimant.memcpy,
            SOCKET: claimant.raw_socket,
            BARE: claimant.bare,
            BARE_TUNED: claimant.bare_tuned,
            SHM: lambda: claimant.fetch("shm", Integrity.FENCE),
            SHM_SCATTERED: lambda: claimant.fetch("shm", Integrity.FENCE, scattered=True),
            SHM_CHECKED: lambda: claimant.fetch("shm", Integrity.CHECKSUMS),
            GRPC: lambda: claimant.fetch("grpc", Integrity.CHECKSUMS),
        }
        if is_installed():
            contenders |= {
                BARE_NIXL: claimant.bare_nixl,
                NIXL: lambda: claimant.fetch("nixl", Integrity.FENCE),
                NIXL_CHECKED: lambda: claimant.fetch("nixl", Integrity.CHECKSUMS),
            }
        figures: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(repeats + 1):  # the first warms up
            for case, measure in contenders.items():
                rate = NUM_BYTES / await measure() / 1e9
                figures[case] += [rate] if turn else []
    rates = medians(figures)
    return [
        Row(
            f"{case}, blocks of {name}",
            rates[case],
            "GB/s",
            other,
            rates[other],
            rates[case] / rates[other],
            aim,
        )
        for case, other, aim in _AIMS + (_NIXL_AIMS if is_installed() else [])
    ]


class _Claimant:
    """This process: a pool to fetch into, and all that is compared. Starts the other process."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._pool = pool_of(block_bytes)
        self._expected = pool_of(block_bytes)
        fill(self._expected)
        self._private = _bytes_of(self._expected).copy()
        self._channels = Channels(options=LARGE_FRAMES)
        self._connectors = connectors_of(self._pool)
        self._fetchers = {c: self._fetcher(c) for c in ("shm", "grpc", "nixl")}

    def _fetcher(self, connector: str) -> KvFetcher:
        pairing = pairing_of(self._pool)
        return KvFetcher(
            [self._pool],
            pairing,
            CLAIMANT,
            self._channels,
            self._connectors,
            connector=connector,
        )

    async def __aenter__(self) -> Self:
        self._source = Child("bench.transfer.source", str(self._block_bytes))
        self._bare_server = Child("bench.transfer.bare")
        self._bare_reader = Child("bench.transfer.bare", await self._bare_server.read())
        self._endpoint, raw_port = json.loads(await self._source.read())
        self._raw = socket.create_connection(("127.0.0.1", raw_port))
        self._nixl: tuple[Child, BareReader] | None = None
        if is_installed():
            child = Child("bench.transfer.nixl")
            memory = _bytes_of(self._pool)
            self._nixl = child, BareReader(memory, self._block_bytes, await child.read())
        return self

    async def __aexit__(self, *_: object) -> None:
        for fetcher in self._fetchers.values():
            fetcher.close()
        for connector in self._connectors:
            await connector.close()
        await self._channels.close()
        self._raw.close()
        if self._nixl is not None:
            await self._nixl[0].close()
        for child in (self._bare_reader, self._bare_server, self._source):
            await child.close()

    async def fetch(
        self, connector: str, integrity: Integrity, *, scattered: bool = False
    ) -> float:
        """Seconds of one handoff, whose content is compared afterwards."""
        table = tuple(range(1, self._pool.num_blocks + 1))
        if scattered:
            table = tuple(random.Random(1).sample(table, len(table)))
        fetcher = self._fetchers[connector]
        seconds, report = await handoff(
            self._source, self._endpoint, fetcher, self._pool, table, integrity
        )
        assert report.connector == connector, report.reason
        check(self._pool, self._expected, table)
        return seconds

    async def memcpy(self) -> float:
        source, target = self._private, _bytes_of(self._pool)
        start = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - start

    async def raw_socket(self) -> float:
        content: Any = _bytes_of(self._pool)
        target = memoryview(content)

        def receive() -> float:
            start, received = time.perf_counter(), 0
            self._raw.sendall(b"x")
            while received < NUM_BYTES:
                received += self._raw.recv_into(target[received:])
            return time.perf_counter() - start

        return await asyncio.to_thread(receive)

    async def bare_nixl(self) -> float:
        assert self._nixl is not None
        return await asyncio.to_thread(self._nixl[1].seconds)

    async def bare(self) -> float:
        return float(await self._bare_reader.ask(str(MESSAGE_BYTES)))

    async def bare_tuned(self) -> float:
        endpoint = self._endpoint
        async with grpc.aio.insecure_channel(endpoint, options=LARGE_FRAMES) as channel:
            return await transfer_bare.seconds(channel, MESSAGE_BYTES)


async def handoff(
    source: Child,
    endpoint: str,
    fetcher: KvFetcher,
    pool: KvPool,
    table: tuple[int, ...],
    integrity: Integrity,
) -> tuple[float, TransferReport]:
    """Seconds of one, into the blocks of `table`, and what is said of it."""
    lease_id = secrets.token_bytes(16)
    assert await source.ask(lease_id.hex()) == "ready"
    handle = Handle(
        source_worker="prefill",
        source_endpoint=endpoint,
        source_epoch=EPOCH,
        lease_id=lease_id,
        pairing=pairing_of(pool),
        num_tokens=len(table) * BLOCK_SIZE,
        block_hashes=(),
        integrity=integrity,
    )
    start = time.perf_counter()
    _, report = await fetcher.fetch(handle, ExternalAllocation("bench", (table,), 0), timeout=60.0)
    seconds = time.perf_counter() - start
    assert report.num_bytes == NUM_BYTES
    return seconds, report


def check(pool: KvPool, expected: KvPool, table: tuple[int, ...]) -> None:
    """Checks that the blocks of `table` hold what the source was filled with."""
    sent = source_blocks(pool.num_blocks)
    for there, here in zip(sent[::16], table[::16], strict=True):
        assert pool.read_block(here) == expected.read_block(there), "other bytes"


def _bytes_of(pool: KvPool) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Returns the bytes of all blocks but the null block."""
    assert pool.shared is not None
    content: np.ndarray[tuple[int], np.dtype[np.uint8]] = pool.shared.content.numpy()
    return content[pool.layout.block_bytes :]
