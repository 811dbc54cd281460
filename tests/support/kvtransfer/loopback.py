"""A lease table and its service behind a real server on a loopback port, and pools to move between.

The side that computes is played by the test: it opens leases and advances them.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, replace
from typing import Any

import torch

from baton.engine.executor.cache.kv_layout import KvLayout, KvShape, plan_layout, pool_bytes
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.cache.shared_memory import SharedMemory
from baton.engine.scheduler.plan import ExternalAllocation, TokenLogprobs
from baton.serving.grpc.channels import Channels
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.v1.kv_transfer_pb2 import FetchRequest
from baton.v1.kv_transfer_pb2_grpc import add_KvTransferServicer_to_server
from baton.worker.pairing import Pairing
from baton_kvtransfer.client import KvFetcher
from baton_kvtransfer.connector import Connector, Integrity, Offer
from baton_kvtransfer.connectors.cuda_ipc.connector import CudaIpcConnector
from baton_kvtransfer.connectors.grpc.connector import GrpcConnector
from baton_kvtransfer.connectors.nixl.connector import NixlConnector
from baton_kvtransfer.connectors.shm.connector import ShmConnector
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.handle import FirstToken, Handle
from baton_kvtransfer.lease.lease import Claim, Lease
from baton_kvtransfer.lease.table import LeaseTable
from baton_kvtransfer.offers import Offers
from baton_kvtransfer.service import KvTransferService, ServedPools, add_to_server
from baton_kvtransfer.sources import IDLE_SECONDS
from baton_kvtransfer.transfer_messages import fetch_request

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


def payload_request(
    handle: Handle, claimant: str, pairing: Pairing, num_held: int = 0
) -> FetchRequest:
    """Returns the request of blocks in the stream, with checksums."""
    return fetch_request(handle, claimant, pairing, num_held, "grpc", Integrity.CHECKSUMS)


def contents(pool: KvPool, block_ids: tuple[int, ...]) -> list[bytes]:
    return [bytes(pool.read_block(block)) for block in block_ids]


def untouched(pool: KvPool, block_ids: tuple[int, ...]) -> bool:
    return not any(any(block) for block in contents(pool, block_ids))


def allocation(*tables: tuple[int, ...], num_hits: int = 0) -> ExternalAllocation:
    return ExternalAllocation("request", tables, num_hits)


ConnectorsOf = Callable[[Sequence[KvPool]], Sequence[Connector]]


def connectors_of(pools: Sequence[KvPool], *, nixl_problem: str = "") -> list[Connector]:
    """Returns Baton's connectors of some pools, in order of preference."""
    return [
        CudaIpcConnector(pools),
        ShmConnector(pools),
        NixlConnector(pools, "lo", nixl_problem),
        GrpcConnector(pools),
    ]


class ElsewhereConnector(ShmConnector):
    """Shared memory of another host, as its source says."""

    async def offer(self) -> Offer:
        return replace(await super().offer(), host="elsewhere")


def connectors_elsewhere(pools: Sequence[KvPool]) -> list[Connector]:
    """Returns the connectors of a source on another host."""
    device, _, *others = connectors_of(pools)
    return [device, ElsewhereConnector(pools), *others]


@dataclass
class Transfer:
    """Both ends: the source's leases and pools, and the fetcher over the target's pools."""

    endpoint: str
    leases: LeaseTable
    sources: list[KvPool]
    targets: list[KvPool]
    fetcher: KvFetcher
    channels: Channels
    service: KvTransferService
    connectors: Sequence[Connector]

    @property
    def source(self) -> KvPool:
        return self.sources[0]

    @property
    def num_readers(self) -> int:
        """Number of claimants that have mapped the source's pools."""
        return self.connector(ShmConnector).server.num_readers

    def connector(self, kind: Any) -> Any:
        """Returns the source's connector of a kind."""
        return next(each for each in self.connectors if isinstance(each, kind))

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
    connectors: ConnectorsOf = connectors_of,
    source_connectors: ConnectorsOf | None = None,
    pool_type: type[KvPool] = KvPool,
    service_type: type[KvTransferService] = KvTransferService,
    idle_seconds: float = IDLE_SECONDS,
) -> AsyncIterator[Transfer]:
    """Both ends on one event loop. `servicer` replaces ours; `pairing` is the target's;
    `connectors` are of both ends, unless the source has `source_connectors`."""
    ours, theirs = Pairing(VERSION, MODEL, layouts), pairing or Pairing(VERSION, MODEL, layouts)
    sources = [filled_pool(num_blocks, layout, pool_type) for layout in ours.layouts]
    targets = [pool_of(num_blocks, layout, pool_type) for layout in theirs.layouts]
    leases = LeaseTable() if leases is None else leases
    theirs_made = connectors(targets)
    ours_made = (source_connectors or connectors)(sources)
    offers = Offers(ours_made)
    served = ServedPools(sources, ours, EPOCH, offers)
    service = service_type(leases, lambda: served)
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
        theirs_made,
        connector=connector,
        idle_seconds=idle_seconds,
    )
    async with AsyncExitStack() as stack:
        for each in (*ours_made, *theirs_made):
            stack.push_async_callback(each.close)
        stack.push_async_callback(server.stop, 0.0)
        stack.push_async_callback(channels.close)
        stack.callback(fetcher.close)
        await offers.open()
        yield Transfer(
            server.endpoint, leases, sources, targets, fetcher, channels, service, ours_made
        )
