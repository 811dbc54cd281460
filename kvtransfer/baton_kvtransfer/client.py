"""Transfer client: the claimant fetches the blocks of a lease into its own pools."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import grpc

from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.scheduler.plan import ExternalAllocation
from baton.errors import DataLossError, DeadlineExceededError, UnavailableError
from baton.rpc.cancellation import run_until
from baton.rpc.errors import is_loss
from baton.serving.grpc.channels import Channels
from baton.serving.telemetry.propagation import outgoing
from baton.v1 import kv_transfer_pb2 as pb
from baton.worker.pairing import Pairing
from baton_kvtransfer.connector import Connector, Integrity, Receiver
from baton_kvtransfer.gpu_notice import GpuNotice
from baton_kvtransfer.lease.handle import FirstToken, Handle, TransferReport
from baton_kvtransfer.lease.handoff import Handoff
from baton_kvtransfer.lease.machine import ClaimantEvent
from baton_kvtransfer.meter import TransferMeter
from baton_kvtransfer.sources import IDLE_SECONDS, Sources
from baton_kvtransfer.stream import frames
from baton_kvtransfer.stream.arrivals import Arrivals
from baton_kvtransfer.stream.block_batch import BlockBatch
from baton_kvtransfer.transfer_messages import connector_key, fetch_request, first_token_of
from baton_kvtransfer.transfer_service import KV, TransferService
from baton_kvtransfer.transfer_spans import note_report, transfer_span

# Seconds within which a source has to answer `Describe`; after that it counts as unavailable.
_DESCRIBE_TIMEOUT = 5.0


class KvFetcher:
    """Fetcher of leased blocks into one worker's `pools`, which are in the order of cache groups.

    Caches the transport of each source until `close`.

    Attributes:
        meter: counters of its transfers.
        sources: transports from the sources.
    """

    def __init__(
        self,
        pools: Sequence[KvPool],
        pairing: Pairing,
        worker_id: str,
        channels: Channels,
        connectors: Sequence[Connector],
        *,
        service: TransferService = KV,
        connector: str = "auto",
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connectors`: of these pools, in order of preference, the fallback last; closed by the
        caller. `service`: service of the sources. `connector`: name of the only one to use, or
        "auto". `idle_seconds`: as of `Sources`."""
        self.meter = TransferMeter(connectors[-1].name)
        self._pools = pools
        self._layouts = tuple(pool.layout for pool in pools)
        self._pairing = pairing
        self._worker_id = worker_id
        self._channels = channels
        self._service = service
        self._clock = clock
        notice = GpuNotice(pools, service.noun)
        self.sources = Sources(connectors, connector, self._describe, notice, idle_seconds)

    def close(self) -> None:
        """Unmaps the memory of all sources. Idempotent."""
        self.sources.close()

    def check(self, handle: Handle) -> None:
        """Raises `FailedPreconditionError` if the two workers may not pair.

        The handle of an older router lacks the source's version; its fingerprint includes the
        version, and the source checks again.
        """
        theirs = handle.pairing
        if not theirs.version:
            theirs = replace(theirs, version=self._pairing.version)
        self._pairing.check(theirs, handle.source_worker)

    async def fetch(
        self, handle: Handle, allocation: ExternalAllocation, timeout: float
    ) -> tuple[FirstToken | None, TransferReport]:
        """Fetches the blocks after the leading cache hits within `timeout` seconds and confirms the
        lease. Returns the token that follows them, if there is one, and a report.

        The blocks may be used only after a return; after a return, error or cancellation nothing
        writes to them. Cancellation ends the lease. Raises `NotFoundError` (the lease is over),
        `DataLossError` (bytes damaged, out of order or missing), `DeadlineExceededError`,
        `FailedPreconditionError`, `UnavailableError` (the source or the connection to it is lost),
        or any other error of the source as the call's error.
        """
        handoff = Handoff(handle.num_tokens, self._layouts, allocation)
        deadline = self._clock() + timeout
        try:
            span_of = transfer_span(self._service, handle, self._worker_id)
            with span_of as span, self.meter.transfer() as transfer:
                token, report = await self._take(
                    handoff, handle, allocation.num_hit_blocks, deadline
                )
                transfer.report = report
                note_report(span, report, allocation.num_hit_blocks)
            return token, report
        except grpc.aio.AioRpcError as error:
            if not is_loss(error):
                raise
            self.sources.lost(handle.source_endpoint, handle.source_epoch)
            raise UnavailableError(
                f"the connection to {handle.source_worker} broke: {error.details()}"
            ) from error
        except DataLossError:
            # What damaged the blocks may have damaged the connection's own state too.
            self._channels.reconnect(handle.source_endpoint)
            raise
        finally:
            handoff.end(ClaimantEvent.BROKEN)

    async def _take(
        self, handoff: Handoff, handle: Handle, num_held: int, deadline: float
    ) -> tuple[FirstToken | None, TransferReport]:
        transport = await self.sources.transport(handle.source_endpoint, handle.source_epoch)
        with transport.transfer() as receiver:
            connector = transport.connector
            integrity = handle.integrity.of(connector)
            request = fetch_request(
                handle, self._worker_id, self._pairing, num_held, connector.name, integrity
            )
            fetch = self._fetch_of(self._channels.get(handle.source_endpoint))
            handoff.request()
            call = fetch(request, timeout=self._left(handoff, deadline), metadata=outgoing())
            try:
                await self._receive(call, handoff, receiver, connector, integrity)
                prefilled_at = time.monotonic()
                await self._confirm(handle, handoff, deadline)
            finally:
                call.cancel()
        exposed = time.monotonic() - prefilled_at
        report = TransferReport(
            handoff.num_blocks, handoff.num_bytes, exposed, connector.name, transport.reason
        )
        return handoff.acknowledge(), report

    async def _receive(
        self,
        call: Any,
        handoff: Handoff,
        receiver: Receiver,
        connector: Connector,
        integrity: Integrity,
    ) -> None:
        """Receives and writes all blocks, until the result of the transfer."""

        async def write(batch: BlockBatch, targets: Sequence[int]) -> None:
            receiving = receiver.receive(batch, self._pools[batch.group], targets, integrity)
            if connector.detects_loss:
                await receiving
            else:
                await run_until(receiving, _loss(call))

        arrivals = Arrivals(write)
        await run_until(_read(call, handoff, arrivals), arrivals.write_all())

    async def _confirm(self, handle: Handle, handoff: Handoff, deadline: float) -> None:
        """Confirms the lease, after all blocks were written."""
        confirmation = pb.ConfirmRequest(
            lease_id=handle.lease_id,
            generation=handoff.generation,
            claimant=self._worker_id,
            tenant=handle.tenant,
        )
        timeout = self._left(handoff, deadline)
        # Asks for the channel again: certificates may have changed since the fetch began.
        stub = self._service.stub(self._channels.get(handle.source_endpoint))
        await stub.Confirm(confirmation, timeout=timeout, metadata=outgoing())

    def _left(self, handoff: Handoff, deadline: float) -> float:
        """Returns the seconds to `deadline`. After it, ends the handoff and raises
        `DeadlineExceededError`."""
        left = deadline - self._clock()
        if left <= 0:
            handoff.end(ClaimantEvent.TIMED_OUT)
            raise DeadlineExceededError("the blocks did not arrive in time")
        return left

    async def _describe(self, endpoint: str, wanted: Sequence[str]) -> pb.DescribeResponse:
        stub = self._service.stub(self._channels.get(endpoint))
        request = pb.DescribeRequest(connectors=[connector_key(name)[0] for name in wanted])
        return await stub.Describe(request, timeout=_DESCRIBE_TIMEOUT)

    def _fetch_of(self, channel: grpc.aio.Channel) -> Any:
        """Returns the generated stub's Fetch, with a decoder that does not copy the payload."""
        return channel.unary_stream(
            f"/{self._service.name}/Fetch",
            request_serializer=pb.FetchRequest.SerializeToString,
            response_deserializer=frames.decode,
        )


async def _read(call: Any, handoff: Handoff, arrivals: Arrivals) -> None:
    """Reads manifest and blocks until the result of the transfer, after all blocks are written."""
    async for event in call:
        if event is None:
            raise DataLossError("the transfer brought something that is no event of it")
        if isinstance(event, BlockBatch):
            await arrivals.put(event, handoff.place(event))
            continue
        match event.WhichOneof("event"):
            case "manifest":
                handoff.open(event.manifest.generation, event.manifest.num_blocks)
            case "result":
                await arrivals.flush()
                handoff.complete(first_token_of(event.result))
                return
    raise DataLossError("the transfer ended without a result")


async def _loss(call: Any) -> NoReturn:
    """Raises the error of `call` once it has ended, which a read of the source's memory may not
    notice."""
    await _raise_for_status(call)
    raise UnavailableError("the source ended the transfer amid a read")


async def _raise_for_status(call: Any) -> None:
    """Waits for the end of `call` and raises its error, if it has one. Reads no message: another
    task may be reading them."""
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            code,
            await call.initial_metadata(),
            await call.trailing_metadata(),
            details=await call.details(),
        )
