"""Watch of an engine: one that stands still is ended, one that waits or works is not."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baton.engine.client import EngineClient
from baton.engine.config import EngineConfig
from baton.engine.core.assembly import LoadedModel
from baton.engine.core.engine_core import EngineCore, OnPlanned
from baton.engine.core.engine_thread import EngineThread
from baton.engine.core.process.engine_process import EngineProcess
from baton.engine.outputs import StepOutput
from baton.engine.request import EngineRequest, KvSource
from baton.engine.watch import watch_engine
from baton.errors import InternalError
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.engine.streams import read
from tests.support.waiting import until

CONFIG = EngineConfig(device="cpu", dtype="float32", num_blocks=48, block_size=8, num_threads=1)
PROMPT = tuple(range(5, 45))
REQUEST = EngineRequest("a", PROMPT, SamplingParams(max_tokens=80, ignore_eos=True), len(PROMPT))
TIMEOUT = 0.4


@asynccontextmanager
async def watched(core: EngineProcess | EngineThread) -> AsyncIterator[EngineClient]:
    """An engine that runs and is watched, for the length of the block."""
    engine = EngineClient(core)
    engine.start()
    watching = asyncio.create_task(watch_engine(engine, TIMEOUT))
    try:
        yield engine
    finally:
        watching.cancel()
        await engine.stop()


@pytest.fixture
def load(forks) -> Callable[[], EngineProcess]:
    return lambda: EngineProcess.load(forks.fork(), str(locate("tiny")), CONFIG)


async def test_engine_that_stands_still_with_work_is_ended(load):
    core = load()
    async with watched(core) as engine:
        with engine.open(REQUEST) as stream:
            await anext(stream.updates())
            signal.pidfd_send_signal(core.child.pidfd, signal.SIGSTOP)
            with pytest.raises(InternalError, match="failed while this request"):
                await read(stream)
        with pytest.raises(InternalError, match="has failed"):
            engine.open(REQUEST)
    assert core.child.exit_code == -signal.SIGKILL


class HangingCore(EngineCore):
    """Its steps wait from the third on until they may go on, as for a driver."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        super().__init__(config, loaded)
        self.may_go_on = threading.Event()
        self._num_steps = 0

    def step(self, on_planned: OnPlanned = lambda: None) -> StepOutput:
        self._num_steps += 1
        if self._num_steps > 2:
            self.may_go_on.wait(60.0)
        return super().step(on_planned)


async def test_engine_thread_that_hangs_beside_a_busy_server_is_ended():
    core = HangingCore.from_pretrained(str(locate("tiny")), CONFIG)
    async with watched(EngineThread(core)) as engine:
        with engine.open(REQUEST) as stream:
            await anext(stream.updates())
            reading = asyncio.create_task(read(stream))
            await until(reading.done)  # which takes CPU time of this process
            with pytest.raises(InternalError, match="failed while this request"):
                await reading
    core.may_go_on.set()


async def test_engine_that_waits_for_kv_is_not_ended(load):
    waiting = replace(REQUEST, kv_source=KvSource.EXTERNAL, num_external_tokens=len(PROMPT))
    async with watched(load()) as engine:
        with engine.open(waiting):
            num_reports = engine.num_reports
            await until(lambda: engine.num_reports > num_reports + 30)
        with engine.open(replace(REQUEST, request_id="b")) as stream:
            assert len(await read(stream)) == 80


async def test_killed_engine_in_a_thread_fails_its_streams():
    core = EngineThread(EngineCore.from_pretrained(str(locate("tiny")), CONFIG))
    engine = EngineClient(core)
    engine.start()
    with engine.open(REQUEST) as stream:
        engine.kill("it stood still")
        with pytest.raises(InternalError, match="failed while this request"):
            await read(stream)
    await engine.stop()
