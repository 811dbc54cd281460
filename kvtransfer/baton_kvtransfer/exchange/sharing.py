"""Lets other workers have what this one's prefix cache holds: one call per lease."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from baton.engine.async_engine import AsyncEngine
from baton.errors import NotFoundError
from baton.v1 import kv_sharing_pb2 as pb
from baton.v1 import kv_sharing_pb2_grpc as pb_grpc
from baton.worker.worker import Worker
from baton_kvtransfer.block_range import BlockRange
from baton_kvtransfer.lease import Lease
from baton_kvtransfer.lease_table import LeaseTable
from baton_kvtransfer.wire import claim_of, hashes_of

# How often it is looked whether somebody here needs the blocks of a lease that nobody has claimed.
LOOK_INTERVAL = 0.1


class SharingService(pb_grpc.KvSharingServicer):
    """Keeps cached blocks under leases. Nothing is computed for one, so it is complete at once."""

    def __init__(self, worker: Worker, leases: LeaseTable) -> None:
        self._worker = worker
        self._leases = leases
        self._names = count(1)

    async def Share(  # noqa: N802
        self, request: pb.ShareRequest, _context: Any
    ) -> AsyncIterator[pb.ShareResponse]:
        claim = claim_of(request)
        hashes = hashes_of(request.block_hashes, "block_hashes")
        engine = self._worker.engine_for_new_work()
        # The blocks are given back after the lease on them has ended, whatever ends this call.
        async with engine.pinned(f"lease {next(self._names)}", hashes) as tables:
            num_blocks, block_size = len(tables[0]), engine.block_size
            if not num_blocks:
                raise NotFoundError("none of these blocks is cached here")
            with self._leases.open(claim, BlockRange(num_blocks * block_size, block_size)) as lease:
                lease.advance(tables, num_blocks)
                lease.complete(None, lambda: None)
                yield pb.ShareResponse(shared=pb.BlocksShared(num_blocks=num_blocks))
                await _until_released(lease, engine)
                yield pb.ShareResponse(released=pb.BlocksReleased())


async def _until_released(lease: Lease, engine: AsyncEngine) -> None:
    """Waits until the claimant has the blocks. Raises what broke the lease.

    Whoever is to claim them may be waiting for blocks of its own, and perhaps for those that
    somebody waiting here holds there. So while nothing runs here and something waits, a lease that
    nobody has claimed gives way: its claimant can compute what it would have fetched.
    """
    while not lease.is_claimed:
        try:
            async with asyncio.timeout(LOOK_INTERVAL):
                await lease.claimed()
        except TimeoutError:
            stats = engine.stats()
            if stats.num_waiting > 0 and stats.num_running == 0:
                raise NotFoundError("the blocks are needed here") from None
    await lease.over()
