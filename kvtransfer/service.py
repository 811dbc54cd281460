"""Serves the blocks of this worker's leases over gRPC."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from baton.engine.core.block_pool import NULL_BLOCK
from baton.engine.kv_pool import KvPool
from baton.errors import FailedPreconditionError, NotFoundError
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import kv_transfer_pb2_grpc as pb_grpc
from baton.v1 import prefill_pb2
from kvtransfer.handle import Pairing
from kvtransfer.lease import Lease, LeaseTable
from kvtransfer.wire import first_token_to_message, layouts_of, lease_id_of

MAX_PAYLOAD_BYTES = 4 * 2**20
# How long a Fetch waits for its Prefill.
CLAIM_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class ServedPools:
    """The pools whose blocks are handed out, one per cache group, and whose they are."""

    pools: Sequence[KvPool]
    pairing: Pairing
    epoch: int


class KvTransferService(pb_grpc.KvTransferServicer):
    """Fetch and Confirm over one worker's pools and leases.

    `served` gives the pools, or raises `UnavailableError` while the model is still being loaded.
    """

    def __init__(self, leases: LeaseTable, served: Callable[[], ServedPools]) -> None:
        self._leases = leases
        self._served = served

    async def Fetch(
        self, request: pb.FetchRequest, context: Any
    ) -> AsyncIterator[pb.FetchResponse]:
        lease_id = lease_id_of(request.lease_id)
        served = self._served()
        _check(request, served)
        remaining = context.time_remaining()
        timeout = CLAIM_TIMEOUT if remaining is None else min(CLAIM_TIMEOUT, remaining)
        async with self._leases.claim(lease_id, request.claimant, timeout) as lease:
            async for response in _stream(lease, served.pools, request.num_held_blocks):
                yield response
            await lease.over()

    async def Confirm(self, request: pb.ConfirmRequest, _context: Any) -> pb.ConfirmResponse:
        self._leases.confirm(lease_id_of(request.lease_id), request.generation)
        return pb.ConfirmResponse()


def _check(request: pb.FetchRequest, served: ServedPools) -> None:
    if request.source_epoch != served.epoch:
        raise FailedPreconditionError(
            f"this worker's epoch is {served.epoch}, the handle's is {request.source_epoch}: "
            "it has restarted since"
        )
    other = Pairing(request.fingerprint, layouts_of(request.layouts))
    served.pairing.check(other, request.claimant or "the claimant")


async def _stream(
    lease: Lease, pools: Sequence[KvPool], num_held: int
) -> AsyncIterator[pb.FetchResponse]:
    """Manifest, blocks as they are filled, result."""
    num_blocks = lease.extent.num_blocks
    if num_held > num_blocks:
        raise NotFoundError(f"{num_held} blocks are held of a lease of {num_blocks}")
    yield pb.FetchResponse(manifest=pb.Manifest(generation=lease.generation, num_blocks=num_blocks))
    due = [lease.extent.due(pool.layout.window, num_held) for pool in pools]
    sent = num_held
    while lease.first_token is None or sent < num_blocks:
        await lease.filled_beyond(sent)
        num_filled = max(sent, lease.num_filled)
        for group, pool in enumerate(pools):
            filled = range(max(sent, due[group].start), num_filled)
            for run in _runs(lease, group, pool, filled):
                yield pb.FetchResponse(blocks=run)
        sent = num_filled
    token = first_token_to_message(lease.first_token)
    yield pb.FetchResponse(result=prefill_pb2.PrefillResult(first_tokens=[token]))


def _runs(lease: Lease, group: int, pool: KvPool, blocks: range) -> Iterator[pb.BlockRun]:
    """Blocks of the sequence in one cache group, which are filled.

    Each run is read when it is asked for; a lease that has ended meanwhile is not read any more.
    """
    step = max(1, MAX_PAYLOAD_BYTES // pool.layout.block_bytes)
    for start in blocks[::step]:
        if lease.is_over:
            return
        block_ids = lease.block_ids[group][start : min(start + step, blocks.stop)]
        assert NULL_BLOCK not in block_ids, "a block was given back that its claimant still needs"
        payload = b"".join(map(pool.read_block, block_ids))
        yield pb.BlockRun(
            group=group,
            first_block=start,
            payload=payload,
            checksum=xxhash.xxh3_64_intdigest(payload),
        )
