"""gRPC service `KvSharing`: leases cached prefix blocks to other workers, one call per lease."""

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from baton.engine.client import EngineClient
from baton.errors import NotFoundError
from baton.v1 import kv_sharing_pb2 as pb
from baton.v1 import kv_sharing_pb2_grpc as pb_grpc
from baton.worker.engine_messages import hashes_of
from baton.worker.model_host import ModelHost
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.lease import Lease
from baton_kvtransfer.lease.reclaim import claimed_or_deadlocked
from baton_kvtransfer.lease.table import LeaseTable
from baton_kvtransfer.transfer_messages import claim_of


class SharingService(pb_grpc.KvSharingServicer):
    """Prefix leases on cached blocks. A lease is complete at once, since no block is computed."""

    def __init__(self, model: ModelHost, leases: LeaseTable) -> None:
        self._model = model
        self._leases = leases
        self._names = count(1)

    async def Share(  # noqa: N802
        self, request: pb.ShareRequest, _context: Any
    ) -> AsyncIterator[pb.ShareResponse]:
        claim = claim_of(request)
        hashes = hashes_of(request.block_hashes, "block_hashes")
        engine = self._model.engine_for(None)
        # The blocks are unpinned after the lease has ended, however this call ends.
        async with engine.pinned(f"lease {next(self._names)}", hashes) as tables:
            num_blocks, block_size = len(tables[0]), engine.facts.block_size
            if not num_blocks:
                raise NotFoundError("none of these blocks is cached here")
            with self._leases.open(claim, BlockRange(num_blocks * block_size, block_size)) as lease:
                lease.advance(tables, num_blocks)
                lease.complete(None, lambda: None)
                yield pb.ShareResponse(shared=pb.BlocksShared(num_blocks=num_blocks))
                await _until_released(lease, engine)
                yield pb.ShareResponse(released=pb.BlocksReleased())


async def _until_released(lease: Lease, engine: EngineClient) -> None:
    """Waits until the claimant has the blocks. Raises the reason if the lease breaks.

    The claimant may itself wait for blocks, even for ones that a sequence waiting here holds there:
    a deadlock. So an unclaimed lease is reclaimed while sequences wait here and none runs, with
    `NotFoundError`: its claimant can compute the blocks instead.
    """
    if await claimed_or_deadlocked(lease, engine):
        raise NotFoundError("the blocks are needed here")
    await lease.over()
