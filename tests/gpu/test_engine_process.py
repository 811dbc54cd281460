"""Engine in a process of its own: other processes open its pools on the GPU, its parent first."""

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from baton.engine.client import EngineClient, SequenceStream
from baton.engine.config import EngineConfig
from baton.engine.outputs import SequenceUpdate
from baton.engine.request import EngineRequest, KvSource, Purpose
from baton.errors import InternalError
from baton.sampling import SamplingParams
from tests.support.repository import ROOT

PROMPT = tuple(range(2, 60))
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def forks() -> Iterator[Any]:
    for module in ("msgspec", "setproctitle"):
        pytest.importorskip(module)
    from tests.support.engine.zygote import zygote

    with zygote() as forking:
        yield forking


@asynccontextmanager
async def running(core: Any) -> AsyncIterator[EngineClient]:
    engine = EngineClient(core)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def updates_of(stream: SequenceStream) -> list[SequenceUpdate]:
    return [update async for batch in stream.updates() for update in batch]


@pytest.fixture
def core(forks: Any, folder: Any, settings: dict[str, Any]) -> Any:
    from baton.engine.core.process.engine_process import EngineProcess

    config = {**settings, "shared_pools": True, "kernels": "auto", "prefix_caching": False}
    if settings["device"] == "cpu":
        config["kernels"] = "torch"
    return EngineProcess.load(forks.fork(), folder("llama"), EngineConfig(**config))


def test_engine_process_reads_blocks_that_its_parent_writes(
    core: Any, folder: Any, load: Any, device: str
) -> None:
    expected = load(folder("llama"), kernels="torch", device="cpu").generate([PROMPT], PARAMS)
    first = EngineRequest("a", PROMPT, PARAMS, len(PROMPT), Purpose.PREFILL)
    then = EngineRequest("b", PROMPT, PARAMS, len(PROMPT), kv_source=KvSource.EXTERNAL)

    async def hand_over() -> list[int | None]:
        async with running(core) as engine:
            (pool,) = engine.pools
            assert pool.device.type == device
            with engine.open(first) as source, engine.open(then) as stream:
                last = (await updates_of(source))[-1]
                (target,) = (await stream.allocation()).block_ids
                content = [bytes(piece) for piece in pool.read_blocks(last.block_ids[0])]
                pool.write_blocks(target, content)
                stream.commit_external(last.token_id)
                return [last.token_id, *(update.token_id for update in await updates_of(stream))]

    assert tuple(asyncio.run(hand_over())) == expected[0].token_ids


@pytest.mark.gpu  # the interpreter has no memory of a GPU for others to open
def test_pools_of_engine_process_are_opened_by_other_processes(core: Any) -> None:
    """By the places that its parent offers."""

    async def read() -> None:
        async with running(core) as engine:
            (pool,) = engine.pools
            assert pool.mapped is not None
            noise = torch.randint(256, pool.content.shape, dtype=torch.uint8, device=pool.device)
            pool.content.copy_(noise)
            torch.cuda.synchronize()
            place = pool.mapped.place
            arguments = (place.handle.hex(), place.offset, pool.content.nbytes, pool.device)
            command = [sys.executable, "-m", "tests.support.kernels.far_reader"]
            found = await asyncio.to_thread(
                subprocess.check_output, [*command, *map(str, arguments)], text=True, cwd=ROOT
            )
            assert found.strip() == hashlib.sha256(noise.cpu().numpy().tobytes()).hexdigest()

    asyncio.run(read())


def test_parent_survives_a_killed_engine_process(core: Any, device: str) -> None:
    async def kill() -> None:
        async with running(core) as engine:
            with engine.open(EngineRequest("a", PROMPT, PARAMS, len(PROMPT))) as stream:
                os.kill(core.child.pid, signal.SIGKILL)
                with pytest.raises(InternalError, match="failed while this request"):
                    await updates_of(stream)

    asyncio.run(kill())
    assert float(torch.ones(2**20, device=device).sum()) == 2**20
