"""A lease table and its service behind a real server on a loopback port, and pools to move between.

The side that computes is played by the test: it opens leases and advances them.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch

from baton.engine.core.plan import ExternalAllocation
from baton.engine.kv_pool import KvLayout, KvPool, KvShape, plan_layout
from baton.serving.channels import Channels
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.v1.kv_transfer_pb2_grpc import add_KvTransferServicer_to_server
from kvtransfer.client import KvFetcher
from kvtransfer.handle import Handle, Pairing
from kvtransfer.lease import LeaseTable
from kvtransfer.service import KvTransferService, ServedPool

EPOCH = 7
CLAIMANT = "decode-0"
LEASE = bytes(range(16))
LAYOUT = plan_layout([KvShape(2, 8, 8), KvShape(2, 8, 8)], torch.float32, block_size=4)
PAIRING = Pairing(b"model-a!", LAYOUT)


def pool_of(num_blocks: int, layout: KvLayout = LAYOUT) -> KvPool:
    """A pool of zeros."""
    return KvPool(layout, num_blocks, torch.device("cpu"))


def filled_pool(num_blocks: int) -> KvPool:
    """A pool whose every block has bytes of its own."""
    pool = pool_of(num_blocks)
    generator = torch.Generator().manual_seed(num_blocks)
    for block in range(num_blocks):
        noise = torch.randint(256, (LAYOUT.block_bytes,), dtype=torch.uint8, generator=generator)
        pool.write_block(block, noise.numpy().tobytes())
    return pool


def contents(pool: KvPool, block_ids: tuple[int, ...]) -> list[bytes]:
    return [bytes(pool.read_block(block)) for block in block_ids]


def allocation(block_ids: tuple[int, ...], num_hits: int = 0) -> ExternalAllocation:
    return ExternalAllocation("request", block_ids, num_hits)


@dataclass
class Transfer:
    """Both ends: the source's leases and pool, and the fetcher over the target's pool."""

    endpoint: str
    leases: LeaseTable
    source: KvPool
    target: KvPool
    fetcher: KvFetcher
    channels: Channels

    def handle(self, **changes: Any) -> Handle:
        fields = {
            "source_worker": "prefill-0",
            "source_endpoint": self.endpoint,
            "source_epoch": EPOCH,
            "lease_id": LEASE,
            "pairing": PAIRING,
            "num_tokens": 16,
            "block_hashes": (),
        }
        return Handle(**{**fields, **changes})


@asynccontextmanager
async def transfer(
    num_blocks: int = 8, *, servicer: Any = None, pairing: Pairing = PAIRING
) -> AsyncIterator[Transfer]:
    """Both ends on one event loop. `servicer` replaces ours; `pairing` is the target's."""
    source, target = filled_pool(num_blocks), pool_of(num_blocks, pairing.layout)
    leases = LeaseTable()
    ours = KvTransferService(leases, lambda: ServedPool(source, PAIRING, EPOCH))
    server = Server(ServingSettings())
    server.add(add_KvTransferServicer_to_server, servicer or ours)
    await server.start()
    channels = Channels()
    fetcher = KvFetcher(target, pairing, CLAIMANT, channels.get)
    try:
        yield Transfer(server.endpoint, leases, source, target, fetcher, channels)
    finally:
        await channels.close()
        await server.stop(0.0)
