"""Process of a worker's engine: as the settings say, and as the device allows."""

import logging
from functools import partial

import pytest
import torch

from baton.engine.core.engine_thread import EngineThread
from baton.engine.process.engine_process import EngineProcess
from baton.engine.process.pool_memory import MemoryNotSharedError
from baton.errors import InvalidArgumentError, UnavailableError
from baton.sampling import SamplingParams
from baton.worker import engine_process
from baton.worker.engine_process import child_for
from baton.worker.settings import WorkerSettings
from baton_kvtransfer.connectors.nixl.agent import Agent
from tests.support.worker.pair import pair_of
from tests.support.worker.reference import alone, prompt_of

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
LENGTHS = (1, 16, 75, 160)


def settings(**changes: object) -> WorkerSettings:
    return WorkerSettings(redis_url=None, **changes)


@pytest.fixture
def _has_nixl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "find_spec", lambda _name: request.param)


@pytest.fixture
def _has_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


with_nixl = pytest.mark.parametrize("_has_nixl", [True], indirect=True, ids=["nixl"])
without_nixl = pytest.mark.parametrize("_has_nixl", [None], indirect=True, ids=["no nixl"])


def test_engine_steps_in_a_thread_where_the_settings_say_so():
    assert child_for(settings(device="cpu", engine_process="no")) is None


@with_nixl
@pytest.mark.usefixtures("_has_nixl")
def test_engine_on_a_cpu_has_a_process_by_default():
    has_process(settings(device="cpu"))
    has_process(settings(device="auto"))


@without_nixl
@pytest.mark.usefixtures("_has_nixl", "_has_gpu")
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_engine_on_a_gpu_has_a_process_by_default(device):
    has_process(settings(device=device))
    has_process(settings(device=device, engine_process="yes", kv_connector="cuda-ipc"))


@with_nixl
@pytest.mark.usefixtures("_has_nixl", "_has_gpu")
@pytest.mark.parametrize("device", ["auto", "cuda:0"])
@pytest.mark.parametrize("connector", ["auto", "nixl"])
def test_engine_steps_in_a_thread_if_nixl_moves_gpu_blocks(caplog, device, connector):
    with caplog.at_level(logging.INFO):
        assert child_for(settings(device=device, kv_connector=connector)) is None
    assert "the engine steps in a thread: nixl, which is to move blocks," in caplog.text
    with pytest.raises(InvalidArgumentError, match=r"engine_process: is yes, but nixl, .* or no"):
        child_for(settings(device=device, kv_connector=connector, engine_process="yes"))
    has_process(settings(device=device, kv_connector="grpc"))


@without_nixl
@pytest.mark.usefixtures("_has_nixl")
def test_engine_steps_in_a_thread_if_package_moves_gpu_blocks(caplog):
    given = settings(device="cuda:0").model_copy(update={"kv_connector": "fabric"})
    with caplog.at_level(logging.INFO):
        assert child_for(given) is None
    assert "in a thread: --kv-connector fabric is of another package" in caplog.text


def has_process(given: WorkerSettings) -> None:
    child = child_for(given)
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
            assert isinstance(worker.engine.core, EngineProcess)
            assert all(pool.mapped is not None for pool in worker.engine.pools)
            with pytest.raises(UnavailableError, match="nixl registers no GPU memory of another"):
                Agent(worker.engine.pools, None, is_read=True)
        for prompt, tokens in zip(prompts, expected, strict=True):
            answer = await pair.hand_over(prompt, GREEDY)
            assert [o.token_ids for o in answer.outputs] == tokens
            assert answer.kv_ready.connector == "grpc"
    assert not ipc.opened


async def test_engine_steps_in_a_thread_if_memory_cannot_be_opened(
    checkpoint, forks_by_handle, ipc, monkeypatch, caplog
):
    model, prompt = checkpoint("llama"), prompt_of(40)
    monkeypatch.setattr(ipc, "open", cannot_open)
    async with pair_of(model, fork=forks_by_handle.fork) as pair:
        for worker in (pair.prefill, pair.decode):
            assert isinstance(worker.engine.core, EngineThread)
        answer = await pair.hand_over(prompt, GREEDY)
        assert [o.token_ids for o in answer.outputs] == alone(model, [prompt], GREEDY)[0]
    assert caplog.text.count("steps in a thread: the server cannot open the memory") == 2


async def test_engine_process_is_refused_if_memory_cannot_be_opened(
    checkpoint, forks_by_handle, ipc, monkeypatch
):
    monkeypatch.setattr(ipc, "open", cannot_open)
    children = iter([forks_by_handle.fork()])
    fork = partial(next, children, None)
    with pytest.raises(MemoryNotSharedError, match="no peer mapping; give --engine-process no"):
        async with pair_of(checkpoint("llama"), fork=fork, engine_process="yes"):
            pass


def cannot_open(*_: object) -> int:
    raise RuntimeError("no peer mapping")
