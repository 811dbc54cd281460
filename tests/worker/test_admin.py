"""Administration of one worker."""

from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from baton.cluster.prefix import hash_chain
from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.models import locate
from baton.sampling import SamplingParams
from baton.v1 import admin_pb2 as pb
from baton.v1.admin_pb2_grpc import AdminStub
from baton.worker.admin import WorkerAdmin
from baton.worker.metrics import WorkerMetrics
from baton.worker.process import assemble
from baton.worker.roles import settings_class
from baton.worker.worker import Worker
from tests.support.failures import failure_of, status_of
from tests.support.waiting import until
from tests.support.worker.pair import COMMON, TIMEOUT, pair_of, rest_of

TINY = locate("tiny")
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def metric_of(worker: Worker, name: str) -> float:
    """The only value of a metric."""
    ((sample,),) = [
        m.samples
        for m in WorkerMetrics(worker.model, worker.membership).collect()
        if m.name == name
    ]
    return sample.value


@pytest.mark.parametrize("ends", ["ResumeAdmission", "Drain"])
async def test_paused_worker_starts_no_request_until_resume_or_drain(ends):
    async with pair_of(TINY) as pair:
        admin, engine = pair.decode_admin, pair.decode.model.engine
        await admin.PauseAdmission(pb.PauseAdmissionRequest(), timeout=TIMEOUT)
        assert (await admin.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT)).is_paused
        assert metric_of(pair.decode, "baton_worker_paused") == 1
        call = pair.to_decode.Generate(pair.decode_request([5, 6, 7], PARAMS), timeout=TIMEOUT)
        assert (await call.read()).HasField("admitted")
        await until(lambda: engine.reading.stats.num_waiting == 1)
        await getattr(admin, ends)(getattr(pb, f"{ends}Request")(), timeout=TIMEOUT)
        assert (await rest_of(call))[-1].HasField("finished")
        if ends == "Drain":
            paused = admin.PauseAdmission(pb.PauseAdmissionRequest(), timeout=TIMEOUT)
            assert isinstance(await failure_of(paused), FailedPreconditionError)
        assert not engine.is_paused
        assert metric_of(pair.decode, "baton_worker_paused") == 0


async def test_worker_flushes_block_hashes_and_refuses_prompts():
    async with pair_of(TINY) as pair:
        engine, prompt = pair.decode.model.engine, list(range(3, 43))
        await pair.decode_alone(prompt, PARAMS)
        hashes = hash_chain(engine.facts.info.namespace.root(), prompt, engine.facts.block_size)
        for drop, num_blocks in ((hashes[1:], 1), (hashes, 1), (hashes, 0)):
            request = pb.FlushCacheRequest(block_hashes=b"".join(drop))
            response = await pair.decode_admin.FlushCache(request, timeout=TIMEOUT)
            assert response.num_blocks == num_blocks
        for wrong in ({"block_hashes": b"short"}, {"text": "a prompt"}):
            call = pair.decode_admin.FlushCache(pb.FlushCacheRequest(**wrong), timeout=TIMEOUT)
            assert isinstance(await failure_of(call), InvalidArgumentError)


async def test_worker_memory_counts_shared_and_unused_slots():
    several = SamplingParams(max_tokens=200, n=3, temperature=1.0, seed=1, ignore_eos=True)
    async with pair_of(TINY) as pair:
        call = pair.to_decode.Generate(pair.decode_request([5] * 100, several), timeout=TIMEOUT)
        while not (await call.read()).HasField("tokens"):
            pass
        response = await pair.decode_admin.GetMemory(pb.GetMemoryRequest(), timeout=TIMEOUT)
        call.cancel()
        (used,) = response.workers
        assert (used.worker, used.num_blocks) == (pair.decode.membership.id, COMMON["num_blocks"])
        # The tail is shared until each sequence writes to it.
        num_full = 100 // used.block_size
        assert 2 * num_full <= used.num_saved_blocks <= 2 * (num_full + 1)
        assert 0 < used.num_unused_tokens <= 3 * used.block_size


async def test_worker_is_starting_until_all_of_it_is_set_up() -> None:
    worker = assemble("decode", settings_class()(worker_id="w", device="cpu", num_blocks=8))
    admin, seen = WorkerAdmin(worker), []

    async def look(_stack: AsyncExitStack) -> None:
        load = await admin.GetLoad(pb.GetLoadRequest(), None)
        seen.append((load.state, load.phase, load.progress))

    worker.model.on_load.append(look)
    async with AsyncExitStack() as stack:
        await worker.server.start(stack)
        await look(stack)
        await worker.load(stack)
        await look(stack)
    assert seen == [
        (pb.WORKER_STATE_STARTING, "starting", 0.0),
        (pb.WORKER_STATE_STARTING, "opening connections", 1.0),
        (pb.WORKER_STATE_READY, "", 1.0),
    ]
    size = (Path(locate("tiny")) / "model.safetensors").stat().st_size
    progress = worker.model.progress
    assert (progress.num_loaded_bytes, progress.num_weight_bytes) == (size, size)


@pytest.mark.parametrize(
    "method", ["ListWorkers", "ExplainPlacement", "ListRequests", "GetRoleBalance"]
)
async def test_worker_leaves_calls_about_all_workers_to_router(method):
    async with AsyncExitStack() as stack:
        worker = assemble("decode", settings_class()(worker_id="w"))
        await worker.server.start(stack)
        endpoint = worker.server.main.admin_endpoint
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(endpoint))
        call = getattr(AdminStub(channel), method)
        status = await status_of(call(getattr(pb, f"{method}Request")()))
    assert status.code() is grpc.StatusCode.UNIMPLEMENTED
    assert status.details() == f"/baton.v1.Admin/{method} is not offered here"
