"""Workers with their engines in processes of their own: the death of either is noticed."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from unittest.mock import patch

import psutil
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.wide import restored
from tests.support.repository import ROOT
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


SITE = ROOT / "tests" / "support" / "by_handle_site"


@pytest.fixture(
    scope="module", params=["by descriptor", pytest.param("by handle", marks=pytest.mark.nightly)]
)
def started(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Workers that open the pools of their engines as those of a CPU, and as those of a GPU."""
    changes = {}  # with none, processes are forked from those of other tests
    if request.param == "by handle":
        paths = [str(SITE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        changes["PYTHONPATH"] = os.pathsep.join(paths)
    with (
        patch.dict(os.environ, changes),
        LocalCluster(
            num_decode=2,
            worker_flags={"engine_process": "yes", "engine_timeout_s": 3.0},
        ) as running,
    ):
        yield running


@pytest.fixture
def cluster(started: LocalCluster) -> LocalCluster:
    return restored(started)


def engine_of(cluster: LocalCluster, name: str) -> psutil.Process:
    (child,) = psutil.Process(cluster.process(name).pid).children()
    return child


async def test_engines_in_threads_and_processes_answer_alike(cluster, request):
    prompts = [prompt_of(40, seed=i) for i in range(4)]
    answers = []
    with LocalCluster(worker_flags={"engine_process": "no"}) as threads:
        assert not psutil.Process(threads.process("decode-0").pid).children()
        for address in (cluster.address, threads.address):
            async with AsyncClient(address) as client:
                generations = [client.generate(p, LONG) for p in prompts]
                answers.append([await generation.token_ids() for generation in generations])
        await until_nothing_is_held(threads)
    assert answers[0] == answers[1]
    is_by_handle = "by handle" in request.node.name
    assert f"by {'grpc' if is_by_handle else 'shm'}: " in cluster.process("decode-0").log_tail()


async def test_requests_survive_the_death_of_an_engine(cluster):
    prompts = [prompt_of(40, seed=i) for i in range(4)]
    async with AsyncClient(cluster.address) as client:
        expected = [await client.generate(p, LONG).token_ids() for p in prompts]
        generations = [client.generate(p, LONG) for p in prompts]
        for generation in generations:
            await anext(generation)
            await anext(generation)
        engine_of(cluster, "decode-0").kill()
        found = [await generation.token_ids() for generation in generations]
        assert found == expected
        decode = cluster.process("decode-0")
        await until_observed(lambda: not decode.is_running, within=20.0)
        assert re.search(
            r"decode: the engine failed: its process \d+ was killed by SIGKILL", decode.log_tail()
        )
        # gRPC itself may log a health check that it cancels as the worker ends.
        assert "EngineFailedError" not in decode.log_path.read_text()
        await asyncio.to_thread(cluster.restart, "decode-0")
        await until_nothing_is_held(cluster)


async def test_engine_ends_with_its_worker_however_that_ends(cluster):
    for name, signum in (("decode-0", signal.SIGKILL), ("decode-1", signal.SIGTERM)):
        engine = engine_of(cluster, name)
        cluster.process(name).signal(signum)
        await until_observed(lambda one=engine: not one.is_running(), within=20.0)


async def test_engine_that_stands_still_loses_its_requests_to_others(cluster):
    prompts = [prompt_of(40, seed=i) for i in range(6)]
    async with AsyncClient(cluster.address, timeout=60.0) as client:
        expected = [await client.generate(p, LONG).token_ids() for p in prompts]
        generations = [client.generate(p, LONG) for p in prompts]
        for generation in generations:
            await anext(generation)
            await anext(generation)
        decode = cluster.process("decode-0")
        engine_of(cluster, "decode-0").suspend()
        found = [await generation.token_ids() for generation in generations]
        assert found == expected
        new = [client.generate(p, LONG) for p in prompts]
        assert [await generation.token_ids() for generation in new] == expected
        await until_observed(lambda: not decode.is_running, within=20.0)
        assert "the engine failed: it stood still for 3 s with" in decode.log_tail()
        await asyncio.to_thread(cluster.restart, "decode-0")
        await until_nothing_is_held(cluster)
