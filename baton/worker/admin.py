"""Admin service of a worker in any role."""

from typing import Any

import torch

from baton.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from baton.rpc.roles import role_of
from baton.serving import build_info
from baton.v1 import admin_pb2 as pb
from baton.v1 import admin_pb2_grpc as pb_grpc
from baton.worker.pairing import describe_layouts
from baton.worker.role_changes import RoleChanges
from baton.worker.wire import hashes_of
from baton.worker.worker import Worker


class WorkerAdmin(pb_grpc.AdminServicer):
    """Admin service of one worker. `ListWorkers`, `ExplainPlacement` and `GetRoleBalance` are the
    router's."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._role_changes = RoleChanges(worker)

    async def GetLoad(self, _request: pb.GetLoadRequest, _context: Any) -> pb.GetLoadResponse:
        worker = self._worker
        if not worker.is_ready:
            return pb.GetLoadResponse(
                state=pb.WORKER_STATE_STARTING,
                phase=worker.phase,
                progress=worker.progress,
                num_loaded_bytes=worker.num_loaded_bytes,
                num_weight_bytes=worker.num_weight_bytes,
            )
        stats, draining = worker.engine.reading.stats, worker.is_draining
        return pb.GetLoadResponse(
            state=pb.WORKER_STATE_DRAINING if draining else pb.WORKER_STATE_READY,
            progress=1.0,
            num_waiting=stats.num_waiting + stats.num_awaiting_kv + stats.num_swapped,
            num_running=stats.num_running,
            num_blocks=stats.num_blocks,
            num_held_blocks=stats.num_held_blocks,
            num_cached_blocks=stats.num_cached_blocks,
            num_preemptions=stats.num_preemptions,
            num_steps=worker.engine.reading.time_spent.num_steps,
            num_swaps=stats.num_swaps,
            num_returns=stats.num_returns,
            num_swapped=stats.num_swapped,
            num_drafted_tokens=stats.num_drafted_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            num_computed_tokens=stats.num_computed_tokens,
            num_pulled_tokens=stats.num_pulled_tokens,
            is_paused=worker.engine.is_paused,
            idle_since_unix_ms=build_info.unix_ms(worker.idle_since),
            num_encode_jobs=stats.num_encode_jobs,
            num_waiting_encode_jobs=stats.num_waiting_encode_jobs,
            num_waiting_encoder_tokens=stats.num_waiting_encoder_tokens,
            num_encoder_blocks=stats.num_encoder_blocks,
            num_held_encoder_blocks=stats.num_held_encoder_blocks,
            num_cached_encoder_blocks=stats.num_cached_encoder_blocks,
            **worker.load_report(),  # type: ignore[arg-type] # fields by name
        )

    async def GetInfo(self, _request: pb.GetInfoRequest, _context: Any) -> pb.GetInfoResponse:
        worker = self._worker
        return build_info.info(
            has_redis=bool(worker.settings.redis_url),
            redis_answers=worker.redis_answers,
            worker=_facts(worker) if worker.is_ready else None,
        )

    async def ListWorkers(
        self, _request: pb.ListWorkersRequest, _context: Any
    ) -> pb.ListWorkersResponse:
        raise NotImplementedError("a worker knows no other; ask the router")

    async def ExplainPlacement(
        self, _request: pb.ExplainPlacementRequest, _context: Any
    ) -> pb.ExplainPlacementResponse:
        raise NotImplementedError("a worker places no requests; ask the router")

    async def ListRequests(
        self, _request: pb.ListRequestsRequest, _context: Any
    ) -> pb.ListRequestsResponse:
        raise NotImplementedError("a worker knows parts of requests only; ask the router")

    async def Drain(self, _request: pb.DrainRequest, _context: Any) -> pb.DrainResponse:
        await self._worker.drain()
        num_requests = self._worker.engine.num_streams if self._worker.is_ready else 0
        return pb.DrainResponse(num_requests=num_requests)

    async def PauseAdmission(
        self, _request: pb.PauseAdmissionRequest, _context: Any
    ) -> pb.PauseAdmissionResponse:
        engine = self._worker.engine
        if self._worker.is_draining:
            raise FailedPreconditionError(
                "the worker is draining and finishes the requests that wait; pause another one"
            )
        engine.pause()
        return pb.PauseAdmissionResponse(num_waiting=engine.reading.stats.num_waiting)

    async def ResumeAdmission(
        self, _request: pb.ResumeAdmissionRequest, _context: Any
    ) -> pb.ResumeAdmissionResponse:
        engine = self._worker.engine
        num_waiting = engine.reading.stats.num_waiting
        engine.resume()
        return pb.ResumeAdmissionResponse(num_waiting=num_waiting)

    async def SetRole(self, request: pb.SetRoleRequest, _context: Any) -> pb.SetRoleResponse:
        if request.worker not in ("", self._worker.id):
            raise NotFoundError(f"this worker is {self._worker.id!r}, not {request.worker!r}")
        role = role_of(request.role)
        return pb.SetRoleResponse(epoch=await self._role_changes.set_role(role, request.epoch))

    async def GetRoleBalance(
        self, _request: pb.GetRoleBalanceRequest, _context: Any
    ) -> pb.GetRoleBalanceResponse:
        raise NotImplementedError("a worker knows no other; ask the router")

    async def GetMemory(self, _request: pb.GetMemoryRequest, _context: Any) -> pb.GetMemoryResponse:
        return pb.GetMemoryResponse(workers=[await _memory(self._worker)])

    async def FlushCache(
        self, request: pb.FlushCacheRequest, _context: Any
    ) -> pb.FlushCacheResponse:
        hashes, given = None, request.WhichOneof("input")
        if given == "block_hashes":
            hashes = hashes_of(request.block_hashes, "block_hashes")
        elif given is not None:
            raise InvalidArgumentError(
                given, "is a prompt, which workers cannot tokenize; ask the router"
            )
        return pb.FlushCacheResponse(num_blocks=await self._worker.engine.flush_cache(hashes))

    async def Abort(self, request: pb.AbortRequest, _context: Any) -> pb.AbortResponse:
        self._worker.engine.cancel(request.request_id)
        return pb.AbortResponse()


def _facts(worker: Worker) -> pb.WorkerFacts:
    engine = worker.engine
    return pb.WorkerFacts(
        id=worker.id,
        model=worker.settings.model_name,
        fingerprint=engine.facts.info.fingerprint,
        layouts=describe_layouts(engine.facts.layouts),
        kv_endpoint=worker.kv_server.endpoint,
        device=_name_of(engine.device),
    )


async def _memory(worker: Worker) -> pb.WorkerMemory:
    engine = worker.engine
    report, stats = await engine.memory_report(), engine.reading.stats
    return pb.WorkerMemory(
        worker=worker.id,
        block_size=engine.facts.block_size,
        pool_bytes=engine.facts.pool_bytes,
        num_blocks=stats.num_blocks,
        num_held_blocks=stats.num_held_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_free_blocks=stats.num_free_blocks,
        num_saved_blocks=report.num_saved_blocks,
        num_unused_tokens=report.num_wasted_slots,
        num_reserved_tokens=stats.num_reserved_blocks * engine.facts.block_size,
        host_pool_bytes=engine.facts.host_pool_bytes,
        num_host_blocks=stats.num_host_blocks,
        num_held_host_blocks=stats.num_held_host_blocks,
        num_swapped_out_blocks=stats.num_swapped_out_blocks,
        num_swapped_in_blocks=stats.num_swapped_in_blocks,
    )


def _name_of(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"
