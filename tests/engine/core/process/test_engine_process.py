"""Engine in a process of its own: memory and errors as in a thread, and the death of either."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.core.commands import FlushCache
from baton.engine.core.process import child
from baton.engine.core.process.control import NotShared, Start, receive, send
from baton.engine.core.process.engine_process import EngineProcess
from baton.engine.core.process.pool_memory import MemoryNotSharedError
from baton.engine.core.process.reading_page import ReadingPage
from baton.engine.core.process.ring import Ring
from baton.engine.executor.cache.cuda_ipc import MappedMemory
from baton.engine.llm import LLM
from baton.engine.request import EngineRequest, KvSource, Purpose
from baton.errors import BatonError, InternalError, InvalidArgumentError, UnavailableError
from baton.sampling import Grammar, GrammarKind, SamplingParams
from tests.support.engine.prompts import NUM_TOKENS, random_prompt
from tests.support.engine.streams import assert_empty, read, running

CONFIG = EngineConfig(
    device="cpu", dtype="float32", num_blocks=48, block_size=8, num_threads=1, shared_pools=True
)
PROMPT = random_prompt(40)
ENDLESS = SamplingParams(max_tokens=80, ignore_eos=True)


def request(params: SamplingParams = ENDLESS, name: str = "a") -> EngineRequest:
    return EngineRequest(name, PROMPT, params, len(PROMPT))


Load = Callable[..., EngineProcess]


@pytest.fixture
def load(forks) -> Load:
    return lambda path, config=CONFIG: EngineProcess.load(forks.fork(), path, config)


@pytest.fixture(params=["by descriptor", "by handle"])
def load_either(request) -> Load:
    """Loads an engine whose pools this process opens as those of a CPU, and as those of a GPU."""
    if request.param == "by descriptor":
        return request.getfixturevalue("load")
    request.getfixturevalue("ipc")
    forks = request.getfixturevalue("forks_by_handle")
    return lambda path, config=CONFIG: EngineProcess.load(forks.fork(), path, config)


async def test_engine_reads_blocks_that_its_parent_writes(load_either, checkpoints, oracle):
    expected = oracle(checkpoints["llama"], PROMPT, NUM_TOKENS)
    short = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    async with running(load_either(checkpoints["llama"])) as serving:
        (pool,) = serving.pools
        assert (pool.shared is None) != (pool.mapped is None)
        with serving.open(replace(request(short), purpose=Purpose.PREFILL)) as source:
            last = (await read(source))[-1]
            assert last.token_id == expected[0]
            other = replace(
                request(short, "b"), kv_source=KvSource.EXTERNAL, salt=b"shares no prefix"
            )
            with serving.open(other) as stream:
                (target,) = (await stream.allocation()).block_ids
                assert not set(target) & set(last.block_ids[0])
                pool.write_blocks(target, [bytes(b) for b in pool.read_blocks(last.block_ids[0])])
                stream.commit_external(expected[0])
                tokens = [update.token_id for update in await read(stream)]
        assert tuple(tokens) == expected[1:]
        await assert_empty(serving)


async def test_pools_opened_by_handle_are_closed_after_stop(ipc, forks_by_handle, checkpoints):
    """Their places are the engine's, where other workers open them."""
    core = EngineProcess.load(forks_by_handle.fork(), checkpoints["gemma3"], CONFIG)
    async with running(core) as serving:
        assert len(ipc.opened) == len(serving.pools) == 2
        for pool in serving.pools:
            assert pool.mapped is not None
            pool.content[1] = 5
            other = MappedMemory(pool.mapped.place, pool.content.nbytes, pool.device, ipc)
            assert torch.equal(other.content, pool.content.view(-1))
            other.close()
    assert not ipc.opened


@pytest.mark.parametrize(
    ("broken", "problem"),
    [("open", "no peer mapping"), ("view", "no peer mapping"), ("content", "has other content")],
)
def test_load_says_why_memory_of_the_process_cannot_be_opened(
    ipc, forks_by_handle, checkpoints, broken, problem
):
    """Before the model is loaded, so that it can be loaded elsewhere."""
    ipc.problems[broken] = "no peer mapping"
    ipc.shows_content = broken != "content"
    phases: list[str] = []
    forked_child = forks_by_handle.fork()
    with pytest.raises(MemoryNotSharedError, match=f"on cpu: .*{problem}.*--engine-process no"):
        EngineProcess.load(
            forked_child, checkpoints["llama"], CONFIG, lambda phase, _: phases.append(phase)
        )
    assert not phases
    assert not ipc.opened
    assert forked_child.exit_code is not None


def test_load_says_why_the_process_cannot_export_memory(ipc, checkpoints):
    """Read by the child's own code, in this process."""
    ipc.problems["export"] = "not permitted"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        rings = [Ring.create(1 << 12), Ring.create(1 << 12)]
        page = ReadingPage.create()
        descriptors = [*rings[0].descriptors, *rings[1].descriptors, page.descriptor]
        send(ours, Start(checkpoints["llama"], CONFIG), descriptors)
        assert child.run(theirs) == 1
        message, _ = receive(ours)
    assert isinstance(message, NotShared)
    assert "on cpu: not permitted; give --engine-process no" in message.problem


async def test_pools_are_not_shared_with_workers_unless_asked(load, checkpoints):
    async with running(load(checkpoints["llama"], replace(CONFIG, shared_pools=False))) as serving:
        assert [pool.shared for pool in serving.pools] == [None]


async def test_grammars_are_compiled_in_the_process(load, checkpoints):
    digits = SamplingParams(max_tokens=6, grammar=Grammar(GrammarKind.REGEX, "[0-9]{3}"))
    broken = replace(digits, grammar=Grammar(GrammarKind.REGEX, "[0-9"))
    async with running(load(checkpoints["tiny"])) as serving:
        for params, output, problem in (
            (broken, (), "sampling.grammar"),
            (digits, (300, 301), "does not allow"),
        ):
            bad = replace(request(params), token_ids=(*PROMPT, *output))
            with pytest.raises(InvalidArgumentError, match=problem):
                await serving.compile_grammar(bad)
        with serving.open(request(digits), await serving.compile_grammar(request(digits))) as one:
            ended = [u.token_id for u in await read(one) if u.token_id is not None]
        with LLM.from_pretrained(checkpoints["tiny"], CONFIG) as thread:
            (alone,) = thread.generate([PROMPT], digits)
        assert tuple(ended) == alone.token_ids
        await assert_empty(serving)


async def test_command_larger_than_its_ring_passes_in_parts(load, checkpoints):
    hashes = tuple(i.to_bytes(16, "big") for i in range(200_000))
    async with running(load(checkpoints["llama"])) as serving:
        began = time.perf_counter()
        assert await serving.flush_cache(hashes) == 0
        assert await serving._query(FlushCache(10**6, ())) == 0
        assert time.perf_counter() - began < 60


async def test_engine_steps_on_while_the_event_loop_stands_still(load, checkpoints):
    with LLM.from_pretrained(checkpoints["llama"], CONFIG) as thread:
        (expected,) = thread.generate([PROMPT], ENDLESS)
    async with running(load(checkpoints["llama"])) as serving:
        with serving.open(request()) as stream:
            deadline = time.monotonic() + 60
            while serving.reading.time_spent.num_steps < 80 and time.monotonic() < deadline:
                time.sleep(0.01)  # noqa: ASYNC251 - it stands still
            assert serving.reading.time_spent.num_steps >= 80
            tokens = [update.token_id for update in await read(stream)]
        assert tuple(tokens) == expected.token_ids
        await assert_empty(serving)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda core: os.kill(core.child.pid, signal.SIGKILL), "was killed by SIGKILL"),
        (lambda core: os.kill(core.child.pid, signal.SIGABRT), "was killed by SIGABRT"),
        (lambda core: core._writer.write(b"\xff no command"), "ended with code 1"),
    ],
    ids=["killed", "aborted", "error"],
)
async def test_death_of_the_process_fails_streams_with_its_reason(
    load_either, checkpoints, end, reason
):
    reasons: asyncio.Queue[str] = asyncio.Queue()
    core = load_either(checkpoints["llama"])
    async with running(core, on_failure=reasons.put_nowait) as serving:
        with serving.open(request()) as stream:
            await anext(stream.updates())
            end(core)
            with pytest.raises(InternalError, match="failed while this request"):
                await read(stream)
        assert reason in await asyncio.wait_for(reasons.get(), 30)
        with pytest.raises(InternalError, match="has failed"):
            serving.open(request())
        assert serving.reading.time_spent.num_steps > 0
    assert reasons.empty()
    assert not psutil.pid_exists(core.child.pid)


def test_load_raises_the_reason_if_the_process_is_killed(forks, checkpoints):
    child = forks.fork()
    child.kill()
    with pytest.raises(UnavailableError, match=r"loaded: its process .* killed by SIGKILL"):
        EngineProcess.load(child, checkpoints["llama"], CONFIG)


def test_load_raises_the_errors_of_the_engine(forks, tmp_path):
    path = str(tmp_path / "nothing")
    with pytest.raises(BatonError) as expected:
        LLM.from_pretrained(path, CONFIG)
    child = forks.fork()
    with pytest.raises(type(expected.value)) as found:
        EngineProcess.load(child, path, CONFIG)
    assert str(found.value) == str(expected.value)
    assert child.exit_code == 1


@contextmanager
def forked(path: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A process with an engine in a child, which streams; and that child."""
    command = [sys.executable, "-m", "tests.support.engine.forked_engine", path]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        yield parent, psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


@pytest.mark.nightly  # workers and their engines do so in tests/e2e/test_engine_process.py
def test_engine_dies_with_its_parent(checkpoints):
    with forked(checkpoints["llama"]) as (parent, child):
        parent.kill()
        parent.wait()
        assert psutil.wait_procs([child], timeout=10)[1] == []


@pytest.mark.nightly
def test_engine_ignores_sigterm_and_parent_says_how_it_died(checkpoints):
    with forked(checkpoints["llama"]) as (parent, child):
        for signum in (signal.SIGTERM, signal.SIGINT):
            child.send_signal(signum)
        time.sleep(0.3)
        assert child.is_running()
        child.kill()
        said, _ = parent.communicate(timeout=60)
    assert f"process {child.pid} was killed by SIGKILL" in said
    assert parent.returncode == 0
