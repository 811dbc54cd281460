"""Brings the blocks of a lease into this worker's pools over gRPC."""

import time
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import dataclass

import grpc
import xxhash

from baton.engine.core.block_pool import NULL_BLOCK
from baton.engine.core.plan import ExternalAllocation
from baton.engine.kv_pool import KvPool
from baton.errors import DataLossError
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import kv_transfer_pb2_grpc as pb_grpc
from kvtransfer.extent import Extent
from kvtransfer.handle import FirstToken, Handle, Pairing, TransferReport
from kvtransfer.wire import fetch_request, first_token_of


@dataclass(slots=True)
class _Incoming:
    """One Fetch while it runs.

    Attributes:
        tables: per cache group, where the blocks of the sequence go.
        due: per cache group, which of them are yet to come.
    """

    tables: tuple[tuple[int, ...], ...]
    due: list[range]
    generation: int | None = None
    num_blocks: int = 0
    num_bytes: int = 0
    first_token: FirstToken | None = None


class KvFetcher:
    """Claims leases for one worker, whose pools it is given in the order of their cache groups."""

    def __init__(
        self,
        pools: Sequence[KvPool],
        pairing: Pairing,
        worker_id: str,
        channel_to: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self._pools = pools
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
        Raises `NotFoundError` (the lease is over), `DataLossError` (bytes arrived damaged, out of
        order or not at all), `FailedPreconditionError`, or the transport's error.
        """
        stub = pb_grpc.KvTransferStub(self._channel_to(handle.source_endpoint))
        request = fetch_request(handle, self._worker_id, self._pairing, allocation.num_hit_blocks)
        call = stub.Fetch(request, timeout=timeout)
        try:
            incoming = await self._receive(call, handle, allocation)
            prefilled_at = time.monotonic()
            assert incoming.generation is not None
            confirmation = pb.ConfirmRequest(
                lease_id=handle.lease_id, generation=incoming.generation
            )
            await stub.Confirm(confirmation, timeout=timeout)
        finally:
            call.cancel()
        assert incoming.first_token is not None
        exposed = time.monotonic() - prefilled_at
        report = TransferReport(incoming.num_blocks, incoming.num_bytes, exposed)
        return incoming.first_token, report

    async def _receive(
        self,
        call: AsyncIterable[pb.FetchResponse],
        handle: Handle,
        allocation: ExternalAllocation,
    ) -> _Incoming:
        extent = Extent(handle.num_tokens, self._pools[0].layout.block_size)
        windows = [pool.layout.window for pool in self._pools]
        assert all(len(table) == extent.num_blocks for table in allocation.block_ids)
        due = [extent.due(window, allocation.num_hit_blocks) for window in windows]
        incoming = _Incoming(allocation.block_ids, due)
        async for response in call:
            match response.WhichOneof("event"):
                case "manifest":
                    _open(incoming, response.manifest, extent)
                case "blocks":
                    self._store(incoming, response.blocks)
                case "result":
                    incoming.first_token = first_token_of(response.result)
                    break
        _check_complete(incoming)
        return incoming

    def _store(self, incoming: _Incoming, run: pb.BlockRun) -> None:
        """Checks a run of blocks and copies it into its pool."""
        if incoming.generation is None:
            raise DataLossError("blocks arrived before the manifest")
        if run.group >= len(self._pools):
            raise DataLossError(
                f"blocks of group {run.group} arrived; there are {len(self._pools)}"
            )
        pool, due = self._pools[run.group], incoming.due[run.group]
        block_bytes = pool.layout.block_bytes
        count, odd = divmod(len(run.payload), block_bytes)
        targets = incoming.tables[run.group][due.start : due.start + count]
        is_expected = run.first_block == due.start and 0 < count <= len(due)
        if odd or not is_expected or NULL_BLOCK in targets:
            raise DataLossError(
                f"blocks [{run.first_block}, +{count}) of group {run.group}, {len(run.payload)} "
                f"bytes, arrived where blocks [{due.start}, {due.stop}) were due"
            )
        if xxhash.xxh3_64_intdigest(run.payload) != run.checksum:
            raise DataLossError(
                f"the checksum of block {run.first_block} and on of group {run.group} is another"
            )
        payload = memoryview(run.payload)
        for i, block_id in enumerate(targets):
            pool.write_block(block_id, payload[i * block_bytes : (i + 1) * block_bytes])
        incoming.due[run.group] = due[count:]
        incoming.num_blocks += count
        incoming.num_bytes += len(run.payload)


def _open(incoming: _Incoming, manifest: pb.Manifest, extent: Extent) -> None:
    if incoming.generation is not None:
        raise DataLossError("a second manifest arrived")
    if manifest.num_blocks != extent.num_blocks:
        raise DataLossError(
            f"the lease has {manifest.num_blocks} blocks; {extent.num_blocks} were allocated for it"
        )
    incoming.generation = manifest.generation


def _check_complete(incoming: _Incoming) -> None:
    if incoming.generation is None or incoming.first_token is None:
        raise DataLossError("the transfer ended without a manifest or a result")
    for group, due in enumerate(incoming.due):
        if due:
            raise DataLossError(
                f"the transfer ended while blocks [{due.start}, {due.stop}) of group {group} "
                "were due"
            )
