"""The router's public face, and its admin service."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from baton.errors import (
    AlreadyExistsError,
    CancelledError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from baton.role_wire import role_of, role_to_message
from baton.serving.deadline import Deadline
from baton.serving.logs import request_logged_as
from baton.serving.pace import Pace
from baton.serving.tenant import Tenant, Tenants
from baton.v1 import admin_pb2, admin_pb2_grpc
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc as pb_grpc
from router import wire
from router.answer import Answer
from router.budget import RetryBudget
from router.fleet import Fleet, Member
from router.gate import Gate
from router.intake import Intake
from router.model_card import ModelCard
from router.placer import Placer
from router.rebalancer import Rebalancer
from router.recovery import Recovery
from router.saga import Saga
from router.work import work_of

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 5.0
# For a worker to drain, where the caller sets no deadline.
_SET_ROLE_SECONDS = 600.0
# A router that has just started waits so long for its first look at Redis and at the workers; where
# Redis does not answer, its clients should rather hear of it and ask another one.
_FIRST_LOOK_SECONDS = 5.0


class Requests:
    """The requests in flight, by tenant and id. Once draining, no more are taken."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._sagas: dict[tuple[str, str], Saga] = {}
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._sagas)

    def add(self, saga: Saga) -> None:
        if _key(saga) in self._sagas:
            raise AlreadyExistsError(
                f"request {saga.request.request_id!r} is in flight; choose another id"
            )
        self._sagas[_key(saga)] = saga

    def remove(self, saga: Saga) -> None:
        del self._sagas[_key(saga)]

    def abort(self, tenant: Tenant, request_id: str) -> None:
        """Raises `NotFoundError` for one that is not in flight, or is another tenant's."""
        saga = self._sagas.get((tenant.name, request_id))
        if saga is None:
            raise NotFoundError(f"no request {request_id!r} is in flight here")
        saga.abort()
        aborted = CancelledError(f"request {request_id} was aborted")
        self._gate.abandon(saga.request, aborted)

    async def drain(self) -> None:
        self.is_draining = True


def _key(saga: Saga) -> tuple[str, str]:
    return saga.request.tenant.name, saga.request.request_id


class InferenceService(pb_grpc.InferenceServicer):
    """Text in, tokens out."""

    def __init__(
        self,
        card: ModelCard,
        intake: Intake,
        fleet: Fleet,
        requests: Requests,
        tenants: Tenants,
        gate: Gate,
        placer: Placer,
        timeout: float,
        coalesce_seconds: float,
    ) -> None:
        self._card = card
        self._intake = intake
        self._fleet = fleet
        self._requests = requests
        self._tenants = tenants
        self._gate = gate
        self._placer = placer
        self._timeout = timeout
        self._coalesce_seconds = coalesce_seconds
        self._budget = RetryBudget()

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        arrived = time.monotonic()
        deadline = Deadline.of(context, self._timeout)
        tenant = self._tenants.of(context)
        if self._requests.is_draining:
            raise UnavailableError("the router is draining; another one will serve this")
        await self._fleet.first_look(min(deadline.remaining(), _FIRST_LOOK_SECONDS))
        deadline.check()
        good = await self._intake.read(request, self._fleet.max_model_len, tenant)
        answer = Answer(good, self._card, arrived)
        recovery = Recovery(good.request_id, self._budget)
        pace = Pace(self._coalesce_seconds)
        saga = Saga(good, self._fleet, self._placer, answer, recovery, deadline, pace)
        self._requests.add(saga)
        self._budget.deposit()
        try:
            # Closed here, so that all is given back before the request counts as ended.
            with request_logged_as(good.request_id):
                async with self._gate.turn(good, tenant.name, deadline) as answered:
                    try:
                        async with aclosing(saga.run()) as responses:
                            async for response in responses:
                                yield response
                    finally:
                        answered.num_output_tokens = answer.num_output_tokens
                        answered.first_token = answer.first_token_at
        finally:
            self._requests.remove(saga)
            self._placer.ended(good.request_id, answer.num_output_tokens)

    async def Tokenize(self, request: pb.TokenizeRequest, _context: Any) -> pb.TokenizeResponse:
        token_ids, text = await self._intake.tokenize(request)
        return pb.TokenizeResponse(token_ids=token_ids, text=text)

    async def GetModel(self, _request: pb.GetModelRequest, _context: Any) -> pb.GetModelResponse:
        card = self._card
        fingerprints = {m.record.fingerprint for m in self._fleet.members if m.is_serving}
        return pb.GetModelResponse(
            name=card.name,
            architecture=card.architecture,
            vocab_size=card.vocab_size,
            max_model_len=min(card.max_model_len, self._fleet.max_model_len),
            eos_token_ids=sorted(card.eos_token_ids),
            has_chat_template=card.chat_template is not None,
            fingerprint=min(fingerprints).hex() if fingerprints else "",
        )


class RouterAdmin(admin_pb2_grpc.AdminServicer):
    """Looks after the router, and through it after the cluster."""

    def __init__(
        self,
        fleet: Fleet,
        requests: Requests,
        tenants: Tenants,
        intake: Intake,
        placer: Placer,
        rebalancer: Rebalancer,
    ) -> None:
        self._fleet = fleet
        self._requests = requests
        self._tenants = tenants
        self._intake = intake
        self._placer = placer
        self._rebalancer = rebalancer

    async def ListWorkers(
        self, _request: admin_pb2.ListWorkersRequest, _context: Any
    ) -> admin_pb2.ListWorkersResponse:
        return admin_pb2.ListWorkersResponse(workers=[self._info(m) for m in self._fleet.members])

    async def ExplainPlacement(
        self, request: admin_pb2.ExplainPlacementRequest, context: Any
    ) -> admin_pb2.ExplainPlacementResponse:
        tenant = self._tenants.of(context)
        subject = request.WhichOneof("subject")
        if subject is None:
            raise InvalidArgumentError("subject", "is missing; set request or request_id")
        if subject == "request_id":
            return wire.explanation(self._placer.recall(request.request_id, tenant.name))
        good = await self._intake.read(request.request, self._fleet.max_model_len, tenant)
        received = good.received if good.params.num_sequences == 1 else ()
        return wire.explanation(self._placer.explain(work_of(good, *received)))

    async def GetLoad(
        self, _request: admin_pb2.GetLoadRequest, _context: Any
    ) -> admin_pb2.GetLoadResponse:
        draining = self._requests.is_draining
        return admin_pb2.GetLoadResponse(
            state=admin_pb2.WORKER_STATE_DRAINING if draining else admin_pb2.WORKER_STATE_READY,
            progress=1.0,
            num_running=len(self._requests),
        )

    async def Drain(
        self, _request: admin_pb2.DrainRequest, _context: Any
    ) -> admin_pb2.DrainResponse:
        await self._requests.drain()
        return admin_pb2.DrainResponse(num_requests=len(self._requests))

    async def SetRole(
        self, request: admin_pb2.SetRoleRequest, context: Any
    ) -> admin_pb2.SetRoleResponse:
        timeout = Deadline.of(context, _SET_ROLE_SECONDS).forward()
        changer, role = self._rebalancer.changer, role_of(request.role)
        epoch = await changer.set_role(request.worker, role, request.epoch, timeout)
        return admin_pb2.SetRoleResponse(epoch=epoch)

    async def GetRoleBalance(
        self, _request: admin_pb2.GetRoleBalanceRequest, _context: Any
    ) -> admin_pb2.GetRoleBalanceResponse:
        return wire.role_balance(self._rebalancer.balance, self._rebalancer.is_elastic)

    async def FlushCache(
        self, request: admin_pb2.FlushCacheRequest, _context: Any
    ) -> admin_pb2.FlushCacheResponse:
        counts = await asyncio.gather(
            *(self._flush(m, request) for m in self._fleet.members if m.is_serving)
        )
        return admin_pb2.FlushCacheResponse(num_blocks=sum(counts))

    async def Abort(self, request: admin_pb2.AbortRequest, context: Any) -> admin_pb2.AbortResponse:
        self._requests.abort(self._tenants.of(context), request.request_id)
        return admin_pb2.AbortResponse()

    async def _flush(self, member: Member, request: admin_pb2.FlushCacheRequest) -> int:
        with self._fleet.channel_to(member) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            try:
                response = await stub.FlushCache(request, timeout=_FLUSH_SECONDS)
            except grpc.aio.AioRpcError as error:
                logger.warning("%s did not flush its cache: %s", member.record.id, error.details())
                return 0
        return int(response.num_blocks)

    def _info(self, member: Member) -> admin_pb2.WorkerInfo:
        record = member.record
        return admin_pb2.WorkerInfo(
            id=record.id,
            role=role_to_message(record.role),
            endpoint=record.endpoint,
            epoch=record.epoch,
            state=_state(member),
            num_requests=member.load.num_sequences,
            num_indexed_blocks=self._fleet.index.num_blocks(record.id),
        )


def _state(member: Member) -> admin_pb2.WorkerState.ValueType:
    if member.record.draining:
        return admin_pb2.WORKER_STATE_DRAINING
    if member.is_serving and member.circuit.is_closed:
        return admin_pb2.WORKER_STATE_READY
    if member.was_reached:
        return admin_pb2.WORKER_STATE_UNREACHABLE
    return admin_pb2.WORKER_STATE_STARTING
