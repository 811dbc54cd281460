"""A request over two engines in two processes: one computes its prompt, the other its answer."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from baton.engine.client import EngineClient, SequenceStream
from baton.engine.core.engine_thread import EngineThread
from baton.engine.request import EngineRequest, KvSource
from baton.sampling import SamplingParams
from baton_kvtransfer.connector import Integrity, Receiver
from baton_kvtransfer.stream.block_batch import BlockBatch
from tests.support.kernels.far_engine import connector_for
from tests.support.kernels.far_pool import offer_of
from tests.support.repository import ROOT

pytestmark = pytest.mark.smoke

BLOCK_SIZE = 16
PROMPTS = [tuple(range(2, 60)), tuple(range(70, 90))]
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (8, 64)]
SOURCES = (KvSource.EXTERNAL, KvSource.LOCAL)


@contextmanager
def far_engine(path: str, settings: dict[str, Any]) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.support.kernels.far_engine", path, json.dumps(settings)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def line_of(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    return json.loads(await asyncio.to_thread(process.stdout.readline))


async def fetch(
    process: "subprocess.Popen[str]", receiver: Receiver, engine: EngineClient, targets: Any
) -> int:
    """Fetches the blocks of the first prompt as they are announced; returns its first token."""
    num_fetched, token_id = 0, None
    while token_id is None:
        num_computed, block_ids, token_id = await line_of(process)
        num_done = num_computed // BLOCK_SIZE if token_id is None else len(targets)
        new = slice(num_fetched, num_done)
        if block_ids[0][new]:
            batch = BlockBatch(0, num_fetched, source_blocks=tuple(block_ids[0][new]))
            await receiver.receive(batch, engine.pools[0], targets[new], Integrity.FENCE)
        num_fetched = num_done
    return int(token_id)


async def tokens_of(stream: SequenceStream) -> tuple[int, ...]:
    updates = [update async for batch in stream.updates() for update in batch]
    return tuple(u.token_id for u in updates if u.token_id is not None)


async def hand_over(
    process: "subprocess.Popen[str]", engine: EngineClient, delay: float
) -> list[tuple[int, ...]]:
    """Returns the tokens of both prompts, of which the far engine computes the first."""
    handed_over, beside = (
        EngineRequest(source.name, prompt, params, len(prompt), kv_source=source)
        for prompt, params, source in zip(PROMPTS, PARAMS, SOURCES, strict=True)
    )
    offer = offer_of(json.dumps(await line_of(process)))
    receiver = await connector_for(engine.pools).attach(offer)
    assert process.stdin is not None
    process.stdin.write(json.dumps([handed_over.token_ids, delay]) + "\n")
    process.stdin.flush()
    with engine.open(handed_over) as stream, engine.open(beside) as other:
        tokens_beside = asyncio.create_task(tokens_of(other))
        (targets,) = (await stream.allocation()).block_ids
        first = await fetch(process, receiver, engine, targets)
        stream.commit_external(first)
        found = [(first, *await tokens_of(stream)), await tokens_beside]
    receiver.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("delay", [pytest.param(0.0, marks=pytest.mark.gpu), 0.1])
def test_request_runs_over_two_processes_beside_another(folder, load, settings, delay):
    """Blocks arrive chunk by chunk, while the source's steps are late and the claimant decodes."""
    path, is_cpu = folder("llama"), settings["device"] == "cpu"
    changes = {"prefix_caching": False, "kernels": "torch" if is_cpu else "triton"}
    far = {"max_num_batched_tokens": BLOCK_SIZE, "shared_pools": is_cpu}
    expected = load(path, kernels="torch", device="cpu").generate(PROMPTS, PARAMS)
    engine = EngineClient(EngineThread(load(path, **changes).core))

    async def run() -> list[tuple[int, ...]]:
        engine.start()
        try:
            with far_engine(path, {**settings, **changes, **far}) as process:
                return await hand_over(process, engine, delay)
        finally:
            await engine.stop()

    assert asyncio.run(run()) == [result.token_ids for result in expected]
