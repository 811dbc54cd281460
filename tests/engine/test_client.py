"""The engine behind its thread: streams may end at any moment, and nothing is left behind."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import torch

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.prefix import PrefixNamespace
from baton.engine.client import EngineClient, SequenceStream
from baton.engine.config import EngineConfig
from baton.engine.core.engine_core import EngineCore, OnPlanned
from baton.engine.core.engine_thread import EngineThread
from baton.engine.core.reports import EngineReading
from baton.engine.executor.cache.kv_pool import KvCache
from baton.engine.facts import EngineFacts, ModelInfo
from baton.engine.llm import LLM
from baton.engine.metering.step_times import StepClock
from baton.engine.outputs import SequenceUpdate, StepOutput
from baton.engine.request import EngineRequest, FinishReason, KvSource, Purpose
from baton.errors import (
    AlreadyExistsError,
    BatonError,
    CancelledError,
    EngineFailedError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from baton.sampling import SamplingParams
from tests.engine.conftest import Checkpoints, Serve
from tests.support.engine.engines import load
from tests.support.engine.prompts import NUM_TOKENS, random_prompt
from tests.support.engine.streams import assert_empty, read, running, settled

NOTHING = KvEvents((), (), False)
PROMPT = random_prompt(40)


def request(
    request_id: str = "a",
    max_tokens: int = NUM_TOKENS,
    purpose: Purpose = Purpose.GENERATE,
    source: KvSource = KvSource.LOCAL,
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id, PROMPT, params, len(PROMPT), purpose, source)


INFO = ModelInfo(
    name="scripted",
    architecture="None",
    dtype="float32",
    vocab_size=1000,
    max_model_len=1000,
    eos_token_ids=frozenset(),
    content=b"",
    fingerprint=b"",
    namespace=PrefixNamespace(b"", b"", "float32", 16),
)
FACTS = EngineFacts(INFO, "cpu", 16, 4, 64, layouts=(), num_blocks=(), num_host_blocks=())


class ScriptedCore:
    """Steps when the test allows it, one update for every sequence it has, or fails.

    Tokens count from 100 for the first sequence added, from 200 for the second and so on.
    """

    facts = FACTS
    device = torch.device("cpu")
    cache = KvCache([], [], [])

    def __init__(self) -> None:
        self.core = self.scheduler = self
        self.requests: dict[str, int] = {}
        self.aborted: list[str] = []
        self.num_added = 0
        self.is_closed = False
        self.clock = StepClock()
        self.begun = threading.Semaphore(0)
        self.allow = threading.Semaphore(0)
        self.error: Exception | None = None

    def take_grammar(self, number: int | None) -> None:
        assert number is None

    def add(self, request: EngineRequest, _grammar: None) -> None:
        assert request.request_id not in self.requests
        self.num_added += 1
        self.requests[request.request_id] = 100 * self.num_added

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.requests.pop(request_id, None)

    def flush_cache(self, _hashes: object) -> int:
        return 7

    def memory_report(self) -> None:
        return

    def reading(self) -> None:
        return

    def close(self) -> None:
        self.is_closed = True

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self, _on_planned: OnPlanned) -> StepOutput:
        self.begun.release()
        assert self.allow.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        updates = []
        for request_id, token in self.requests.items():
            updates.append(SequenceUpdate(request_id, 0, token, token % 100))
            self.requests[request_id] += 1
        made_progress, times = bool(updates), self.clock.note_step(time.perf_counter())
        return StepOutput(tuple(updates), (), NOTHING, made_progress, times)


SIZES: dict[str, Any] = {
    "num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 8,
}  # fmt: skip


@pytest.fixture
async def engine(serve: Serve, checkpoints: Checkpoints) -> AsyncIterator[EngineClient]:
    async with serve(checkpoints["llama"], **SIZES) as serving:
        yield serving


@pytest.fixture
async def threaded(checkpoints: Checkpoints) -> AsyncIterator[EngineClient]:
    config = EngineConfig(device="cpu", **SIZES)
    async with running(LLM.from_pretrained(checkpoints["llama"], config)) as serving:
        yield serving


def tokens(updates: list[SequenceUpdate]) -> tuple[int, ...]:
    return tuple(u.token_id for u in updates if u.token_id is not None)


async def test_concurrent_streams_equal_streams_run_alone(engine, checkpoints, oracle):
    async def one(index: int) -> tuple[int, ...]:
        prompt = random_prompt(5 + 9 * index)
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        with engine.open(EngineRequest(str(index), prompt, params, len(prompt))) as stream:
            updates = await read(stream)
        assert [u.position for u in updates if u.token_id is not None] == list(range(NUM_TOKENS))
        return tokens(updates)

    got = await asyncio.gather(*map(one, range(8)))
    path = checkpoints["llama"]
    assert got == [oracle(path, random_prompt(5 + 9 * i), NUM_TOKENS) for i in range(8)]
    await assert_empty(engine)


async def leave_at_once(_stream: SequenceStream) -> None:
    return


async def leave_after_a_first_update(stream: SequenceStream) -> None:
    async for _batch in stream.updates():
        return


async def leave_during_decoding(stream: SequenceStream) -> None:
    async for batch in stream.updates():
        if batch[-1].position >= 2:
            return


async def leave_at_the_end(stream: SequenceStream) -> None:
    await read(stream)


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize(
    "leave", [leave_at_once, leave_after_a_first_update, leave_during_decoding, leave_at_the_end]
)
async def test_stream_closed_at_any_stage_frees_its_blocks(engine, leave, purpose):
    for _ in range(3):
        with engine.open(request(purpose=purpose)) as stream:
            await leave(stream)
    await assert_empty(engine)


async def test_stream_frees_its_blocks_when_its_reader_fails(engine):
    async def reader() -> None:
        with engine.open(request()) as stream:
            async for _batch in stream.updates():
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await reader()
    await assert_empty(engine)


async def test_stream_frees_its_blocks_when_its_reader_is_cancelled(engine):
    started = asyncio.Event()

    async def reader() -> None:
        with engine.open(request(max_tokens=80)) as stream:
            async for _batch in stream.updates():
                started.set()

    task = asyncio.create_task(reader())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_empty(engine)


async def test_external_stream_closed_at_any_stage_frees_its_blocks(
    engine,
):
    external = request(source=KvSource.EXTERNAL)
    with engine.open(external):
        pass
    with engine.open(external) as stream:
        allocation = await stream.allocation()
        (table,) = allocation.block_ids
        assert len(table) == 5
    with engine.open(external) as stream:
        await stream.allocation()
        stream.commit_external(3)
    with engine.open(external) as stream:
        await stream.allocation()
        stream.commit_external(3)
        updates = await read(stream)
        assert [u.position for u in updates] == list(range(1, NUM_TOKENS))
    await assert_empty(engine)


async def test_external_stream_may_end_with_its_first_token(engine):
    with engine.open(request(max_tokens=1, source=KvSource.EXTERNAL)) as stream:
        await stream.allocation()
        stream.commit_external(3)
        (update,) = await read(stream)
        assert (update.token_id, update.finish_reason) == (3, FinishReason.LENGTH)
    await assert_empty(engine)


async def test_allocation_waits_until_blocks_are_free(engine):
    external = [request(str(i), max_tokens=8, source=KvSource.EXTERNAL) for i in range(5)]
    streams = [engine.open(r) for r in external]
    allocations = [await stream.allocation() for stream in streams[:4]]
    late = asyncio.create_task(streams[4].allocation())
    await settled(engine)
    assert not late.done()
    taken = {b for a in allocations for b in a.block_ids[0]}
    assert len(taken) == 20
    engine.close_stream("1")
    (got,) = (await late).block_ids
    assert set(got) <= set(range(1, 25)) - (taken - set(allocations[1].block_ids[0]))
    for r in external:
        engine.close_stream(r.request_id)
    await assert_empty(engine)


async def test_prefill_stream_holds_its_blocks_until_closed(engine):
    with engine.open(request(purpose=Purpose.PREFILL)) as stream:
        updates = await read(stream)
        await settled(engine)
        assert engine.reading.stats.num_kept == 1
        (table,) = updates[-1].block_ids
        assert engine.reading.stats.num_held_blocks == len(table) == 5
    await assert_empty(engine)


async def test_cancel_raises_cancelled_in_the_reader(engine):
    async def reader() -> None:
        with engine.open(request(max_tokens=100)) as stream:
            async for _batch in stream.updates():
                engine.cancel("a")

    with pytest.raises(CancelledError, match="aborted"):
        await reader()
    await assert_empty(engine)
    with pytest.raises(NotFoundError):
        engine.cancel("a")


async def test_paused_engine_finishes_running_and_queues_new_requests(engine, checkpoints, oracle):
    expected = oracle(checkpoints["llama"], PROMPT, NUM_TOKENS)
    with engine.open(request("begun")) as begun:
        async for batch in begun.updates():
            assert batch
            engine.pause()
    with engine.open(request("new")) as new:
        await settled(engine)
        assert engine.reading.stats.num_waiting == 1
        engine.resume()
        assert tokens(await read(new)) == expected
    await assert_empty(engine)


async def test_stats_are_read_by_the_thread_that_changes_them(checkpoints):
    readers: set[str] = set()

    class NotedCore(EngineCore):
        def reading(self) -> EngineReading:
            readers.add(threading.current_thread().name)
            return super().reading()

    async with running(load(checkpoints["llama"], NotedCore)) as serving:
        readers.clear()
        with serving.open(request(max_tokens=4)) as stream:
            assert serving.reading.stats.num_running == 0
            async for _batch in stream.updates():
                assert serving.reading.stats.num_running + serving.reading.stats.num_kept <= 1
        await assert_empty(serving)
        assert serving.reading.stats.num_computed_tokens >= len(PROMPT) + 3
    assert readers == {"engine"}


async def test_stats_count_a_request_as_running_in_its_first_step(checkpoints):
    seen: list[tuple[int, int]] = []

    class NotedCore(EngineCore):
        def step(self, on_planned: OnPlanned = lambda: None) -> StepOutput:
            def planned() -> None:
                on_planned()
                stats = serving.reading.stats
                seen.append((stats.num_waiting, stats.num_running))

            return super().step(planned)

    async with running(load(checkpoints["llama"], NotedCore)) as serving:
        with serving.open(request(max_tokens=2)) as stream:
            await read(stream)
    assert seen[0] == (0, 1)


async def test_stopped_engine_frees_blocks_and_takes_no_requests(checkpoints):
    serving = EngineClient(EngineThread(load(checkpoints["llama"]).core))
    serving.start()
    with serving.open(request(max_tokens=200)) as stream:
        await anext(stream.updates())
        await serving.stop()
        assert serving.reading.stats.num_held_blocks == 0
        with pytest.raises(UnavailableError, match="closed"):
            serving.handle.core.add(request("later"))


async def test_open_rejects_a_duplicate_request_id(engine):
    with engine.open(request()) as stream:
        with pytest.raises(AlreadyExistsError):
            engine.open(request())
        assert len(tokens(await read(stream))) == NUM_TOKENS
    with engine.open(request()) as stream:
        assert len(tokens(await read(stream))) == NUM_TOKENS
    await assert_empty(engine)


async def test_open_rejects_a_request_that_cannot_be_served(engine):
    with pytest.raises(InvalidArgumentError):
        engine.open(request(max_tokens=1000))
    assert engine.num_streams == 0
    await assert_empty(engine)


class Failing:
    """Raises `error` while there is one, in place of these methods."""

    def __init__(self, owner: object, *methods: str) -> None:
        self.error: Exception | None = None
        for name in methods:
            setattr(owner, name, partial(self._call, getattr(owner, name)))

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self.error is not None:
            raise self.error
        return method(*arguments)


async def test_engine_survives_a_request_that_it_cannot_add(checkpoints):
    engine = load(checkpoints["llama"])
    failing = Failing(engine.core, "add")
    errors = {
        InvalidArgumentError: InvalidArgumentError("grammar", "too late"),
        InternalError: RuntimeError("too late"),
    }
    async with running(engine) as serving:
        for expected, failing.error in errors.items():
            with serving.open(request()) as stream, pytest.raises(expected, match="too late"):
                await read(stream)
        failing.error = None
        with serving.open(request()) as stream:
            assert len(tokens(await read(stream))) == NUM_TOKENS
        await assert_empty(serving)


async def test_end_of_a_sequence_whose_kv_is_awaited_changes_nothing(engine):
    with engine.open(request(source=KvSource.EXTERNAL)) as stream:
        await stream.allocation()
        engine.end_sequence("a", 0)
        await settled(engine)
        stream.fail_external()
        assert len(tokens(await read(stream))) == NUM_TOKENS
    await assert_empty(engine)


async def test_flush_cache_reports_events_on_an_idle_engine(serve, checkpoints):
    told: asyncio.Queue[KvEvents] = asyncio.Queue()
    on_events = told.put_nowait
    async with serve(checkpoints["llama"], **SIZES, on_cache_events=on_events) as serving:
        with serving.open(request()) as stream:
            await read(stream)
        await settled(serving)
        findable: set[bytes] = set()
        while not told.empty():
            findable |= set(told.get_nowait().stored)
        assert await serving.flush_cache() == len(findable) > 0
        assert (await asyncio.wait_for(told.get(), 30)).cleared


async def test_failing_step_fails_every_stream_and_reports_once():
    engine, failures = ScriptedCore(), []
    failed = asyncio.Event()

    def on_failure(reason: str) -> None:
        failures.append(reason)
        failed.set()

    async with running(engine, on_failure=on_failure) as serving:
        streams = [serving.open(request(i)) for i in "abc"]
        engine.error = RuntimeError("the device is gone")
        engine.allow.release()
        errors = []
        for stream in streams:
            with pytest.raises(EngineFailedError) as caught:
                await asyncio.wait_for(read(stream), 30)
            errors.append(caught.value)
        assert len(set(map(id, errors))) == 3, "a traceback of all streams"
        await failed.wait()
        for i in "abc":
            serving.close_stream(i)
        assert serving.num_streams == 0
        with pytest.raises(InternalError, match="has failed"):
            serving.open(request("d"))
        with pytest.raises(InternalError):
            await asyncio.wait_for(serving.flush_cache(), 30)
    assert failures == ["RuntimeError: the device is gone"]


@pytest.mark.parametrize("error", [ValueError("the cat"), UnavailableError("the cat")])
async def test_query_error_ends_the_query_and_not_the_engine(checkpoints, error):
    expected = type(error) if isinstance(error, BatonError) else InternalError
    engine = load(checkpoints["llama"])
    failing = Failing(engine.core.scheduler, "memory_report", "pin")
    async with running(engine) as serving:
        failing.error = error
        with pytest.raises(expected, match="the cat"):
            await asyncio.wait_for(serving.memory_report(), 30)
        with pytest.raises(expected, match="the cat"):
            async with asyncio.timeout(30), serving.pinned("name", []):
                pass
        failing.error = None
        with serving.open(request()) as stream:
            assert len(tokens(await read(stream))) == NUM_TOKENS
        await assert_empty(serving)


async def test_flush_cache_fails_with_the_engine():
    engine = ScriptedCore()
    async with running(engine) as serving:
        serving.open(request())
        assert engine.begun.acquire(timeout=30)
        flush = asyncio.create_task(serving.flush_cache())
        await asyncio.sleep(0)
        engine.error = RuntimeError("the device is gone")
        engine.allow.release()
        with pytest.raises(InternalError):
            await asyncio.wait_for(flush, 30)


async def test_stop_ends_open_streams_and_rejects_new_ones():
    engine = ScriptedCore()
    async with running(engine) as serving:
        stream = serving.open(request())
        assert engine.begun.acquire(timeout=30)
        stopping = asyncio.create_task(serving.stop())
        await asyncio.sleep(0)
        engine.allow.release()
        await asyncio.wait_for(stopping, 30)
        with pytest.raises(UnavailableError):
            await read(stream)
        for attempt in (lambda: serving.open(request("b")), serving.flush_cache):
            with pytest.raises(BatonError, match="stopped"):
                await asyncio.wait_for(attempt(), 30)


async def test_stop_closes_an_idle_engine():
    engine = ScriptedCore()
    async with running(engine) as serving:
        await asyncio.wait_for(serving.stop(), 30)
        assert engine.is_closed


async def test_reopened_id_receives_no_update_of_its_predecessor():
    engine = ScriptedCore()
    async with running(engine) as serving:
        serving.open(request())
        # The loop stands still meanwhile, so that a step's output is still on its way to it.
        assert engine.begun.acquire(timeout=30)
        engine.allow.release()
        assert engine.begun.acquire(timeout=30)
        serving.close_stream("a")
        stream = serving.open(request())
        engine.allow.release(2)
        heard = await asyncio.wait_for(anext(stream.updates()), 30)
        assert heard[0].token_id == 200
        serving.close_stream("a")
        engine.allow.release()
        await settled(serving)
        assert engine.aborted == ["a", "a"]
