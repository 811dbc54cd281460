"""Brings the blocks of a lease into this worker's pools: the claimant's side of a handoff."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import grpc

from baton.engine.cache.kv_pool import KvPool
from baton.engine.scheduler.scheduling.plan import ExternalAllocation
from baton.errors import DataLossError, DeadlineExceededError, UnavailableError
from baton.rpc_errors import is_loss
from baton.serving.telemetry.propagation import outgoing
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import kv_transfer_pb2_grpc as pb_grpc
from baton.worker.pairing import Pairing
from baton_kvtransfer import frames
from baton_kvtransfer.block_batch import BlockBatch
from baton_kvtransfer.cancellation import ended
from baton_kvtransfer.connector import Connector, Integrity, Receiver
from baton_kvtransfer.connectors.nixl.claimant import NixlReader
from baton_kvtransfer.handle import FirstToken, Handle, TransferReport
from baton_kvtransfer.handoff import Handoff
from baton_kvtransfer.lease_machine import ClaimantEvent
from baton_kvtransfer.meter import TransferMeter
from baton_kvtransfer.offers import Description, description_of
from baton_kvtransfer.sources import Choice, Sources
from baton_kvtransfer.transfer_spans import note_report, transfer_span
from baton_kvtransfer.wire import connector_values, fetch_request, first_token_of

# A source that cannot say within this how its blocks are to be had is not there.
_DESCRIBE_TIMEOUT = 5.0
_FETCH = f"/{pb.DESCRIPTOR.services_by_name['KvTransfer'].full_name}/Fetch"


class KvFetcher:
    """Claims leases for one worker, whose pools it is given in the order of their cache groups.

    It keeps what it learns of each source, until `close`.

    Attributes:
        meter: counts what it brings.
    """

    def __init__(
        self,
        pools: Sequence[KvPool],
        pairing: Pairing,
        worker_id: str,
        channel_to: Callable[[str], grpc.aio.Channel],
        *,
        connector: Choice = "auto",
        nixl_devices: str | None = None,
        nixl_problem: str = "",
        socket_dir: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`nixl_devices`: of the network, as UCX names them; None for all. `nixl_problem`: why it
        is not to be used; empty where it may. `socket_dir`: where this host's workers have their
        sockets; None: without a file."""
        self.meter = TransferMeter()
        self._pools = pools
        self._layouts = tuple(pool.layout for pool in pools)
        self._pairing = pairing
        self._worker_id = worker_id
        self._channel_to = channel_to
        self._clock = clock
        nixl = NixlReader(pools, nixl_devices)
        self._sources = Sources(
            pools,
            connector,
            self._describe,
            nixl,
            nixl_problem=nixl_problem,
            socket_dir=socket_dir,
        )

    def close(self) -> None:
        """Lets go of what it has mapped. Idempotent."""
        self._sources.close()

    def check(self, handle: Handle) -> None:
        """Raises `FailedPreconditionError` if the two workers may not pair.

        A handle of a router of before does not say the source's version; its fingerprint, in which
        the version is bound, does so, and the source itself will check.
        """
        theirs = handle.pairing
        if not theirs.version:
            theirs = replace(theirs, version=self._pairing.version)
        self._pairing.check(theirs, handle.source_worker)

    async def fetch(
        self, handle: Handle, allocation: ExternalAllocation, timeout: float
    ) -> tuple[FirstToken | None, TransferReport]:
        """Fills the allocated blocks behind the leading hits, and confirms. Returns the token that
        follows them, if there is one.

        After this returns, and only then, the blocks may be used; after it has ended in any way
        nothing writes to them any more. Cancelling it ends the lease. Raises `NotFoundError` (the
        lease is over), `DataLossError` (bytes arrived damaged, out of order or not at all),
        `DeadlineExceededError`, `FailedPreconditionError`, `UnavailableError` (the source is gone,
        or the connection to it broken), or whatever else the source says, as the call's error.
        """
        handoff = Handoff(handle.num_tokens, self._layouts, allocation)
        deadline = self._clock() + timeout
        try:
            with transfer_span(handle, self._worker_id) as span, self.meter.transfer() as transfer:
                token, report = await self._take(
                    handoff, handle, allocation.num_hit_blocks, deadline
                )
                transfer.report = report
                note_report(span, report, allocation.num_hit_blocks)
            return token, report
        except grpc.aio.AioRpcError as error:
            if not is_loss(error):
                raise
            self._sources.lost(handle.source_endpoint, handle.source_epoch)
            raise UnavailableError(
                f"the connection to {handle.source_worker} broke: {error.details()}"
            ) from error
        finally:
            handoff.end(ClaimantEvent.BROKEN)

    async def _take(
        self, handoff: Handoff, handle: Handle, num_held: int, deadline: float
    ) -> tuple[FirstToken | None, TransferReport]:
        way = await self._sources.way(handle.source_endpoint, handle.source_epoch)
        connector = way.receiver.connector
        is_on_gpu = any(pool.device.type != "cpu" for pool in self._pools)
        integrity = handle.integrity.of(connector, is_on_gpu=is_on_gpu)
        request = fetch_request(
            handle, self._worker_id, self._pairing, num_held, connector, integrity
        )
        fetch = _fetch(self._channel_to(handle.source_endpoint))
        handoff.ask()
        call = fetch(request, timeout=self._left(handoff, deadline), metadata=outgoing())
        try:
            await self._receive(call, handoff, way.receiver, integrity)
            prefilled_at = time.monotonic()
            confirmation = pb.ConfirmRequest(
                lease_id=handle.lease_id,
                generation=handoff.generation,
                claimant=self._worker_id,
                tenant=handle.tenant,
            )
            timeout = self._left(handoff, deadline)
            # The channel of the fetch may be an old one by now, if certificates have changed.
            stub = pb_grpc.KvTransferStub(self._channel_to(handle.source_endpoint))
            await stub.Confirm(confirmation, timeout=timeout, metadata=outgoing())
        finally:
            call.cancel()
        exposed = time.monotonic() - prefilled_at
        report = TransferReport(
            handoff.num_blocks, handoff.num_bytes, exposed, connector, way.reason
        )
        return handoff.acknowledge(), report

    async def _receive(
        self,
        call: Any,
        handoff: Handoff,
        receiver: Receiver,
        integrity: Integrity,
    ) -> None:
        """Takes what the source sends, to the result."""
        async for event in call:
            if event is None:
                raise DataLossError("the transfer brought something that is no event of it")
            if isinstance(event, BlockBatch):
                targets = handoff.place(event)
                receiving = receiver.receive(event, self._pools[event.group], targets, integrity)
                if receiver.connector is Connector.NIXL:
                    await _while_open(call, receiving)
                else:
                    await receiving
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

    async def _describe(self, endpoint: str, wanted: Sequence[Connector]) -> Description:
        stub = pb_grpc.KvTransferStub(self._channel_to(endpoint))
        request = pb.DescribeRequest(connectors=connector_values(wanted))
        try:
            response = await stub.Describe(request, timeout=_DESCRIBE_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            response = pb.DescribeResponse()
        return description_of(response)


async def _while_open(call: Any, receiving: Coroutine[Any, Any, None]) -> None:
    """Receives, unless the source is lost meanwhile, which a read of its memory may not notice.

    Raises the call's error then.
    """
    lost = asyncio.Event()
    call.add_done_callback(lambda _: lost.set())
    task, losing = asyncio.ensure_future(receiving), asyncio.ensure_future(lost.wait())
    try:
        await asyncio.wait({task, losing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        losing.cancel()
        if not task.done():
            task.cancel()
            await ended(task)
    if not task.cancelled():
        return task.result()
    async for _ in call:
        pass
    raise UnavailableError("the source ended the transfer amid a read")


def _fetch(channel: grpc.aio.Channel) -> Any:
    """As the generated stub has it, but for the payload, which is not copied."""
    return channel.unary_stream(
        _FETCH,
        request_serializer=pb.FetchRequest.SerializeToString,
        response_deserializer=frames.decode,
    )
