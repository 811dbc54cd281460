"""Async engine: steps an engine in a thread of its own, without blocking the event loop.

Commands go to the thread through a queue; each step's output comes back to the event loop in one
call. All methods belong to the event loop's thread.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, TypeVar

import torch

from baton.cluster.prefix import BlockHash
from baton.engine.cache.kv_pool import KvLayout, KvPool
from baton.engine.device import use_device
from baton.engine.engine import Engine
from baton.engine.messages import EngineRequest, ModelInfo, SequenceUpdate, StepOutput
from baton.engine.metering.step_times import StepTimes, TimeSpent
from baton.engine.metering.work_meter import WorkDone
from baton.engine.scheduler.kv.block_pool import CacheEvents
from baton.engine.scheduler.kv.memory_report import MemoryReport
from baton.engine.scheduler.kv.pinned_blocks import Tables
from baton.engine.scheduler.scheduling.plan import ExternalAllocation
from baton.engine.scheduler.scheduling.scheduler_stats import SchedulerStats
from baton.engine.scheduler.sequences.config import Preemption
from baton.engine.scheduler.sequences.sequence import FinishReason, Purpose
from baton.errors import (
    AlreadyExistsError,
    BatonError,
    CancelledError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from baton.sampling import SamplingParams

if TYPE_CHECKING:
    from baton.engine.grammar.state import CompiledGrammar

logger = logging.getLogger(__name__)

Command = Callable[[], None]

_Result = TypeVar("_Result")


class StreamWatcher(Protocol):
    """Observer of one request's stream, called in the event loop's thread."""

    def allocated(self) -> None:
        """Notes that the blocks for external KV are allocated."""

    def fetch_ended(self) -> None:
        """Notes that the external KV has arrived or will not: the request waits for compute."""

    def preempted(self, mode: Preemption, times: StepTimes) -> None:
        """Notes that a step preempted one of the request's sequences."""

    def stepped(self, update: SequenceUpdate, times: StepTimes) -> None:
        """Notes that a step updated the request."""


class SequenceStream:
    """Stream of the updates of one request. Leaving the `with` block ends its sequences, in any
    state, and frees their blocks.

    Attributes:
        watcher: observer of the stream; None: none.
        first_step: times of the first step that updated the request; None: no step has.
    """

    def __init__(self, engine: "AsyncEngine", request: EngineRequest) -> None:
        self._engine = engine
        self._request = request
        self._events: deque[SequenceUpdate | ExternalAllocation | BatonError] = deque()
        self._arrived = asyncio.Event()
        self.has_begun = False
        self.watcher: StreamWatcher | None = None
        self.first_step: StepTimes | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close_stream(self._request.request_id)

    async def allocation(self) -> ExternalAllocation:
        """Waits for the blocks of a sequence whose KV is external."""
        event = await self._next()
        assert isinstance(event, ExternalAllocation), "an update before its blocks"
        if self.watcher is not None:
            self.watcher.allocated()
        return event

    async def updates(
        self, throttle: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncIterator[list[SequenceUpdate]]:
        """Yields the updates of the request until all its sequences have finished; updates that
        came since the last batch are in one batch.

        Args:
            throttle: awaited once there is an update; updates that come meanwhile join its batch.
        """
        num_running = _num_finishing(self._request)
        while num_running:
            batch = [_as_update(await self._next())]
            if throttle is not None:
                await throttle()
            while self._events and not isinstance(self._events[0], BatonError):
                batch.append(_as_update(self._events.popleft()))
            num_running -= sum(update.finish_reason is not None for update in batch)
            _raise_if_failed(batch)
            yield batch

    async def failure(self) -> NoReturn:
        """Raises the error that ends the stream, when it comes. Call while no update is due."""
        event = await self._next()
        raise AssertionError(f"an update while none was due: {event}")

    def commit_external(self, token_id: int | None, logprob: float | None = None) -> None:
        """Commits the awaited KV, which is in the allocated blocks; `token_id` follows it. None:
        the first token of each sequence is chosen here."""
        request_id = self._request.request_id
        self._engine.submit(
            lambda: self._engine.engine.commit_external(request_id, token_id, logprob)
        )
        if self.watcher is not None:
            self.watcher.fetch_ended()

    def fail_external(self) -> None:
        """Has the sequence computed here: its KV will not come, and its blocks have no writer."""
        request_id = self._request.request_id
        self._engine.submit(lambda: self._engine.engine.fail_external(request_id))
        if self.watcher is not None:
            self.watcher.fetch_ended()

    def suspend(self) -> None:
        """Suspends the only sequence after its next token. Its last update says so, unless it has
        finished by then; its blocks stay until the stream is closed."""
        request_id = self._request.request_id
        self._engine.submit(lambda: self._engine.engine.suspend(request_id))

    def begin(self) -> None:
        """Marks that engine events now concern this stream, and not an earlier one of the same id.
        Called only by `AsyncEngine`."""
        self.has_begun = True

    def push(self, event: SequenceUpdate | ExternalAllocation | BatonError) -> None:
        """Adds an event. Called only by `AsyncEngine`."""
        self._events.append(event)
        self._arrived.set()

    async def _next(self) -> SequenceUpdate | ExternalAllocation:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, BatonError):
            raise event
        return event


class AsyncEngine:
    """Async engine: owns the engine's thread, from `start` to `stop`.

    Attributes:
        num_steps: steps since the start.
        is_paused: no new request starts until `resume`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_cache_events: Callable[[CacheEvents], None] = lambda _events: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.num_steps = 0
        self.is_paused = False
        self._on_cache_events = on_cache_events
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._streams: dict[str, SequenceStream] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        # A separate pool, so that slow grammars block nothing else.
        self._compiling = ThreadPoolExecutor(max_workers=4, thread_name_prefix="grammar")
        self._queries: set[asyncio.Future[Any]] = set()
        self._stats = engine.stats()
        self._idle_since = time.time()
        engine.on_planned = self._publish_stats
        self._failed = False
        self._stopped = False

    @property
    def info(self) -> ModelInfo:
        """Properties of the loaded model."""
        return self.engine.info

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def pools(self) -> list[KvPool]:
        """KV pools, one per cache group; the first one has the largest window."""
        return self.engine.cache.pools

    @property
    def host_pools(self) -> list[KvPool]:
        """The same in host memory, for swapped sequences; empty without swap space."""
        return self.engine.cache.host_pools

    @property
    def layouts(self) -> tuple[KvLayout, ...]:
        """Layouts of the pools, in their order."""
        return self.engine.cache.layouts

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self.engine.config.block_size

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of sequences that run at once."""
        return self.engine.config.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum number of tokens that one step computes."""
        return self.engine.max_num_batched_tokens

    @property
    def work_done(self) -> WorkDone:
        """Tokens computed since the start, and the seconds they took."""
        return self.engine.work_done

    @property
    def time_spent(self) -> TimeSpent:
        """Seconds of all steps since the start, by phase."""
        return self.engine.time_spent

    @property
    def num_late_compilations(self) -> int:
        """Kernels compiled after the warm-up, each of which stalled a step."""
        return self.engine.num_late_compilations

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        use_device(self.device)
        self._thread.start()

    async def stop(self) -> None:
        """Stops the thread after its current step; open streams end with `UnavailableError`."""
        self._stopped = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._fail_streams(UnavailableError("the worker has stopped"))

    async def compile_grammar(self, params: SamplingParams) -> "CompiledGrammar | None":
        """Compiles the grammar of `params`, if any, outside the engine's thread and the event
        loop's. Raises `InvalidArgumentError` if it does not compile, or not in time."""
        if params.grammar is None:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compiling, self.engine.compile_grammar, params)

    def open(
        self, request: EngineRequest, grammar: "CompiledGrammar | None" = None
    ) -> SequenceStream:
        """Queues a request, with the grammar that `compile_grammar` returned for it.

        Raises the errors of `Engine.check`, `AlreadyExistsError` for an id that is in flight,
        `InternalError` once the engine has failed, `UnavailableError` once it was stopped.
        """
        self._check_running()
        if request.request_id in self._streams:
            raise AlreadyExistsError(f"request {request.request_id!r} is already here")
        assert (grammar is None) == (request.params.grammar is None), "a grammar not compiled"
        self.engine.check(request, grammar)
        stream = self._streams[request.request_id] = SequenceStream(self, request)
        self.submit(lambda: self._add(request, stream, grammar))
        return stream

    def close_stream(self, request_id: str) -> None:
        """Ends a request, in any state, and frees its blocks. Idempotent."""
        if self._streams.pop(request_id, None) is not None:
            self.submit(lambda: self.engine.abort(request_id))

    def free(self, request_id: str) -> None:
        """Ends the sequences of an open stream and frees their blocks; none but an error follows in
        the stream. Idempotent."""
        self.submit(lambda: self.engine.abort(request_id))

    def end_sequence(
        self, request_id: str, index: int, reason: FinishReason = FinishReason.ABORTED
    ) -> None:
        """Ends one of several sequences of a request; the others continue. Idempotent.

        Raises `NotFoundError` if the request is not here.
        """
        if request_id not in self._streams:
            raise NotFoundError(f"no request {request_id!r} is here")
        self.submit(lambda: self.engine.end_sequence(request_id, index, reason))

    def cancel(self, request_id: str) -> None:
        """Cancels a request for another caller: its stream raises `CancelledError`.

        Raises `NotFoundError` if it is not here.
        """
        if request_id not in self._streams:
            raise NotFoundError(f"no request {request_id!r} is here")
        self._streams[request_id].push(CancelledError("the request was aborted"))

    def submit(self, command: Command) -> None:
        """Queues a command to run between two steps, on the engine's thread."""
        self._commands.put(command)

    def pause(self) -> None:
        """Starts no new request from a next step on; requests that have begun continue.
        Idempotent."""
        self.is_paused = True
        self.submit(self.engine.pause)

    def resume(self) -> None:
        """Starts waiting requests again. Idempotent."""
        self.is_paused = False
        self.submit(self.engine.resume)

    async def flush_cache(self, hashes: Sequence[BlockHash] | None = None) -> int:
        """Drops cached blocks with these chain hashes; None: every cached prefix. Returns how many
        blocks were cached."""
        return await self._query(lambda: self.engine.flush_cache(hashes))

    @asynccontextmanager
    async def pinned(self, name: str, hashes: Sequence[BlockHash]) -> AsyncIterator[Tables]:
        """Pins the longest cached run of these blocks during the `with` block: yields a table per
        cache group, empty if nothing is cached. The name must be new."""
        try:
            yield await self._query(lambda: self.engine.pin(name, hashes))
        finally:
            self.submit(lambda: self.engine.unpin(name))

    async def memory_report(self) -> MemoryReport:
        """Returns the usage of the KV blocks, with sharing and waste."""
        return await self._query(self.engine.memory_report)

    def stats(self) -> SchedulerStats:
        """Returns a consistent snapshot of the counts: as of the last planned step, or later. It
        includes all updates and answers that have arrived."""
        return self._stats

    @property
    def idle_since(self) -> float | None:
        """Time since which no request is known and no block held, in seconds since 1970; None while
        one is."""
        return self._idle_since if self._stats.is_idle else None

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def _check_running(self) -> None:
        if self._failed:
            raise InternalError("the engine has failed; the worker is about to restart")
        if self._stopped:
            raise UnavailableError("the worker has stopped")

    async def _query(self, query: Callable[[], _Result]) -> _Result:
        """Returns the result of `query`, computed in the engine's thread between two steps.

        Raises the error of `query`, or `InternalError` for one that is no `BatonError`.
        """
        self._check_running()
        done: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._queries.add(done)
        done.add_done_callback(self._queries.discard)
        self.submit(lambda: self._answer(done, query))
        return await done

    # The engine's thread.

    def _add(
        self, request: EngineRequest, stream: SequenceStream, grammar: "CompiledGrammar | None"
    ) -> None:
        """Adds a request, between two steps. An error ends the request and not the engine."""
        self._call_soon(stream.begin)
        try:
            self.engine.add_request(request, grammar)
        except Exception as error:
            if not isinstance(error, BatonError):
                logger.exception("request %s was not added", request.request_id)
                error = InternalError(f"the request was not added: {error}")
            self._call_soon(partial(stream.push, error))

    def _answer(self, done: "asyncio.Future[_Result]", query: Callable[[], _Result]) -> None:
        """Answers a query, between two steps. An error ends the query and not the engine."""
        try:
            answer = query()
        except Exception as error:
            if not isinstance(error, BatonError):
                logger.exception("a query of the engine failed")
                error = InternalError(f"a query of the engine failed: {error}")
            self._call_soon(_reject, done, error)
        else:
            self._publish_stats()
            self._call_soon(_resolve, done, answer)

    def _publish_stats(self) -> None:
        """Publishes the counts for the event loop's thread, which must not read them from the
        scheduler while a step changes them."""
        before, self._stats = self._stats, self.engine.stats()
        if self._stats.is_idle and not before.is_idle:
            self._idle_since = time.time()

    def _run(self) -> None:
        try:
            use_device(self.device)
            made_progress = True
            while self._take_commands(wait=not (self.engine.has_work and made_progress)):
                if self.engine.has_work:
                    made_progress = self._step()
            self.engine.close()
            self._publish_stats()
        except Exception:
            logger.exception("the engine failed; all of its sequences end")
            self._call_soon(self._fail)

    def _take_commands(self, *, wait: bool) -> bool:
        """Runs the queued commands; with `wait`, waits for a first one. Returns False to stop."""
        has_run = False
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                if has_run:
                    self._publish_stats()
                return True
            if command is None:
                return False
            command()
            wait, has_run = False, True

    def _step(self) -> bool:
        """Runs one step. Returns False if it could do nothing: only a command can change that."""
        output = self.engine.step()
        self._publish_stats()
        self.num_steps += 1
        is_news = output.updates or output.external or output.preempted or output.failed
        if is_news or output.cache_events:
            self._call_soon(self._deliver, output)
        return output.made_progress

    def _call_soon(self, callback: Callable[..., object], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            logger.debug("the event loop is closed; the callback is dropped")

    # The event loop's thread.

    def _deliver(self, output: StepOutput) -> None:
        for request_id, mode in output.preempted:
            stream = self._streams.get(request_id)
            if stream is not None and stream.has_begun and stream.watcher is not None:
                stream.watcher.preempted(mode, output.times)
        events: list[SequenceUpdate | ExternalAllocation] = [*output.external, *output.updates]
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None and stream.has_begun:
                stream.push(event)
                if not isinstance(event, SequenceUpdate):
                    continue
                stream.first_step = stream.first_step or output.times
                if stream.watcher is not None:
                    stream.watcher.stepped(event, output.times)
        for request_id, error in output.failed.items():
            stream = self._streams.get(request_id)
            if stream is not None and stream.has_begun:
                stream.push(error)
        if output.cache_events:
            self._on_cache_events(output.cache_events)

    def _fail(self) -> None:
        self._failed = True
        self._fail_streams(InternalError("the engine failed while this request was in it"))
        self._on_failure()

    def _fail_streams(self, error: BatonError) -> None:
        for stream in self._streams.values():
            stream.push(error)
        for query in self._queries:
            if not query.done():
                query.set_exception(error)


def _resolve(done: "asyncio.Future[_Result]", answer: _Result) -> None:
    if not done.done():
        done.set_result(answer)


def _reject(done: "asyncio.Future[_Result]", error: BatonError) -> None:
    if not done.done():
        done.set_exception(error)


def _as_update(event: SequenceUpdate | ExternalAllocation | BatonError) -> SequenceUpdate:
    assert isinstance(event, SequenceUpdate), "blocks for a sequence that runs"
    return event


def _raise_if_failed(updates: list[SequenceUpdate]) -> None:
    for update in updates:
        if update.failure is not None:
            raise InvalidArgumentError("sampling.grammar", update.failure)


def _num_finishing(request: EngineRequest) -> int:
    """Returns the number of sequences that report a finish: of beams only the returned ones."""
    if request.purpose is Purpose.PREFILL:
        return 1
    return request.params.n if request.params.beam_width else len(request.unfinished)
