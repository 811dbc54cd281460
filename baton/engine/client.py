"""Engine client: streams of requests to an engine core that steps beside the event loop.

The engine steps in a thread or a process of its own (`baton.engine.core`): commands go there, and
each step's output comes back in one report. All methods belong to the event loop's thread.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, NoReturn, Protocol, Self, cast

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.prefix import BlockHash
from baton.engine.core import commands, reports
from baton.engine.core.core_handle import CoreHandle
from baton.engine.core.reports import EngineReading, QueryAnswer, Report
from baton.engine.core.request_check import RequestCheck
from baton.engine.encoder_outputs import ArrivingOutput, EncodedOutput
from baton.engine.metering.step_times import StepTimes
from baton.engine.outputs import SequenceUpdate, StepOutput
from baton.engine.request import EngineRequest, FinishReason, Purpose
from baton.engine.scheduler.kv.memory_report import MemoryReport
from baton.engine.scheduler.kv.pinned_blocks import Tables
from baton.engine.scheduler.plan import ExternalAllocation
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob
from baton.engine.scheduler.sequences.config import Preemption
from baton.errors import (
    AlreadyExistsError,
    BatonError,
    CancelledError,
    EngineFailedError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)


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

    def __init__(self, engine: "EngineClient", request: EngineRequest, number: int) -> None:
        self._engine = engine
        self._request = request
        self._number = number
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
        self._engine.submit(commands.CommitExternal(request_id, token_id, logprob))
        if self.watcher is not None:
            self.watcher.fetch_ended()

    def fail_external(self) -> None:
        """Has the sequence computed here: its KV will not come, and its blocks have no writer."""
        self._engine.submit(commands.FailExternal(self._request.request_id))
        if self.watcher is not None:
            self.watcher.fetch_ended()

    def suspend(self) -> None:
        """Suspends the only sequence after its next token. Its last update says so, unless it has
        finished by then; its blocks stay until the stream is closed."""
        self._engine.submit(commands.Suspend(self._request.request_id))

    def begin(self, number: int) -> None:
        """Notes which request of this id engine events now concern: this stream's or an earlier
        one's. Called only by `EngineClient`."""
        self.has_begun = number == self._number

    def push(self, event: SequenceUpdate | ExternalAllocation | BatonError) -> None:
        """Adds an event. Called only by `EngineClient`."""
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


class EngineClient:
    """Engine client: runs an engine core from `start` to `stop`, in the event loop's thread.

    Attributes:
        facts: properties of the engine that never change.
        handle: the engine core, behind its seam.
        submit: queues a command to run between two steps.
        device, pools, encoder_pool: as of `handle`.
        check: raises the errors of a request or an encoder input that it cannot serve.
        is_paused: no new request starts until `resume`.
        num_reports: reports of the engine so far: one that works, or is asked, makes them.
    """

    def __init__(
        self,
        handle: CoreHandle,
        *,
        on_cache_events: Callable[[KvEvents], None] = lambda _events: None,
        on_failure: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """`on_failure` is called with the reason if the engine ends by itself."""
        self.facts = handle.facts
        self.device = handle.device
        self.pools = handle.pools
        self.encoder_pool = handle.encoder_pool
        self.is_paused = False
        self.num_reports = 0
        self.handle = handle
        self.submit = handle.submit
        self.check = RequestCheck(handle.facts)
        self._on_cache_events = on_cache_events
        self._on_failure = on_failure
        self._streams: dict[str, SequenceStream] = {}
        self._numbers = count(1)
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._output_names: set[str] = set()
        self._failed = False
        self._stopped = False

    @property
    def reading(self) -> EngineReading:
        """A consistent reading: as of the last planned step, or later. It includes all updates and
        answers that have arrived."""
        return self.handle.reading

    def start(self) -> None:
        self.handle.start(asyncio.get_running_loop(), self._take)

    async def stop(self) -> None:
        """Stops the engine after its current step; open streams end with `UnavailableError`."""
        self._stopped = True
        await self.handle.stop()
        self._fail_streams(lambda: UnavailableError("the worker has stopped"))

    async def compile_grammar(self, request: EngineRequest) -> int | None:
        """Compiles the grammar of a request, if any, beside the engine's steps, and checks the
        request. Returns a number for `open`; raises the errors of `EngineCore.check`, and
        `InvalidArgumentError` if the grammar does not compile, or not in time."""
        if request.params.grammar is None:
            return None
        self.check(request)
        number = next(self._numbers)
        await self._query(commands.CompileGrammar(number, request))
        return number

    def open(self, request: EngineRequest, grammar: int | None = None) -> SequenceStream:
        """Queues a request, with what `compile_grammar` returned for it.

        Raises the errors of `EngineCore.check`, `AlreadyExistsError` for an id that is in flight,
        `EngineFailedError` once the engine has failed, `UnavailableError` once it was stopped.
        """
        self._check_running()
        if request.request_id in self._streams:
            raise AlreadyExistsError(f"request {request.request_id!r} is already here")
        assert (grammar is None) == (request.params.grammar is None), "a grammar not compiled"
        self.check(request)
        number = next(self._numbers)
        stream = self._streams[request.request_id] = SequenceStream(self, request, number)
        self.submit(commands.Add(number, request, grammar))
        return stream

    def close_stream(self, request_id: str) -> None:
        """Ends a request, in any state, and frees its blocks. Idempotent."""
        if self._streams.pop(request_id, None) is not None:
            self.submit(commands.Abort(request_id))

    def free(self, request_id: str) -> None:
        """Ends the sequences of an open stream and frees their blocks; none but an error follows in
        the stream. Idempotent."""
        self.submit(commands.Abort(request_id))

    def end_sequence(
        self, request_id: str, index: int, reason: FinishReason = FinishReason.ABORTED
    ) -> None:
        """Ends one of several sequences of a request; the others continue. Idempotent.

        Raises `NotFoundError` if the request is not here.
        """
        if request_id not in self._streams:
            raise NotFoundError(f"no request {request_id!r} is here")
        self.submit(commands.EndSequence(request_id, index, reason))

    def cancel(self, request_id: str) -> None:
        """Cancels a request for another caller: its stream raises `CancelledError`.

        Raises `NotFoundError` if it is not here.
        """
        if request_id not in self._streams:
            raise NotFoundError(f"no request {request_id!r} is here")
        self._streams[request_id].push(CancelledError("the request was aborted"))

    def pause(self) -> None:
        """Starts no new request from a next step on; requests that have begun continue.
        Idempotent."""
        self.is_paused = True
        self.submit(commands.Pause())

    def resume(self) -> None:
        """Starts waiting requests again. Idempotent."""
        self.is_paused = False
        self.submit(commands.Resume())

    async def flush_cache(self, hashes: Sequence[BlockHash] | None = None) -> int:
        """Drops cached blocks with these chain hashes; None: every cached prefix. Returns how many
        blocks were cached."""
        chosen = None if hashes is None else tuple(hashes)
        answer = await self._query(commands.FlushCache(next(self._numbers), chosen))
        return cast("int", answer)

    @asynccontextmanager
    async def pinned(self, name: str, hashes: Sequence[BlockHash]) -> AsyncIterator[Tables]:
        """Pins the longest cached run of these blocks during the `with` block: yields a table per
        cache group, empty if nothing is cached. The name must be new."""
        pin = commands.Pin(next(self._numbers), name, tuple(hashes))
        try:
            yield cast("Tables", await self._query(pin))
        finally:
            self.submit(commands.Unpin(name))

    @asynccontextmanager
    async def encoded(
        self, name: str, job: EncodeJob, *, only_cached: bool = False
    ) -> AsyncIterator[EncodedOutput]:
        """Holds the output of an encoder input during the `with` block, and computes it before,
        unless it is cached.

        Args:
            name: name of what is held; no other output may have it meanwhile.
            job: its input needs no tensors with `only_cached`.

        Raises the errors of `EngineCore.encode`, and `AlreadyExistsError` for a name that is taken.
        """
        self.check.encoder_input(job.encoder_input, has_tensors=not only_cached)
        number = next(self._numbers)
        with self._output(name, commands.Encode(number, job, only_cached)) as answer:
            yield await answer

    @asynccontextmanager
    async def arriving(self, name: str, job: EncodeJob) -> AsyncIterator[ArrivingOutput]:
        """Expects another worker's output of an encoder input during the `with` block. Meanwhile no
        input of this content is computed here: sequences wait before it. If the block ends without
        a commit, they compute it.

        Args:
            name: name of what is expected; no other output may have it meanwhile.
            job: the tensors of its input are ignored.

        Raises the errors of `EngineCore.expect_output`, and `AlreadyExistsError` for a name that is
        taken.
        """
        expected = replace(job, encoder_input=replace(job.encoder_input, tensors={}))
        self.check.encoder_input(expected.encoder_input, has_tensors=False)
        number = next(self._numbers)
        with self._output(name, commands.ExpectOutput(number, expected)) as answer:
            yield ArrivingOutput(answer, lambda: self.submit(commands.CommitOutput(number)))

    @contextmanager
    def _output(
        self, name: str, job: commands.Encode | commands.ExpectOutput
    ) -> "Iterator[asyncio.Future[EncodedOutput]]":
        """Begins an encode job, and yields its answer. Releases the output at the end."""
        self._check_running()
        if name in self._output_names:
            raise AlreadyExistsError(f"an encoder output is already held as {name!r}")
        self._output_names.add(name)
        answer: asyncio.Future[EncodedOutput] = asyncio.get_running_loop().create_future()
        self._queries[job.number] = answer
        try:
            self.submit(job)
            yield answer
        finally:
            self.submit(commands.ReleaseOutput(job.number))
            self._output_names.remove(name)
            del self._queries[job.number]
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # known, whether it was awaited or not

    async def memory_report(self) -> MemoryReport:
        """Returns the usage of the KV blocks, with sharing and waste."""
        answer = await self._query(commands.ReportMemory(next(self._numbers)))
        return cast("MemoryReport", answer)

    def ping(self) -> None:
        """Asks the engine for a report, which comes after its present step."""
        self.submit(commands.Ping(next(self._numbers)))

    def kill(self, reason: str) -> None:
        """Ends an engine that stands still: all streams fail, as when it ends by itself."""
        self.handle.kill(reason)

    @property
    def has_work(self) -> bool:
        """Whether a request or a query is in the engine."""
        return bool(self._streams or self._queries) and not self._failed

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def _check_running(self) -> None:
        if self._failed:
            raise EngineFailedError("the engine has failed; the worker is about to restart")
        if self._stopped:
            raise UnavailableError("the worker has stopped")

    async def _query(self, query: commands.Query) -> QueryAnswer:
        """Returns the answer of the engine. Raises its error; `InternalError` for one that is no
        `BatonError`."""
        self._check_running()
        done: asyncio.Future[QueryAnswer] = asyncio.get_running_loop().create_future()
        self._queries[query.query] = done
        try:
            self.submit(query)
            return await done
        finally:
            del self._queries[query.query]

    def _take(self, report: Report) -> None:
        """Takes a report of the engine."""
        self.num_reports += 1
        match report:
            case reports.Stepped(output):
                self._deliver(output)
            case reports.Begun(number, request_id):
                if stream := self._streams.get(request_id):
                    stream.begin(number)
            case reports.Refused(request_id, error):
                self._push(request_id, error)
            case reports.Answered(query, answer):
                if done := self._open_query(query):
                    done.set_result(answer)
            case reports.QueryFailed(query, error):
                if done := self._open_query(query):
                    done.set_exception(error)
            case reports.Failed(reason):
                self._fail(reason)

    def _open_query(self, number: int) -> "asyncio.Future[Any] | None":
        done = self._queries.get(number)
        return None if done is None or done.done() else done

    def _push(self, request_id: str, error: BatonError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and stream.has_begun:
            stream.push(error)

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
            self._push(request_id, error)
        for held in output.held_outputs:
            if answer := self._open_query(held.number):
                answer.set_result(EncodedOutput.of(held, output.times))
        if output.cache_events:
            self._on_cache_events(output.cache_events)

    def _fail(self, reason: str) -> None:
        self._failed = True
        text = "the engine failed while this request was in it"
        self._fail_streams(lambda: EngineFailedError(text))
        self._on_failure(reason)

    def _fail_streams(self, make: Callable[[], BatonError]) -> None:
        """Ends all streams and queries, each with an error of its own: each `raise` of one that
        they share would lengthen its traceback."""
        for stream in self._streams.values():
            stream.push(make())
        for query in self._queries.values():
            if not query.done():
                query.set_exception(make())


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
