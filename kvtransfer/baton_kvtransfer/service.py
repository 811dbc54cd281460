"""Servicer of `KvTransfer` and `EncoderTransfer`: the source streams the blocks of its leases to
claimants."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.errors import FailedPreconditionError, NotFoundError
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import prefill_pb2
from baton.worker.pairing import Pairing
from baton.worker.wire import layouts_of
from baton_kvtransfer.connector import CUDA_IPC, GRPC, NIXL, SHM, Connector, Sender
from baton_kvtransfer.connectors.cuda_ipc.memory_handles import IpcOffer
from baton_kvtransfer.connectors.grpc.payload import PayloadSender
from baton_kvtransfer.connectors.nixl.agent import NixlOffer
from baton_kvtransfer.connectors.nixl.source import NixlSource
from baton_kvtransfer.connectors.shm.source import PlaceSender
from baton_kvtransfer.connectors.shm.unix_peer import HandleEndpoint
from baton_kvtransfer.lease.lease import Lease
from baton_kvtransfer.lease.table import LeaseTable
from baton_kvtransfer.offers import Description, PluginOffer, description_to_message
from baton_kvtransfer.stream import frames
from baton_kvtransfer.stream.block_batch import BlockBatch
from baton_kvtransfer.stream.transfer_stream import TransferStream
from baton_kvtransfer.transfer_service import KV, TransferService
from baton_kvtransfer.transfer_spans import sending_span
from baton_kvtransfer.wire import claim_of, connector_of, first_token_to_message, integrity_of

Event = pb.FetchResponse | BlockBatch


@dataclass(frozen=True, slots=True)
class ServedPools:
    """Pools that claimants fetch from, one per cache group, with the transports they offer.

    Attributes:
        shm: socket that passes the descriptors of shared memory; or the reason for none.
        nixl: NIXL agent of the pools; or the reason for none.
        ipc: CUDA IPC handles of the pools; or the reason for none.
        plugin: offer of the plug-in that this worker was given; or the reason for none.
        plugin_connector: that plug-in, if there is one.
    """

    pools: Sequence[KvPool]
    pairing: Pairing
    epoch: int
    shm: HandleEndpoint | str = "its pools are not in shared memory"
    nixl: NixlSource | str = "the other worker does not offer it"
    ipc: IpcOffer | str = "the pools of the other worker are not on a GPU"
    plugin: PluginOffer | str = "the other worker was given no connector of a package"
    plugin_connector: Connector | None = None

    def connector_of(self, request: pb.FetchRequest) -> Connector:
        return connector_of(request.connector, request.plugin, self.plugin_connector)


SenderOf = Callable[[pb.FetchRequest, ServedPools, TransferStream], Sender]


class KvTransferService:
    """Service with Describe, Fetch and Confirm over one worker's pools and leases.

    `served` returns the pools, or raises `UnavailableError` while the model is being loaded.

    Attributes:
        service: the gRPC service.
    """

    def __init__(
        self,
        leases: LeaseTable,
        served: Callable[[], ServedPools],
        service: TransferService = KV,
        sender_of: SenderOf | None = None,
    ) -> None:
        """`sender_of` returns the sender for a request; None: that of the request's connector."""
        self.service = service
        self._sender_of = sender_of or sender_of_connector
        self._leases = leases
        self._served = served
        self._stream = TransferStream()

    async def Describe(self, request: pb.DescribeRequest, _context: Any) -> pb.DescribeResponse:
        served = self._served()
        nixl: NixlOffer | str = "it was not asked for"
        if isinstance(served.nixl, str):
            nixl = served.nixl
        elif pb.CONNECTOR_NIXL in request.connectors:
            nixl = await served.nixl.offer()
        description = Description(served.epoch, served.shm, nixl, served.ipc, served.plugin)
        return description_to_message(description)

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[Event]:
        claim = claim_of(request)
        served = self._served()
        _check(request, served)
        sender = self._sender_of(request, served, self._stream)
        remaining, timeout = context.time_remaining(), self._leases.open_timeout
        if remaining is not None:
            timeout = min(timeout, remaining)
        with sending_span(self.service, request.claimant, served.connector_of(request)):
            async with self._leases.claim(claim, timeout) as lease:
                events = _stream(lease, served.pools, sender, request.num_held_blocks)
                async with aclosing(events):  # the lease ends after all reads of its blocks
                    async for event in events:
                        yield event
                await lease.over()

    async def Confirm(self, request: pb.ConfirmRequest, _context: Any) -> pb.ConfirmResponse:
        self._leases.confirm(claim_of(request), request.generation)
        return pb.ConfirmResponse()


def add_to_server(service: KvTransferService, server: Any) -> None:
    """Adds the service as the generated function does, but does not copy the payload of a Fetch."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Describe": grpc.unary_unary_rpc_method_handler(
            service.Describe,
            request_deserializer=pb.DescribeRequest.FromString,
            response_serializer=pb.DescribeResponse.SerializeToString,
        ),
        "Fetch": grpc.unary_stream_rpc_method_handler(
            service.Fetch,
            request_deserializer=pb.FetchRequest.FromString,
            response_serializer=frames.encode,
        ),
        "Confirm": grpc.unary_unary_rpc_method_handler(
            service.Confirm,
            request_deserializer=pb.ConfirmRequest.FromString,
            response_serializer=pb.ConfirmResponse.SerializeToString,
        ),
    }
    name = service.service.name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def _check(request: pb.FetchRequest, served: ServedPools) -> None:
    if request.source_epoch != served.epoch:
        raise FailedPreconditionError(
            f"this worker's epoch is {served.epoch}, the handle's is {request.source_epoch}: "
            "it has restarted or changed its role since"
        )
    other = Pairing(request.baton_version, request.fingerprint, layouts_of(request.layouts))
    served.pairing.check(other, request.claimant or "the claimant")


def sender_of_connector(
    request: pb.FetchRequest, served: ServedPools, stream: TransferStream
) -> Sender:
    """Returns the sender of the connector that a request names. Raises `FailedPreconditionError` if
    these pools are not offered by it."""
    connector = served.connector_of(request)
    integrity = integrity_of(request.integrity or pb.INTEGRITY_XXH3_64).of(connector)
    if connector is GRPC:
        return PayloadSender(stream)
    offers = {SHM: served.shm, NIXL: served.nixl, CUDA_IPC: served.ipc}
    offered = offers.get(connector, served.plugin)
    if isinstance(offered, str):
        raise FailedPreconditionError(f"blocks cannot be had by {connector.name} here: {offered}")
    return PlaceSender(integrity, stream)


async def _stream(
    lease: Lease, pools: Sequence[KvPool], sender: Sender, num_held: int
) -> AsyncGenerator[Event, None]:
    """Yields the manifest, blocks as they are filled, and the result."""
    num_blocks = lease.blocks.num_blocks
    if num_held > num_blocks:
        raise NotFoundError(f"{num_held} blocks are held of a lease of {num_blocks}")
    yield pb.FetchResponse(manifest=pb.Manifest(generation=lease.generation, num_blocks=num_blocks))
    due = [lease.blocks.due(pool.layout.window, num_held) for pool in pools]
    sent = num_held
    while not lease.is_complete or sent < num_blocks:
        await lease.filled_beyond(sent)
        num_filled = max(sent, lease.num_filled)
        for group, pool in enumerate(pools):
            filled = range(max(sent, due[group].start), num_filled)
            async with aclosing(_runs(lease, group, pool, filled, sender)) as runs:
                async for run in runs:
                    yield run
        if lease.is_over:
            await lease.over()  # raises the reason why blocks are missing
        sent = num_filled
    token = lease.first_token
    tokens = [] if token is None else [first_token_to_message(token)]
    yield pb.FetchResponse(result=prefill_pb2.PrefillResult(first_tokens=tokens))


async def _runs(
    lease: Lease, group: int, pool: KvPool, blocks: range, sender: Sender
) -> AsyncGenerator[BlockBatch, None]:
    """Yields filled blocks of the sequence in one cache group, in batches; none after the lease has
    ended: blocks that were read meanwhile may have been another sequence's by then."""
    block_ids = lease.block_ids[group][blocks.start : blocks.stop]
    async with aclosing(sender.send(group, blocks.start, block_ids, pool)) as batches:
        async for batch in batches:
            if lease.is_over:
                return
            still_held = lease.block_ids[group][batch.first_block : blocks.stop]
            assert NULL_BLOCK not in still_held, "a block was given back that its claimant needs"
            yield batch
