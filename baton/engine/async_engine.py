"""An engine stepping in a thread of its own, for servers: neither ever waits on the other.

Commands go to the thread through a queue; each step's output comes back to the event loop in one
call. All methods belong to the event loop's thread.
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, TypeVar

import torch

from baton.cluster.prefix import BlockHash
from baton.engine.cache.kv_pool import KvLayout, KvPool
from baton.engine.engine import Engine
from baton.engine.messages import EngineRequest, ModelInfo, SequenceUpdate, StepOutput
from baton.engine.metering.step_times import StepTimes, TimeSpent
from baton.engine.metering.work_meter import WorkDone
from baton.engine.scheduler.kv.block_pool import CacheEvents
from baton.engine.scheduler.kv.pinned_blocks import Tables
from baton.engine.scheduler.scheduling.plan import ExternalAllocation
from baton.engine.scheduler.scheduling.scheduler_stats import SchedulerStats
from baton.engine.scheduler.sequences.config import Preemption
from baton.engine.scheduler.sequences.sequence import Purpose
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

_Answer = TypeVar("_Answer")


class StreamWatcher(Protocol):
    """Is told when what happens to one request, in the event loop's thread."""

    def allocated(self) -> None:
        """It has the blocks that KV from elsewhere goes to."""

    def brought(self) -> None:
        """That KV is there, or will not come: from here on it waits to be computed."""

    def preempted(self, mode: Preemption, times: StepTimes) -> None:
        """In a step, one of its sequences had to make room for others."""

    def stepped(self, update: SequenceUpdate, times: StepTimes) -> None:
        """A step did something for it."""


class SequenceStream:
    """Updates of one request. Leaving the `with` block ends its sequences and frees their blocks,
    wherever they are.

    Attributes:
        watcher: is told when it is said; None: nobody asks.
        first_step: which did something for it; None: none has.
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

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._engine.close_stream(self._request.request_id)

    async def allocation(self) -> ExternalAllocation:
        """Waits for the blocks of a sequence whose KV is external."""
        event = await self._next()
        assert isinstance(event, ExternalAllocation), "an update before its blocks"
        if self.watcher is not None:
            self.watcher.allocated()
        return event

    async def updates(
        self, turn: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncIterator[list[SequenceUpdate]]:
        """What happened to the sequences of the request, until all of them have finished; updates
        that have gathered since the last look come together.

        Args:
            turn: awaited once there is something to tell; what comes meanwhile is told with it.
        """
        num_running = _num_finishing(self._request)
        while num_running:
            batch = [_as_update(await self._next())]
            if turn is not None:
                await turn()
            while self._events and not isinstance(self._events[0], BatonError):
                batch.append(_as_update(self._events.popleft()))
            num_running -= sum(update.finish_reason is not None for update in batch)
            _raise_if_failed(batch)
            yield batch

    async def failure(self) -> NoReturn:
        """Raises what ends the sequence, once something does; for while no update can come."""
        event = await self._next()
        raise AssertionError(f"an update while none was due: {event}")

    def commit_external(self, token_id: int | None, logprob: float | None = None) -> None:
        """The awaited KV is in the allocated blocks, and `token_id` follows it; None: the first
        token of each sequence is chosen here."""
        request_id = self._request.request_id
        self._engine.submit(
            lambda: self._engine.engine.commit_external(request_id, token_id, logprob)
        )
        if self.watcher is not None:
            self.watcher.brought()

    def fail_external(self) -> None:
        """The awaited KV will not come, and nobody writes to its blocks: it is computed here."""
        request_id = self._request.request_id
        self._engine.submit(lambda: self._engine.engine.fail_external(request_id))
        if self.watcher is not None:
            self.watcher.brought()

    def suspend(self) -> None:
        """Has the only sequence stop behind its next token. Its last update, if it has not ended by
        then, says so; its blocks stay until the stream is closed."""
        request_id = self._request.request_id
        self._engine.submit(lambda: self._engine.engine.suspend(request_id))

    def begin(self) -> None:
        """For the engine alone: what it says from here on is about this sequence, and not about an
        earlier one of the same id."""
        self.has_begun = True

    def push(self, event: SequenceUpdate | ExternalAllocation | BatonError) -> None:
        """For the engine alone."""
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
    """Owns the engine's thread, from `start` to `stop`."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_cache_events: Callable[[CacheEvents], None] = lambda _events: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.num_steps = 0
        self._on_cache_events = on_cache_events
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._streams: dict[str, SequenceStream] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        # Of its own, so that grammars which take long hold nothing else up.
        self._compiling = ThreadPoolExecutor(max_workers=4, thread_name_prefix="grammar")
        self._questions: set[asyncio.Future[Any]] = set()
        self._failed = False
        self._stopped = False

    @property
    def info(self) -> ModelInfo:
        """The model that is loaded."""
        return self.engine.info

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def pools(self) -> list[KvPool]:
        """KV pools, one per cache group; the first one sees furthest back."""
        return self.engine.cache.pools

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
        """Sequences that run at once at most."""
        return self.engine.config.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens that one step computes at most."""
        return self.engine.max_num_batched_tokens

    @property
    def work_done(self) -> WorkDone:
        """What was computed since the start, and how long it took."""
        return self.engine.work_done

    @property
    def time_spent(self) -> TimeSpent:
        """Where the time of all steps since the start went."""
        return self.engine.time_spent

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after its current step; open streams end with `UnavailableError`."""
        self._stopped = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self.engine.close()
        self._fail_streams(UnavailableError("the worker has stopped"))

    async def compile_grammar(self, params: SamplingParams) -> "CompiledGrammar | None":
        """Compiles the grammar that `params` ask for, if any, off the engine's thread and the event
        loop's. Raises `InvalidArgumentError` for one that does not compile, or not in time."""
        if params.grammar is None:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compiling, self.engine.compile_grammar, params)

    def open(
        self, request: EngineRequest, grammar: "CompiledGrammar | None" = None
    ) -> SequenceStream:
        """Queues a request, with what `compile_grammar` made for it.

        Raises what `Engine.check` does, `AlreadyExistsError` for an id that is in flight,
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
        """Ends a sequence, in whatever state, and frees its blocks. Idempotent."""
        if self._streams.pop(request_id, None) is not None:
            self.submit(lambda: self.engine.abort(request_id))

    def end_sequence(self, request_id: str, index: int) -> None:
        """Ends one of several sequences of a request; the others go on. Idempotent.

        Raises `NotFoundError` if the request is not here.
        """
        if request_id not in self._streams:
            raise NotFoundError(f"no request {request_id!r} is here")
        self.submit(lambda: self.engine.end_sequence(request_id, index))

    def cancel(self, request_id: str) -> None:
        """Ends a sequence on behalf of somebody else: its stream raises `CancelledError`.

        Raises `NotFoundError` if it is not here.
        """
        if request_id not in self._streams:
            raise NotFoundError(f"no request {request_id!r} is here")
        self._streams[request_id].push(CancelledError("the request was aborted"))

    def submit(self, command: Command) -> None:
        """Runs a command between two steps, on the engine's thread."""
        self._commands.put(command)

    def pause(self) -> None:
        """Starts nothing new from a next step on; what has begun goes on."""
        self.submit(self.engine.pause)

    def resume(self) -> None:
        """Starts what waits again."""
        self.submit(self.engine.resume)

    async def flush_cache(self) -> int:
        """Forgets every cached prefix. Returns how many blocks were findable."""
        return await self._ask(self.engine.flush_cache)

    @asynccontextmanager
    async def pinned(self, name: str, hashes: Sequence[BlockHash]) -> AsyncIterator[Tables]:
        """Holds the longest cached run of these blocks for the length of the block: a table per
        cache group, empty where nothing is cached. The name must be new."""
        try:
            yield await self._ask(lambda: self.engine.pin(name, hashes))
        finally:
            self.submit(lambda: self.engine.unpin(name))

    def stats(self) -> SchedulerStats:
        """Counts as of some moment between two steps."""
        return self.engine.stats()

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def _check_running(self) -> None:
        if self._failed:
            raise InternalError("the engine has failed; the worker is about to restart")
        if self._stopped:
            raise UnavailableError("the worker has stopped")

    async def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        """What the engine's thread answers between two steps."""
        self._check_running()
        done: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._questions.add(done)
        done.add_done_callback(self._questions.discard)
        self.submit(lambda: self._call_soon(_resolve, done, question()))
        return await done

    # The engine's thread.

    def _add(
        self, request: EngineRequest, stream: SequenceStream, grammar: "CompiledGrammar | None"
    ) -> None:
        self._call_soon(stream.begin)
        self.engine.add_request(request, grammar)

    def _run(self) -> None:
        try:
            made_progress = True
            while self._take_commands(wait=not (self.engine.has_work and made_progress)):
                if self.engine.has_work:
                    made_progress = self._step()
        except Exception:
            logger.exception("the engine failed; every sequence on it ends")
            self._call_soon(self._fail)

    def _take_commands(self, *, wait: bool) -> bool:
        """Runs what is queued, waiting for a first command if told to. False: stop."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _step(self) -> bool:
        """One step. False when nothing could be done: only a command can change that."""
        output = self.engine.step()
        self.num_steps += 1
        if output.updates or output.external or output.cache_events or output.preempted:
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
        if output.cache_events:
            self._on_cache_events(output.cache_events)

    def _fail(self) -> None:
        self._failed = True
        self._fail_streams(InternalError("the engine failed while this request was in it"))
        self._on_failure()

    def _fail_streams(self, error: BatonError) -> None:
        for stream in self._streams.values():
            stream.push(error)
        for question in self._questions:
            if not question.done():
                question.set_exception(error)


def _resolve(done: "asyncio.Future[_Answer]", answer: _Answer) -> None:
    if not done.done():
        done.set_result(answer)


def _as_update(event: SequenceUpdate | ExternalAllocation | BatonError) -> SequenceUpdate:
    assert isinstance(event, SequenceUpdate), "blocks for a sequence that runs"
    return event


def _raise_if_failed(updates: list[SequenceUpdate]) -> None:
    for update in updates:
        if update.failure is not None:
            raise InvalidArgumentError("sampling.grammar", update.failure)


def _num_finishing(request: EngineRequest) -> int:
    """Sequences whose end is told: beams only as far as they are returned."""
    if request.purpose is Purpose.PREFILL:
        return 1
    return request.params.n if request.params.beam_width else len(request.unfinished)
