"""A lease table and its service behind a real server on a loopback port, and pools to move between.

The side that computes is played by the test: it opens leases and advances them.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from baton.engine.executor.cache.kv_layout import KvLayout, KvShape, plan_layout, pool_bytes
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.cache.shared_memory import SharedMemory
from baton.engine.scheduler.plan import ExternalAllocation, TokenLogprobs
from baton.serving.grpc.channels import Channels
from baton.serving.grpc.server import Server
from baton.serving.settings import ServingSettings
from baton.v1.kv_transfer_pb2_grpc import add_KvTransferServicer_to_server
from baton.worker.pairing import Pairing
from baton_kvtransfer.client import KvFetcher
from baton_kvtransfer.connectors.nixl.source import NixlSource
from baton_kvtransfer.connectors.shm.source import HandleServer
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.handle import FirstToken, Handle
from baton_kvtransfer.lease.lease import Claim, Lease
from baton_kvtransfer.lease.table import LeaseTable
from baton_kvtransfer.service import KvTransferService, SenderOf, ServedPools, add_to_server
from baton_kvtransfer.sources import TransportTimes

EPOCH = 7
CLAIMANT = "decode-0"
LEASE = bytes(range(16))
TOKEN = FirstToken(0, 42, TokenLogprobs(-1.5, (42, 7), (-1.5, -2.0)))
BLOCK_SIZE = 4
WINDOW = 6
MODEL = b"model-a!"
VERSION = "1.2.3"

Tables = tuple[tuple[int, ...], ...]


def nothing() -> None:
    """Stands for the call by which a lease frees its blocks, where that does not matter."""


def layout_of(num_layers: int, head_dim: int = 8, window: int | None = None) -> KvLayout:
    shapes = [KvShape(2, head_dim, head_dim)] * num_layers
    return plan_layout(shapes, torch.float32, BLOCK_SIZE, window)


LAYOUT = layout_of(2)
WINDOWED = layout_of(3, 4, WINDOW)
PLAIN = (LAYOUT,)
HYBRID = (LAYOUT, WINDOWED)


def pool_of(num_blocks: int, layout: KvLayout = LAYOUT, kind: type[KvPool] = KvPool) -> KvPool:
    """A pool of zeros, that can be shared."""
    memory = SharedMemory.allocate("test", pool_bytes(layout, num_blocks))
    return kind(layout, num_blocks, torch.device("cpu"), memory)


def filled_pool(num_blocks: int, layout: KvLayout = LAYOUT, kind: type[KvPool] = KvPool) -> KvPool:
    """A pool whose every block has bytes of its own."""
    pool = pool_of(num_blocks, layout, kind)
    generator = torch.Generator().manual_seed(num_blocks)
    size = (num_blocks * layout.block_bytes,)
    noise = torch.randint(256, size, dtype=torch.uint8, generator=generator)
    pool.content[1:].view(-1).copy_(noise)
    return pool


def contents(pool: KvPool, block_ids: tuple[int, ...]) -> list[bytes]:
    return [bytes(pool.read_block(block)) for block in block_ids]


def untouched(pool: KvPool, block_ids: tuple[int, ...]) -> bool:
    return not any(any(block) for block in contents(pool, block_ids))


def allocation(*tables: tuple[int, ...], num_hits: int = 0) -> ExternalAllocation:
    return ExternalAllocation("request", tables, num_hits)


@dataclass
class Transfer:
    """Both ends: the source's leases and pools, and the fetcher over the target's pools."""

    endpoint: str
    leases: LeaseTable
    sources: list[KvPool]
    targets: list[KvPool]
    fetcher: KvFetcher
    channels: Channels
    handle_server: HandleServer
    service: KvTransferService
    nixl: NixlSource

    @property
    def source(self) -> KvPool:
        return self.sources[0]

    @property
    def target(self) -> KvPool:
        return self.targets[0]

    def lease(self, num_blocks: int) -> AbstractContextManager[Lease]:
        """Opens a lease of a prompt that fills `num_blocks` blocks."""
        return self.lease_of(num_blocks * BLOCK_SIZE)

    def lease_of(self, num_tokens: int, lease_id: bytes = LEASE) -> AbstractContextManager[Lease]:
        return self.leases.open(Claim(lease_id, CLAIMANT), BlockRange(num_tokens, BLOCK_SIZE))

    @contextmanager
    def computed_lease(self, *tables: tuple[int, ...], lease_id: bytes = LEASE) -> Iterator[Lease]:
        """Opens a lease of a prompt that fills these blocks, all of which are computed."""
        num_blocks = len(tables[0])
        with self.lease_of(num_blocks * BLOCK_SIZE, lease_id) as lease:
            lease.advance(tables, num_blocks)
            lease.complete(TOKEN, nothing)
            yield lease

    def handle(self, num_blocks: int = 4, **changes: Any) -> Handle:
        fields = {
            "source_worker": "prefill-0",
            "source_endpoint": self.endpoint,
            "source_epoch": EPOCH,
            "lease_id": LEASE,
            "pairing": Pairing(VERSION, MODEL, tuple(pool.layout for pool in self.sources)),
            "num_tokens": num_blocks * BLOCK_SIZE,
            "block_hashes": (),
        }
        return Handle(**{**fields, **changes})


@asynccontextmanager
async def transfer(
    num_blocks: int = 8,
    *,
    layouts: tuple[KvLayout, ...] = PLAIN,
    servicer: Any = None,
    pairing: Pairing | None = None,
    connector: str = "grpc",
    leases: LeaseTable | None = None,
    nixl_problem: str = "",
    host: str | None = None,
    pool_type: type[KvPool] = KvPool,
    service_type: type[KvTransferService] = KvTransferService,
    sender_of: SenderOf | None = None,
    times: TransportTimes | None = None,
) -> AsyncIterator[Transfer]:
    """Both ends on one event loop. `servicer` replaces ours; `pairing` is the target's; `host` is
    where the source says that it is."""
    ours, theirs = Pairing(VERSION, MODEL, layouts), pairing or Pairing(VERSION, MODEL, layouts)
    sources = [filled_pool(num_blocks, layout, pool_type) for layout in ours.layouts]
    targets = [pool_of(num_blocks, layout, pool_type) for layout in theirs.layouts]
    leases = LeaseTable() if leases is None else leases
    handle_server = HandleServer(sources)
    nixl = NixlSource(sources, "lo")
    endpoint = handle_server.endpoint
    shm = endpoint if host is None else replace(endpoint, host=host)
    served = ServedPools(sources, ours, EPOCH, shm, nixl)
    service = service_type(leases, lambda: served, sender_of=sender_of)
    server = Server(ServingSettings())
    if servicer is None:
        server.add(add_to_server, service)
    else:
        server.add(add_KvTransferServicer_to_server, servicer)
    await server.start()
    channels = Channels()
    fetcher = KvFetcher(
        targets,
        theirs,
        CLAIMANT,
        channels,
        connector=connector,
        nixl_devices="lo",
        nixl_problem=nixl_problem,
        times=times,
    )
    try:
        async with handle_server:
            yield Transfer(
                server.endpoint,
                leases,
                sources,
                targets,
                fetcher,
                channels,
                handle_server,
                service,
                nixl,
            )
    finally:
        fetcher.close()
        await channels.close()
        await server.stop(0.0)
        nixl.close()
