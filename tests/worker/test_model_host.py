"""Host of a worker's model: its engine for new work, and the process that the engine steps in."""

import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.core.engine_thread import EngineThread
from baton.engine.core.process.engine_process import EngineProcess
from baton.engine.core.process.pool_memory import MemoryNotSharedError
from baton.engine.executor.device import CUDA, Gpus
from baton.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from baton.sampling import SamplingParams
from baton.worker.model_host import ModelHost, child_for
from baton.worker.settings import WorkerSettings
from baton_kvtransfer.connectors.nixl.agent import Agent
from tests.support.worker.loaded_model import LoadedModel, membership_of
from tests.support.worker.pair import pair_of
from tests.support.worker.reference import alone, prompt_of

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
LENGTHS = (1, 16, 75, 160)


def settings(**changes: object) -> WorkerSettings:
    return WorkerSettings(redis_url=None, **changes)


ONE_GPU: Any = SimpleNamespace(device_count=lambda: 1)


@pytest.fixture
def _has_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = module_from_spec(ModuleSpec("nixl", None))
    monkeypatch.setitem(sys.modules, "nixl", installed)


@pytest.fixture
def _lacks_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)


def test_engine_steps_in_a_thread_where_the_settings_say_so():
    assert child_for(settings(device="cpu", engine_process="no")) is None


@pytest.mark.usefixtures("_has_nixl")
def test_engine_on_a_cpu_has_a_process_by_default():
    has_process(settings(device="cpu"))
    has_process(settings(device="auto"))


@pytest.mark.usefixtures("_lacks_nixl")
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_engine_on_a_gpu_has_a_process_by_default(device):
    has_process(settings(device=device), ONE_GPU)
    forced = settings(device=device, engine_process="yes", kv_connector="cuda-ipc")
    has_process(forced, ONE_GPU)


@pytest.mark.usefixtures("_has_nixl")
@pytest.mark.parametrize("device", ["auto", "cuda:0"])
@pytest.mark.parametrize("connector", ["auto", "nixl"])
def test_engine_steps_in_a_thread_if_nixl_moves_gpu_blocks(caplog, device, connector):
    with caplog.at_level(logging.INFO):
        assert child_for(settings(device=device, kv_connector=connector), ONE_GPU) is None
    assert "the engine steps in a thread: nixl, which is to move blocks," in caplog.text
    forced = settings(device=device, kv_connector=connector, engine_process="yes")
    with pytest.raises(InvalidArgumentError, match=r"engine_process: is yes, but nixl, .* or no"):
        child_for(forced, ONE_GPU)
    has_process(settings(device=device, kv_connector="grpc"), ONE_GPU)


@pytest.mark.usefixtures("_lacks_nixl")
def test_engine_steps_in_a_thread_if_package_moves_gpu_blocks(caplog):
    given = settings(device="cuda:0").model_copy(update={"kv_connector": "fabric"})
    with caplog.at_level(logging.INFO):
        assert child_for(given) is None
    assert "in a thread: --kv-connector fabric is of another package" in caplog.text


def has_process(given: WorkerSettings, gpus: Gpus = CUDA) -> None:
    child = child_for(given, gpus)
    assert child is not None
    child.kill()
    child.reap()
    child.close()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_handoff_between_pools_opened_by_handle(checkpoint, forks_by_handle, ipc, family):
    model, prompts = checkpoint(family), [prompt_of(n) for n in LENGTHS]
    expected = alone(model, prompts, GREEDY)
    async with pair_of(model, fork=forks_by_handle.fork, max_num_batched_tokens=24) as pair:
        for worker in (pair.prefill, pair.decode):
            assert isinstance(worker.model.engine.handle, EngineProcess)
            assert all(pool.mapped is not None for pool in worker.model.engine.pools)
            with pytest.raises(UnavailableError, match="nixl registers no GPU memory of another"):
                Agent(worker.model.engine.pools, None, is_read=True)
        for prompt, tokens in zip(prompts, expected, strict=True):
            answer = await pair.hand_over(prompt, GREEDY)
            assert [o.token_ids for o in answer.outputs] == tokens
            assert answer.kv_ready.connector == "grpc"
    assert not ipc.opened


async def test_engine_steps_in_a_thread_if_memory_cannot_be_opened(
    checkpoint, forks_by_handle, ipc, caplog
):
    model, prompt = checkpoint("llama"), prompt_of(40)
    ipc.problems["open"] = "no peer mapping"
    async with pair_of(model, fork=forks_by_handle.fork) as pair:
        for worker in (pair.prefill, pair.decode):
            assert isinstance(worker.model.engine.handle, EngineThread)
        answer = await pair.hand_over(prompt, GREEDY)
        assert [o.token_ids for o in answer.outputs] == alone(model, [prompt], GREEDY)[0]
    assert caplog.text.count("steps in a thread: the server cannot open the memory") == 2


async def test_engine_process_is_refused_if_memory_cannot_be_opened(
    checkpoint, forks_by_handle, ipc
):
    ipc.problems["open"] = "no peer mapping"
    children = iter([forks_by_handle.fork()])
    fork = partial(next, children, None)
    with pytest.raises(MemoryNotSharedError, match="no peer mapping; give --engine-process no"):
        async with pair_of(checkpoint("llama"), fork=fork, engine_process="yes"):
            pass


async def test_model_host_has_an_engine_for_new_work_of_its_role():
    member = membership_of("prefill")
    model = LoadedModel(settings(), member)
    assert model.engine_for("prefill") is model.engine_for(None) is model.engine
    with pytest.raises(UnavailableError, match="w is in the prefill role now; another one will"):
        model.engine_for("decode")
    with pytest.raises(FailedPreconditionError, match="the encode role needs an encoder"):
        model.check_serves("encode")
    await member.drain()
    for role in (None, "prefill", "decode"):
        with pytest.raises(UnavailableError, match="worker w is draining"):
            model.engine_for(role)


async def test_model_host_names_the_reason_for_a_role_that_it_keeps():
    model = LoadedModel(settings(), membership_of("encode", encoder_only=True))
    kept = "w is in the encode role for good: it has loaded the encoder alone"
    with pytest.raises(UnavailableError, match=kept):
        model.engine_for("decode")


async def test_model_host_raises_once_its_engine_has_failed(forks):
    given = settings(device="cpu", num_blocks=8, engine_process="yes")
    child = forks.fork()
    model = ModelHost(given, membership_of("prefill"), child)
    with pytest.raises(UnavailableError, match="not ready yet: starting"):
        model.engine_for("prefill")
    async with AsyncExitStack() as stack:
        await model.load(stack)
        assert model.engine_for("prefill") is model.engine
        failure = asyncio.ensure_future(model.failure())
        await asyncio.sleep(0)
        assert not failure.done()
        child.kill()
        with pytest.raises(UnavailableError, match=r"^the engine failed: "):
            await asyncio.wait_for(failure, 10.0)
