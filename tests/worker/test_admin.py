"""Administration of one worker."""

import pytest

from baton.cluster.prefix import hash_chain
from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.models import locate
from baton.sampling import SamplingParams
from baton.v1 import admin_pb2 as pb
from baton.worker.metrics import WorkerMetrics
from baton.worker.worker import Worker
from tests.support.failures import failure_of
from tests.support.waiting import until
from tests.support.worker.pair import COMMON, TIMEOUT, pair_of, rest_of

TINY = locate("tiny")
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def metric_of(worker: Worker, name: str) -> float:
    """The only value of a metric."""
    ((sample,),) = [m.samples for m in WorkerMetrics(worker).collect() if m.name == name]
    return sample.value


@pytest.mark.parametrize("ends", ["ResumeAdmission", "Drain"])
async def test_paused_worker_starts_no_request_until_resume_or_drain(ends):
    async with pair_of(TINY) as pair:
        admin, engine = pair.decode_admin, pair.decode.engine
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
        engine, prompt = pair.decode.engine, list(range(3, 43))
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
        assert (used.worker, used.num_blocks) == (pair.decode.id, COMMON["num_blocks"])
        # The tail is shared until each sequence writes to it.
        num_full = 100 // used.block_size
        assert 2 * num_full <= used.num_saved_blocks <= 2 * (num_full + 1)
        assert 0 < used.num_unused_tokens <= 3 * used.block_size
