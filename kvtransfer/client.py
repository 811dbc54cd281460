"""Brings the blocks of a lease into this worker's pools: the claimant's side of a handoff."""

import time
from collections.abc import AsyncIterable, Callable, Sequence
from typing import Any

import grpc

from baton.engine.core.plan import ExternalAllocation
from baton.engine.kv_pool import KvPool
from baton.errors import DataLossError, DeadlineExceededError
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import kv_transfer_pb2_grpc as pb_grpc
from kvtransfer import frames
from kvtransfer.connector import Integrity, Receiver
from kvtransfer.handle import FirstToken, Handle, Pairing, TransferReport
from kvtransfer.handoff import Handoff
from kvtransfer.lease_machine import ClaimantEvent
from kvtransfer.run import Run
from kvtransfer.sources import Choice, Description, Sources
from kvtransfer.wire import description_of, fetch_request, first_token_of

# A source that cannot say within this how its blocks are to be had is not there.
_DESCRIBE_TIMEOUT = 5.0
_FETCH = f"/{pb.DESCRIPTOR.services_by_name['KvTransfer'].full_name}/Fetch"


class KvFetcher:
    """Claims leases for one worker, whose pools it is given in the order of their cache groups.

    It keeps what it learns of each source, until `close`.
    """

    def __init__(
        self,
        pools: Sequence[KvPool],
        pairing: Pairing,
        worker_id: str,
        channel_to: Callable[[str], grpc.aio.Channel],
        *,
        connector: Choice = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._layouts = tuple(pool.layout for pool in pools)
        self._pairing = pairing
        self._worker_id = worker_id
        self._channel_to = channel_to
        self._clock = clock
        self._sources = Sources(pools, connector, self._describe)

    def close(self) -> None:
        """Lets go of what it has mapped. Idempotent."""
        self._sources.close()

    def check(self, handle: Handle) -> None:
        """Raises `FailedPreconditionError` if the two workers may not pair."""
        self._pairing.check(handle.pairing, handle.source_worker)

    async def fetch(
        self, handle: Handle, allocation: ExternalAllocation, timeout: float
    ) -> tuple[FirstToken, TransferReport]:
        """Fills the allocated blocks behind the leading hits, and confirms.

        After this returns, and only then, the blocks may be used; after it has ended in any way
        nothing writes to them any more. Cancelling it ends the lease. Raises `NotFoundError` (the
        lease is over), `DataLossError` (bytes arrived damaged, out of order or not at all),
        `DeadlineExceededError`, `FailedPreconditionError`, or the transport's error.
        """
        handoff = Handoff(handle.num_tokens, self._layouts, allocation)
        deadline = self._clock() + timeout
        try:
            return await self._take(handoff, handle, allocation.num_hit_blocks, deadline)
        finally:
            handoff.end(ClaimantEvent.BROKEN)

    async def _take(
        self, handoff: Handoff, handle: Handle, num_held: int, deadline: float
    ) -> tuple[FirstToken, TransferReport]:
        way = await self._sources.way(handle.source_endpoint, handle.source_epoch)
        connector = way.receiver.connector
        request = fetch_request(handle, self._worker_id, self._pairing, num_held, connector)
        channel = self._channel_to(handle.source_endpoint)
        handoff.ask()
        call = _fetch(channel)(request, timeout=self._left(handoff, deadline))
        try:
            integrity = handle.integrity.of(connector)
            await self._receive(call, handoff, way.receiver, integrity)
            prefilled_at = time.monotonic()
            confirmation = pb.ConfirmRequest(
                lease_id=handle.lease_id,
                generation=handoff.generation,
                claimant=self._worker_id,
                tenant=handle.tenant,
            )
            timeout = self._left(handoff, deadline)
            await pb_grpc.KvTransferStub(channel).Confirm(confirmation, timeout=timeout)
        finally:
            call.cancel()
        exposed = time.monotonic() - prefilled_at
        report = TransferReport(
            handoff.num_blocks, handoff.num_bytes, exposed, connector, way.reason
        )
        return handoff.acknowledge(), report

    async def _receive(
        self,
        call: AsyncIterable[Any],
        handoff: Handoff,
        receiver: Receiver,
        integrity: Integrity,
    ) -> None:
        """Takes what the source sends, to the result."""
        async for event in call:
            if event is None:
                raise DataLossError("the transfer brought something that is no event of it")
            if isinstance(event, Run):
                targets = handoff.place(event)
                await receiver.receive(event, self._pools[event.group], targets, integrity)
                continue
            match event.WhichOneof("event"):
                case "manifest":
                    handoff.open(event.manifest.generation, event.manifest.num_blocks)
                case "result":
                    handoff.complete(first_token_of(event.result))
                    return
        raise DataLossError("the transfer ended without a result")

    def _left(self, handoff: Handoff, deadline: float) -> float:
        """Seconds to the deadline. Past it, the handoff is over."""
        left = deadline - self._clock()
        if left <= 0:
            handoff.end(ClaimantEvent.TIMED_OUT)
            raise DeadlineExceededError("the blocks did not arrive in time")
        return left

    async def _describe(self, endpoint: str) -> Description:
        stub = pb_grpc.KvTransferStub(self._channel_to(endpoint))
        try:
            response = await stub.Describe(pb.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            response = pb.DescribeResponse()
        return description_of(response)


def _fetch(channel: grpc.aio.Channel) -> Any:
    """As the generated stub has it, but for the payload, which is not copied."""
    return channel.unary_stream(
        _FETCH,
        request_serializer=pb.FetchRequest.SerializeToString,
        response_deserializer=frames.decode,
    )
