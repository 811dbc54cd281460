"""Admin service of the router."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import grpc
from google.protobuf.message import Message

from baton.errors import BatonError, InvalidArgumentError, UnavailableError
from baton.rpc.errors import error_of
from baton.rpc.roles import role_of, role_to_message
from baton.serving import build_info
from baton.serving.deadline import Deadline
from baton.serving.tenant import Tenants, is_administrator
from baton.v1 import admin_pb2, admin_pb2_grpc
from baton_router.apis.grpc import admin_wire
from baton_router.apis.grpc.call_wire import CallReader, input_of
from baton_router.apis.grpc.client_wire import pooled_output_to_message
from baton_router.call.prompt import NO_PROMPT, Prompt
from baton_router.call.request import work_of
from baton_router.lifecycle.in_flight import Requests
from baton_router.lifecycle.worker_wire import duration
from baton_router.routing.admission.readiness import RouterReadiness
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.fleet.fleets import Fleets
from baton_router.routing.fleet.member import Member, State
from baton_router.served.served_models import Models, ServedModel

logger = logging.getLogger(__name__)

# Timeout of a call to each worker, in seconds.
_WORKER_SECONDS = 5.0
_REQUESTS_LISTED, _MOST_REQUESTS_LISTED = 20, 1000
_MOST_RECORDS_LISTED = 100
# Seconds for a worker to drain if the caller sets no deadline.
_SET_ROLE_SECONDS = 600.0


_STATES: dict[State, admin_pb2.WorkerState.ValueType] = {
    "ready": admin_pb2.WORKER_STATE_READY,
    "draining": admin_pb2.WORKER_STATE_DRAINING,
    "unreachable": admin_pb2.WORKER_STATE_UNREACHABLE,
    "starting": admin_pb2.WORKER_STATE_STARTING,
}


class RouterAdmin(admin_pb2_grpc.AdminServicer):
    """Admin service of the router, and through it of the cluster."""

    add_to_server = staticmethod(admin_pb2_grpc.add_AdminServicer_to_server)

    def __init__(
        self,
        models: Models,
        fleets: Fleets,
        requests: Requests,
        readiness: RouterReadiness,
        tenants: Tenants,
        calls: CallReader,
        begin_drain: Callable[[], None],
    ) -> None:
        self._models = models
        self._fleets = fleets
        self._requests = requests
        self._readiness = readiness
        self._tenants = tenants
        self._calls = calls
        self._begin_drain = begin_drain

    async def ListWorkers(
        self, _request: admin_pb2.ListWorkersRequest, _context: Any
    ) -> admin_pb2.ListWorkersResponse:
        workers = [
            _info(member, served)
            for served in self._models
            for member in served.services.fleet.members
        ]
        return admin_pb2.ListWorkersResponse(workers=sorted(workers, key=lambda one: one.id))

    async def ListRequests(
        self, request: admin_pb2.ListRequestsRequest, context: Any
    ) -> admin_pb2.ListRequestsResponse:
        limit = min(request.limit or _REQUESTS_LISTED, _MOST_REQUESTS_LISTED)
        tenant, requests = self._tenants.of(context), self._requests
        listed = requests.all() if is_administrator(context) else requests.of(tenant)
        now = time.monotonic()
        return admin_pb2.ListRequestsResponse(
            requests=[
                admin_wire.request_info(
                    lifecycle.request, lifecycle.account, lifecycle.placement, now
                )
                for lifecycle in listed[:limit]
            ]
        )

    async def ExplainPlacement(
        self, request: admin_pb2.ExplainPlacementRequest, context: Any
    ) -> admin_pb2.ExplainPlacementResponse:
        tenant = self._tenants.of(context)
        subject = request.WhichOneof("subject")
        if subject is None:
            raise InvalidArgumentError("subject", "is missing; set request or request_id")
        if subject == "request_id":
            served, decision = self._models.decision_of(request.request_id, tenant.name)
            return admin_wire.explanation(decision, served.name)
        served = self._models.of(request.request.model, request.request.request_id)
        services = served.services
        limit = services.fleet.context_length
        good = await services.intake.read(
            await self._calls.generation(request.request), limit, tenant
        )
        decision = services.placer.explain(work_of(good, good.received))
        return admin_wire.explanation(decision, served.name)

    async def GetLoad(
        self, _request: admin_pb2.GetLoadRequest, _context: Any
    ) -> admin_pb2.GetLoadResponse:
        state, reason = admin_pb2.WORKER_STATE_READY, self._readiness.reason
        if self._requests.is_draining:
            state, reason = admin_pb2.WORKER_STATE_DRAINING, ""
        elif reason:
            state = admin_pb2.WORKER_STATE_STARTING
        return admin_pb2.GetLoadResponse(
            state=state,
            phase=reason,
            progress=0.0 if reason else 1.0,
            num_waiting=self._requests.num_waiting + self._readiness.num_waiting,
            num_running=len(self._requests) - self._requests.num_waiting,
            is_paused=self._requests.is_paused,
            idle_since_unix_ms=build_info.unix_ms(self._requests.idle_since),
        )

    async def GetInfo(
        self, _request: admin_pb2.GetInfoRequest, _context: Any
    ) -> admin_pb2.GetInfoResponse:
        refused = islice(self._fleets.refused_records.items(), _MOST_RECORDS_LISTED)
        return build_info.info(
            has_redis=True,
            redis_answers=self._fleets.is_redis_up,
            worker=None,
            refused_records=dict(refused),
        )

    async def Drain(
        self, _request: admin_pb2.DrainRequest, _context: Any
    ) -> admin_pb2.DrainResponse:
        self._begin_drain()
        return admin_pb2.DrainResponse(num_requests=len(self._requests))

    async def PauseAdmission(
        self, _request: admin_pb2.PauseAdmissionRequest, _context: Any
    ) -> admin_pb2.PauseAdmissionResponse:
        self._requests.pause()
        return admin_pb2.PauseAdmissionResponse(num_waiting=self._requests.num_waiting)

    async def ResumeAdmission(
        self, _request: admin_pb2.ResumeAdmissionRequest, _context: Any
    ) -> admin_pb2.ResumeAdmissionResponse:
        num_waiting = self._requests.num_waiting
        self._requests.resume()
        return admin_pb2.ResumeAdmissionResponse(num_waiting=num_waiting)

    async def SetRole(
        self, request: admin_pb2.SetRoleRequest, context: Any
    ) -> admin_pb2.SetRoleResponse:
        timeout = Deadline.of(context, _SET_ROLE_SECONDS).forward()
        served, role = self._models.of(self._fleets.model_of(request.worker)), role_of(request.role)
        changer = served.rebalancer.changer
        epoch = await changer.set_role(request.worker, role, request.epoch, timeout)
        return admin_pb2.SetRoleResponse(epoch=epoch)

    async def GetRoleBalance(
        self, request: admin_pb2.GetRoleBalanceRequest, _context: Any
    ) -> admin_pb2.GetRoleBalanceResponse:
        served = self._models.of(request.model)
        rebalancer = served.rebalancer
        return admin_wire.role_balance(rebalancer.balance, rebalancer.is_elastic, served.name)

    async def FlushCache(
        self, request: admin_pb2.FlushCacheRequest, context: Any
    ) -> admin_pb2.FlushCacheResponse:
        tenant = self._tenants.of(context)
        prompt, salt = NO_PROMPT, None
        kind = request.WhichOneof("input")
        is_prompt = kind not in (None, "block_hashes")
        chosen = [self._models.of(request.model)] if is_prompt or request.model else self._models
        if kind and is_prompt:
            intake = self._models.of(request.model).services.intake
            given, salt = await input_of(request), tenant.salt
            read = await intake.prompt_of(given, tenant=tenant)
            images = tuple(each.salted(salt).hashed for each in read.encoder_inputs)
            prompt = Prompt(tuple(read.token_ids), salt, images)

        async def flush(fleet: Fleet, member: Member) -> int | BatonError:
            asked = request
            if is_prompt:
                contents = [content_hash for _, _, content_hash in prompt.images]
                hashes = b"".join([*prompt.hashes(member.namespace), *contents])
                asked = admin_pb2.FlushCacheRequest(block_hashes=hashes)
            try:
                response = await self._call(fleet, member, "FlushCache", asked)
            except BatonError as error:
                return error
            return int(response.num_blocks)

        for served in chosen:
            served.services.intake.forget(salt, images=bool(prompt.images) or not is_prompt)
        # Draining and unreachable workers too: their caches may be used again.
        members = [
            (served.services.fleet, member)
            for served in chosen
            for member in served.services.fleet.members
        ]
        results = await asyncio.gather(*(flush(*one) for one in members))
        failures = {
            member.record.id: result
            for (_, member), result in zip(members, results, strict=True)
            if isinstance(result, BatonError)
        }
        if failures:
            raise _not_flushed(failures)
        return admin_pb2.FlushCacheResponse(
            num_blocks=sum(n for n in results if isinstance(n, int))
        )

    async def GetMemory(
        self, request: admin_pb2.GetMemoryRequest, _context: Any
    ) -> admin_pb2.GetMemoryResponse:
        async def ask(fleet: Fleet, member: Member) -> Sequence[admin_pb2.WorkerMemory]:
            response = await self._ask(fleet, member, "GetMemory", request)
            return [] if response is None else response.workers

        serving = [
            (served.services.fleet, member)
            for served in self._models
            for member in served.services.fleet.members
            if member.is_serving
        ]
        found = chain.from_iterable(await asyncio.gather(*(ask(*one) for one in serving)))
        return admin_pb2.GetMemoryResponse(workers=sorted(found, key=lambda one: one.worker))

    async def Abort(self, request: admin_pb2.AbortRequest, context: Any) -> admin_pb2.AbortResponse:
        self._requests.abort(self._tenants.of(context), request.request_id)
        return admin_pb2.AbortResponse()

    async def _ask(self, fleet: Fleet, member: Member, method: str, request: Message) -> Any:
        """Returns a worker's response to a call of its Admin service; None if it fails."""
        try:
            return await self._call(fleet, member, method, request)
        except BatonError as error:
            logger.warning("%s: %s failed: %s", member.record.id, method, error)
            return None

    async def _call(self, fleet: Fleet, member: Member, method: str, request: Message) -> Any:
        """Returns a worker's response to a call of its Admin service. Raises the error of a call
        that fails."""
        with fleet.admin_channel_to(member) as channel:
            call = getattr(admin_pb2_grpc.AdminStub(channel), method)
            try:
                return await call(request, timeout=_WORKER_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise error_of(error) from error


def _info(member: Member, served: ServedModel) -> admin_pb2.WorkerInfo:
    record = member.record
    return admin_pb2.WorkerInfo(
        id=record.id,
        role=role_to_message(record.role),
        endpoint=record.endpoint,
        admin_endpoint=member.admin_endpoint,
        epoch=record.epoch,
        state=_STATES[member.state],
        num_requests=member.load.num_sequences,
        num_indexed_hashes=served.services.fleet.index.num_hashes(record.id),
        version=record.version,
        model=served.name,
        pooled_output=pooled_output_to_message(record.pooled_output),
        step_time=duration(member.model.step_seconds),
        slowness=member.model.slowness,
    )


def _not_flushed(failures: Mapping[str, BatonError]) -> BatonError:
    """Returns the error of a cache flush that these workers have failed."""
    for error in failures.values():
        if isinstance(error, InvalidArgumentError):
            return error
    listed = "; ".join(f"{worker}: {error}" for worker, error in failures.items())
    return UnavailableError(
        f"the cache of {', '.join(failures)} was not flushed ({listed}); the other workers have "
        "flushed theirs. Flush again once `baton workers` shows these ready, or restart them."
    )
