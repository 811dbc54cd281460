"""Cost of mutual TLS in a transfer of 256 MiB of KV between two processes: `bench transfer --tls`.

The same source twice, once with TLS and once without, asked in turns by the same claimant. Where
memory is read in place, TLS covers the stream that controls it and no block.
"""

import asyncio
import json
import tempfile
from pathlib import Path

import torch

from baton.cli import certs
from baton.cli.local.tls_folder import TlsFolder
from baton.rpc.tls import Tls
from baton.serving.grpc.channels import LARGE_FRAMES, Channels
from baton.worker.memory import keep_freed_memory
from baton_kvtransfer.client import KvFetcher
from baton_kvtransfer.connector import Integrity
from bench.child import Child
from bench.report import Row, medians
from bench.transfer.source import CLAIMANT, NUM_BYTES, connectors_of, fill, pairing_of, pool_of
from bench.transfer.transfer import SIZES, check, handoff

CONNECTORS: tuple[str, ...] = ("grpc", "shm")


def run(repeats: int) -> list[Row]:
    """GB/s with TLS, against without."""
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        certs.make(Path(folder), (), (), days=1)
        tls = TlsFolder(Path(folder))
        return [
            row
            for name, block_bytes in SIZES.items()
            for row in asyncio.run(_run(name, block_bytes, repeats, tls))
        ]


async def _run(name: str, block_bytes: int, repeats: int, tls: TlsFolder) -> list[Row]:
    torch.set_num_threads(1)
    keep_freed_memory()
    pool, expected = pool_of(block_bytes), pool_of(block_bytes)
    fill(expected)
    table = tuple(range(1, pool.num_blocks + 1))
    plain = Child("bench.transfer.source", str(block_bytes))
    secured = Child("bench.transfer.source", str(block_bytes), str(tls.path))
    channels = {
        "in the clear": (plain, Channels(options=LARGE_FRAMES)),
        "over TLS": (secured, _channels(tls.to_worker("worker"))),
    }
    rates: dict[str, list[float]] = {}
    endpoints = {how: json.loads(await child.read())[0] for how, (child, _) in channels.items()}
    connectors = connectors_of(pool)
    fetchers = {
        (connector, how): KvFetcher(
            [pool], pairing_of(pool), CLAIMANT, one, connectors, connector=connector
        )
        for connector in CONNECTORS
        for how, (_, one) in channels.items()
    }
    try:
        for turn in range(repeats + 1):  # the first warms up
            for (connector, how), fetcher in fetchers.items():
                seconds, report = await handoff(
                    channels[how][0],
                    endpoints[how],
                    fetcher,
                    pool,
                    table,
                    Integrity.BY_CONNECTOR,
                )
                assert report.connector == connector, report.reason
                check(pool, expected, table)
                rate = NUM_BYTES / seconds / 1e9
                rates.setdefault(f"{connector} {how}", []).extend([rate] if turn else [])
    finally:
        for fetcher in fetchers.values():
            fetcher.close()
        for each in connectors:
            await each.close()
        for child, one in channels.values():
            await one.close()
            await child.close()
    return [_row(connector, name, medians(rates)) for connector in CONNECTORS]


def _channels(tls: Tls) -> Channels:
    return Channels(tls=tls, options=LARGE_FRAMES)


def _row(connector: str, name: str, rates: dict[str, float]) -> Row:
    ours, other = f"{connector} over TLS", f"{connector} in the clear"
    ratio = rates[ours] / rates[other]
    return Row(f"{ours}, blocks of {name}", rates[ours], "GB/s", other, rates[other], ratio, None)
