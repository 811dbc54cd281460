"""Brings the blocks of a lease into this worker's pool over gRPC."""

import time
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass

import grpc
import xxhash

from baton.engine.core.plan import ExternalAllocation
from baton.engine.kv_pool import KvPool
from baton.errors import DataLossError
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import kv_transfer_pb2_grpc as pb_grpc
from kvtransfer.handle import FirstToken, Handle, Pairing, TransferReport
from kvtransfer.wire import fetch_request, first_token_of


@dataclass(slots=True)
class _Incoming:
    """What one Fetch has brought so far."""

    next_block: int
    generation: int | None = None
    num_blocks: int = 0
    num_bytes: int = 0
    first_token: FirstToken | None = None


class KvFetcher:
    """Claims leases for one worker."""

    def __init__(
        self,
        pool: KvPool,
        pairing: Pairing,
        worker_id: str,
        channel_to: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self._pool = pool
        self._pairing = pairing
        self._worker_id = worker_id
        self._channel_to = channel_to

    def check(self, handle: Handle) -> None:
        """Raises `FailedPreconditionError` if the two workers may not pair."""
        self._pairing.check(handle.pairing, handle.source_worker)

    async def fetch(
        self, handle: Handle, allocation: ExternalAllocation, timeout: float
    ) -> tuple[FirstToken, TransferReport]:
        """Fills the allocated blocks behind the leading hits, and confirms.

        After this returns, and only then, the blocks may be used. Cancelling it ends the lease.
        Raises `NotFoundError` (the lease is over), `DataLossError` (bytes arrived damaged or out of
        order), `FailedPreconditionError`, or the transport's error.
        """
        stub = pb_grpc.KvTransferStub(self._channel_to(handle.source_endpoint))
        request = fetch_request(handle, self._worker_id, self._pairing, allocation.num_hit_blocks)
        call = stub.Fetch(request, timeout=timeout)
        try:
            incoming = await self._receive(call, allocation)
            prefilled_at = time.monotonic()
            assert incoming.generation is not None
            confirmation = pb.ConfirmRequest(
                lease_id=handle.lease_id, generation=incoming.generation
            )
            await stub.Confirm(confirmation, timeout=timeout)
        finally:
            call.cancel()
        assert incoming.first_token is not None
        num_moved = incoming.next_block - allocation.num_hit_blocks
        exposed = time.monotonic() - prefilled_at
        return incoming.first_token, TransferReport(num_moved, incoming.num_bytes, exposed)

    async def _receive(
        self, call: AsyncIterable[pb.FetchResponse], allocation: ExternalAllocation
    ) -> _Incoming:
        incoming = _Incoming(next_block=allocation.num_hit_blocks)
        async for response in call:
            match response.WhichOneof("event"):
                case "manifest":
                    self._open(incoming, response.manifest, allocation)
                case "blocks":
                    self._store(incoming, response.blocks, allocation)
                case "result":
                    incoming.first_token = first_token_of(response.result)
                    break
        is_complete = incoming.first_token is not None and incoming.generation is not None
        if not is_complete or incoming.next_block != incoming.num_blocks:
            raise DataLossError(
                f"the transfer ended after {incoming.next_block} of {incoming.num_blocks} blocks"
            )
        return incoming

    def _open(
        self, incoming: _Incoming, manifest: pb.Manifest, allocation: ExternalAllocation
    ) -> None:
        if manifest.num_blocks != len(allocation.block_ids):
            raise DataLossError(
                f"the lease has {manifest.num_blocks} blocks; {len(allocation.block_ids)} were "
                "allocated for it"
            )
        incoming.generation = manifest.generation
        incoming.num_blocks = manifest.num_blocks

    def _store(self, incoming: _Incoming, run: pb.BlockRun, allocation: ExternalAllocation) -> None:
        """Checks a run of blocks and copies it into the pool."""
        block_bytes = self._pool.layout.block_bytes
        count, odd = divmod(len(run.payload), block_bytes)
        fits = incoming.next_block + count <= incoming.num_blocks
        if odd or not count or run.first_block != incoming.next_block or not fits:
            raise DataLossError(
                f"blocks [{run.first_block}, +{count}) of {len(run.payload)} bytes arrived where "
                f"block {incoming.next_block} of {incoming.num_blocks} was due"
            )
        if xxhash.xxh3_64_intdigest(run.payload) != run.checksum:
            raise DataLossError(f"the checksum of block {run.first_block} and on does not match")
        payload = memoryview(run.payload)
        for i in range(count):
            block_id = allocation.block_ids[incoming.next_block + i]
            self._pool.write_block(block_id, payload[i * block_bytes : (i + 1) * block_bytes])
        incoming.next_block += count
        incoming.num_bytes += len(run.payload)
