"""Admin service of a worker in any role."""

from collections import Counter
from typing import Any

import torch

from baton.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from baton.rpc.roles import role_of
from baton.serving import build_info
from baton.v1 import admin_pb2 as pb
from baton.v1 import admin_pb2_grpc as pb_grpc
from baton.worker.engine_messages import hashes_of
from baton.worker.pairing import describe_layouts
from baton.worker.role_changes import RoleChanges
from baton.worker.worker import Worker


class WorkerAdmin(pb_grpc.AdminServicer):
    """Admin service of one worker. `ListWorkers`, `ExplainPlacement`, `ListRequests` and
    `GetRoleBalance` are the router's."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._membership = worker.membership
        self._model = worker.model
        self._role_changes = RoleChanges(worker.membership, worker.model)

    async def GetLoad(self, _request: pb.GetLoadRequest, _context: Any) -> pb.GetLoadResponse:
        if not self._membership.is_ready:
            progress = self._model.progress
            return pb.GetLoadResponse(
                state=pb.WORKER_STATE_STARTING,
                phase=progress.phase,
                progress=progress.fraction,
                num_loaded_bytes=progress.num_loaded_bytes,
                num_weight_bytes=progress.num_weight_bytes,
            )
        engine, server = self._model.engine, self._worker.server
        # Blocks are the engine's; leases and promises end with their calls.
        times = (engine.reading.idle_since, server.main.idle_since, server.kv.idle_since)
        idle_since = None if None in times else max(t for t in times if t is not None)
        stats, draining, reports = (
            engine.reading.stats,
            self._membership.is_draining,
            Counter[str](),
        )
        for report in self._worker.load_reports:
            reports.update(report())
        return pb.GetLoadResponse(
            state=pb.WORKER_STATE_DRAINING if draining else pb.WORKER_STATE_READY,
            progress=1.0,
            num_waiting=stats.num_waiting + stats.num_awaiting_kv + stats.num_swapped,
            num_running=stats.num_running,
            num_blocks=stats.num_blocks,
            num_held_blocks=stats.num_held_blocks,
            num_cached_blocks=stats.num_cached_blocks,
            num_preemptions=stats.num_preemptions,
            num_steps=engine.reading.time_spent.num_steps,
            num_swaps=stats.num_swaps,
            num_returns=stats.num_returns,
            num_swapped=stats.num_swapped,
            num_drafted_tokens=stats.num_drafted_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            num_computed_tokens=stats.num_computed_tokens,
            num_pulled_tokens=stats.num_pulled_tokens,
            is_paused=engine.is_paused,
            idle_since_unix_ms=build_info.unix_ms(idle_since),
            num_encode_jobs=stats.num_encode_jobs,
            num_waiting_encode_jobs=stats.num_waiting_encode_jobs,
            num_waiting_encoder_tokens=stats.num_waiting_encoder_tokens,
            num_encoder_blocks=stats.num_encoder_blocks,
            num_held_encoder_blocks=stats.num_held_encoder_blocks,
            num_cached_encoder_blocks=stats.num_cached_encoder_blocks,
            **reports,  # type: ignore[arg-type] # fields by name
        )

    async def GetInfo(self, _request: pb.GetInfoRequest, _context: Any) -> pb.GetInfoResponse:
        facts = None
        if self._membership.is_ready:
            engine = self._model.engine
            length = engine.facts.context_length
            facts = pb.WorkerFacts(
                id=self._membership.id,
                model=self._model.name,
                fingerprint=engine.facts.info.fingerprint,
                content=engine.facts.info.content,
                layouts=describe_layouts(engine.facts.layouts),
                kv_endpoint=self._worker.server.kv.endpoint,
                device=_name_of(engine.device),
                max_model_len=length.model,
                num_pool_tokens=length.pool or 0,
                dtype=engine.facts.info.dtype,
            )
        return build_info.info(
            has_redis=self._worker.settings.redis.url is not None,
            redis_answers=self._membership.redis_answers,
            worker=facts,
        )

    async def Drain(self, _request: pb.DrainRequest, _context: Any) -> pb.DrainResponse:
        await self._membership.drain()
        num_requests = self._model.engine.num_streams if self._membership.is_ready else 0
        return pb.DrainResponse(num_requests=num_requests)

    async def PauseAdmission(
        self, _request: pb.PauseAdmissionRequest, _context: Any
    ) -> pb.PauseAdmissionResponse:
        engine = self._model.engine
        if self._membership.is_draining:
            raise FailedPreconditionError(
                "the worker is draining and finishes the requests that wait; pause another one"
            )
        engine.pause()
        return pb.PauseAdmissionResponse(num_waiting=engine.reading.stats.num_waiting)

    async def ResumeAdmission(
        self, _request: pb.ResumeAdmissionRequest, _context: Any
    ) -> pb.ResumeAdmissionResponse:
        engine = self._model.engine
        num_waiting = engine.reading.stats.num_waiting
        engine.resume()
        return pb.ResumeAdmissionResponse(num_waiting=num_waiting)

    async def SetRole(self, request: pb.SetRoleRequest, _context: Any) -> pb.SetRoleResponse:
        if request.worker not in ("", self._membership.id):
            raise NotFoundError(f"this worker is {self._membership.id!r}, not {request.worker!r}")
        role = role_of(request.role)
        return pb.SetRoleResponse(epoch=await self._role_changes.set_role(role, request.epoch))

    async def GetMemory(self, _request: pb.GetMemoryRequest, _context: Any) -> pb.GetMemoryResponse:
        engine = self._model.engine
        report, stats = await engine.memory_report(), engine.reading.stats
        memory = pb.WorkerMemory(
            worker=self._membership.id,
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
        return pb.GetMemoryResponse(workers=[memory])

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
        return pb.FlushCacheResponse(num_blocks=await self._model.engine.flush_cache(hashes))

    async def Abort(self, request: pb.AbortRequest, _context: Any) -> pb.AbortResponse:
        self._model.engine.cancel(request.request_id)
        return pb.AbortResponse()


def _name_of(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"
