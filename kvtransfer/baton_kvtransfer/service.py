"""Servicer of `KvTransfer` and `EncoderTransfer`: the source streams the blocks of its leases to
claimants."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.errors import FailedPreconditionError, NotFoundError
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import prefill_pb2
from baton.worker.engine_messages import layouts_of
from baton.worker.pairing import Pairing
from baton_kvtransfer.lease.lease import Lease
from baton_kvtransfer.lease.table import LeaseTable
from baton_kvtransfer.offers import Offers
from baton_kvtransfer.stream import frames
from baton_kvtransfer.stream.block_batch import BlockBatch
from baton_kvtransfer.transfer_messages import claim_of, first_token_to_message, integrity_of
from baton_kvtransfer.transfer_service import KV, TransferService
from baton_kvtransfer.transfer_spans import sending_span

Event = pb.FetchResponse | BlockBatch
# Sends blocks as `Connector.send`, with the integrity check of one Fetch.
Send = Callable[[int, int, Sequence[int], KvPool], AsyncGenerator[BlockBatch, None]]


@dataclass(frozen=True, slots=True)
class ServedPools:
    """Pools that claimants fetch from, one per cache group, with what their connectors offer."""

    pools: Sequence[KvPool]
    pairing: Pairing
    epoch: int
    offers: Offers


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
    ) -> None:
        self.service = service
        self._leases = leases
        self._served = served

    async def Describe(self, request: pb.DescribeRequest, _context: Any) -> pb.DescribeResponse:
        served = self._served()
        offers = await served.offers.open(request.connectors)
        return pb.DescribeResponse(epoch=served.epoch, offers=offers)

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[Event]:
        claim = claim_of(request)
        served = self._served()
        _check(request, served)
        connector = served.offers.connector(request)
        integrity = integrity_of(request.integrity or pb.INTEGRITY_XXH3_64).of(connector)
        remaining, timeout = context.time_remaining(), self._leases.open_timeout
        if remaining is not None:
            timeout = min(timeout, remaining)
        with sending_span(self.service, request.claimant, connector.name):
            async with self._leases.claim(claim, timeout) as lease:
                send = partial(connector.send, integrity=integrity)
                events = _stream(lease, served.pools, send, request.num_held_blocks)
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


async def _stream(
    lease: Lease, pools: Sequence[KvPool], send: Send, num_held: int
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
            async with aclosing(_runs(lease, group, pool, filled, send)) as runs:
                async for run in runs:
                    yield run
        if lease.is_over:
            await lease.over()  # raises the reason why blocks are missing
        sent = num_filled
    token = lease.first_token
    tokens = [] if token is None else [first_token_to_message(token)]
    yield pb.FetchResponse(result=prefill_pb2.PrefillResult(first_tokens=tokens))


async def _runs(
    lease: Lease, group: int, pool: KvPool, blocks: range, send: Send
) -> AsyncGenerator[BlockBatch, None]:
    """Yields filled blocks of the sequence in one cache group, in batches; none after the lease has
    ended: blocks that were read meanwhile may have been another sequence's by then."""
    block_ids = lease.block_ids[group][blocks.start : blocks.stop]
    async with aclosing(send(group, blocks.start, block_ids, pool)) as batches:
        async for batch in batches:
            if lease.is_over:
                return
            still_held = lease.block_ids[group][batch.first_block : blocks.stop]
            assert NULL_BLOCK not in still_held, "a block was given back that its claimant needs"
            yield batch
