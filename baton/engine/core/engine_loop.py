"""Engine loop: a thread that runs commands and steps of one engine, and reports what they did.

    commands -> step -> report

Knows nothing of who commands and who reads the reports: an event loop of this process or another.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, assert_never

from baton.engine.core import commands
from baton.engine.core.commands import Command, Query
from baton.engine.core.reports import (
    Answer,
    Answered,
    Begun,
    EngineReading,
    Failed,
    QueryFailed,
    Refused,
    Report,
    Stepped,
)
from baton.engine.device import CUDA, Gpus, use_device
from baton.engine.engine import Engine
from baton.engine.request_check import check_grammar
from baton.errors import BatonError, InternalError

if TYPE_CHECKING:
    from baton.engine.grammar.state import CompiledGrammar

logger = logging.getLogger(__name__)

_MAX_GRAMMARS = 256
"""Compiled grammars whose requests have not come. One that is dropped is compiled again."""


class EngineLoop:
    """Engine loop, from `start` to `stop`. Any thread may call its methods.

    Attributes:
        reading: counts and meters, as of the last planned step or the last commands.
    """

    def __init__(
        self,
        engine: Engine,
        report: Callable[[Report], None],
        on_reading: Callable[[EngineReading], None] = lambda _reading: None,
        gpus: Gpus = CUDA,
    ) -> None:
        """`report` and `on_reading` are called in the loop's thread; `report` in those that compile
        grammars, too. `gpus`: of which the engine's device may be one."""
        self._engine = engine
        self._report = report
        self._on_reading = on_reading
        self._gpus = gpus
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # A separate pool, so that slow grammars block nothing else.
        self._compiling = ThreadPoolExecutor(max_workers=4, thread_name_prefix="grammar")
        self._grammars: OrderedDict[int, CompiledGrammar | None] = OrderedDict()
        self._num_steps = 0
        self._idle_since: float | None = None
        self.reading = self._read()
        engine.on_planned = self._publish

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Queues a command. A grammar is compiled at once, beside the steps."""
        if isinstance(command, commands.CompileGrammar):
            self._compiling.submit(self._compile, command)
        else:
            self._commands.put(command)

    def stop(self) -> None:
        """Stops after the current step and waits for that."""
        self._commands.put(None)
        self._thread.join()
        self._compiling.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        try:
            use_device(self._engine.device, self._gpus)
            made_progress = True
            while self._take_commands(wait=not (self._engine.has_work and made_progress)):
                if self._engine.has_work:
                    made_progress = self._step()
            self._engine.close()
            self._publish()
        except Exception as error:
            logger.exception("the engine failed; all of its sequences end")
            self._report(Failed(f"{type(error).__name__}: {error}"))

    def _take_commands(self, *, wait: bool) -> bool:
        """Runs the queued commands; with `wait`, waits for a first one. Returns False to stop."""
        has_run = False
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                if has_run:
                    self._publish()
                return True
            if command is None:
                return False
            self._execute(command)
            wait, has_run = False, True

    def _step(self) -> bool:
        """Runs one step. Returns False if it could do nothing: only a command can change that."""
        output = self._engine.step()
        self._num_steps += 1
        self._publish()
        is_news = output.updates or output.external or output.preempted or output.failed
        if is_news or output.cache_events or output.held_outputs:
            self._report(Stepped(output))
        return output.made_progress

    def _execute(self, command: Command) -> None:
        engine = self._engine
        match command:
            case commands.Add():
                self._add(command)
            case commands.Abort(request_id):
                engine.abort(request_id)
            case commands.CommitExternal(request_id, token_id, logprob):
                engine.commit_external(request_id, token_id, logprob)
            case commands.FailExternal(request_id):
                engine.fail_external(request_id)
            case commands.Suspend(request_id):
                engine.suspend(request_id)
            case commands.EndSequence(request_id, index, reason):
                engine.end_sequence(request_id, index, reason)
            case commands.Pause():
                engine.pause()
            case commands.Resume():
                engine.resume()
            case commands.Unpin(name):
                engine.unpin(name)
            case commands.Encode() | commands.ExpectOutput():
                self._begin_job(command)
            case commands.CommitOutput(number):
                engine.commit_output(number)
            case commands.ReleaseOutput(number):
                engine.release_output(number)
            case _:
                self._answer(command)

    def _add(self, command: commands.Add) -> None:
        """Adds a request. An error ends the request and not the engine."""
        request = command.request
        self._report(Begun(command.number, request.request_id))
        grammar = None
        if command.grammar is not None:
            grammar = self._grammars.pop(command.grammar, None)
        try:
            self._engine.add_request(request, grammar)
        except Exception as error:
            problem = _as_baton_error(error, f"request {request.request_id} was not added")
            self._report(Refused(request.request_id, problem))

    def _begin_job(self, command: commands.Encode | commands.ExpectOutput) -> None:
        """Begins an encode job. An error ends the job and not the engine."""
        try:
            match command:
                case commands.Encode(number, job, only_cached):
                    self._engine.encode(number, job, only_cached=only_cached)
                case commands.ExpectOutput(number, job):
                    self._engine.expect_output(number, job)
        except Exception as error:
            problem = _as_baton_error(error, "an encode job was not begun")
            self._report(QueryFailed(command.number, problem))

    def _answer(self, query: Query) -> None:
        """Answers a query. An error ends the query and not the engine."""
        try:
            answer = self._result(query)
        except Exception as error:
            problem = _as_baton_error(error, "a query of the engine failed")
            self._report(QueryFailed(query.query, problem))
        else:
            self._publish()
            self._report(Answered(query.query, answer))

    def _result(self, query: Query) -> Answer:
        match query:
            case commands.FlushCache(_, hashes):
                return self._engine.flush_cache(hashes)
            case commands.Pin(_, name, hashes):
                return self._engine.pin(name, hashes)
            case commands.ReportMemory():
                return self._engine.memory_report()
            case commands.CompileGrammar():
                raise AssertionError("a grammar is compiled beside the steps")
            case _:
                assert_never(query)

    def _compile(self, command: commands.CompileGrammar) -> None:
        """Compiles a grammar, in a thread of its own."""
        try:
            grammar = self._engine.compile_grammar(command.request.params)
            if grammar is not None:
                check_grammar(command.request, grammar)
        except Exception as error:
            problem = _as_baton_error(error, "a grammar was not compiled")
            self._report(QueryFailed(command.query, problem))
            return
        self._grammars[command.query] = grammar
        while len(self._grammars) > _MAX_GRAMMARS:
            self._grammars.popitem(last=False)
        self._report(Answered(command.query, None))

    def _publish(self) -> None:
        """Publishes the counts for other threads, which must not read them from the scheduler while
        a step changes them."""
        self.reading = self._read()
        self._on_reading(self.reading)

    def _read(self) -> EngineReading:
        engine = self._engine
        stats = engine.stats()
        if not stats.is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.time()
        return EngineReading(
            stats,
            engine.work_done,
            engine.time_spent,
            self._num_steps,
            engine.num_late_compilations,
            self._idle_since,
        )


def _as_baton_error(error: Exception, what: str) -> BatonError:
    """Returns the error for a caller; logs one that is our own."""
    if isinstance(error, BatonError):
        return error
    logger.error("%s", what, exc_info=error)
    return InternalError(f"{what}: {error}")
