"""Engine loop: a thread that runs commands and steps of one engine, and reports what they did.

    commands -> step -> report

Knows nothing of who commands and who reads the reports: an event loop of this process or another.
"""

import logging
import queue
import threading
from collections.abc import Callable

from baton.engine.core.commands import Add, Command, CompileGrammar, Query
from baton.engine.core.engine_core import EngineCore
from baton.engine.core.grammar_threads import GrammarThreads
from baton.engine.core.reports import (
    Answered,
    Begun,
    EngineReading,
    Failed,
    Report,
    Stepped,
)
from baton.engine.executor.device import CUDA, Gpus, use_device
from baton.errors import BatonError, InternalError

logger = logging.getLogger(__name__)


class EngineLoop:
    """Engine loop, from `start` to `stop`. Any thread may call its methods.

    Attributes:
        reading: counts and meters, as of the last planned step or the last commands.
    """

    def __init__(
        self,
        core: EngineCore,
        report: Callable[[Report], None],
        on_reading: Callable[[EngineReading], None] = lambda _reading: None,
        gpus: Gpus = CUDA,
    ) -> None:
        """`report` and `on_reading` are called in the loop's thread; `report` in those that compile
        grammars, too. `gpus`: of which the engine's device may be one."""
        self._core = core
        self._report = report
        self._on_reading = on_reading
        self._gpus = gpus
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._grammars = GrammarThreads(core, self._execute, report)
        self.reading = core.reading()

    @property
    def native_id(self) -> int | None:
        """The system's id of its thread; None before `start`."""
        return self._thread.native_id

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Queues a command, or runs it beside the steps."""
        if isinstance(command, CompileGrammar):
            self._grammars.submit(command)
        else:
            self._commands.put(command)

    def stop(self) -> None:
        """Stops after the current step and waits for that."""
        self._commands.put(None)
        self._thread.join()
        self._grammars.close()

    def _run(self) -> None:
        try:
            use_device(self._core.device, self._gpus)
            made_progress = True
            while self._take_commands(wait=not (self._core.has_work and made_progress)):
                if self._core.has_work:
                    made_progress = self._step()
            self._core.close()
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
        output = self._core.step(self._publish)
        self._publish()
        is_news = output.updates or output.external or output.preempted or output.failed
        if is_news or output.cache_events or output.held_outputs:
            self._report(Stepped(output))
        return output.made_progress

    def _execute(self, command: Command) -> None:
        """Runs a command, and reports its answer. An error that it may have is its caller's; any
        other ends the engine."""
        if isinstance(command, Add):
            self._report(Begun(command.number, command.request.request_id))
        try:
            answer = command.run(self._core)
        except Exception as error:
            problem = _as_baton_error(error, command)
            refusal = command.refusal(problem)
            if refusal is None:
                raise
            if problem is not error:
                logger.exception("%s failed in the engine", type(command).__name__)
            self._report(refusal)
        else:
            if isinstance(command, Query):
                if not isinstance(command, CompileGrammar):
                    self._publish()
                self._report(Answered(command.query, answer))

    def _publish(self) -> None:
        """Publishes the counts for other threads, which must not read them from the scheduler while
        a step changes them."""
        self.reading = self._core.reading()
        self._on_reading(self.reading)


def _as_baton_error(error: Exception, command: Command) -> BatonError:
    """Returns the error for a caller."""
    if isinstance(error, BatonError):
        return error
    return InternalError(f"{type(command).__name__} failed in the engine: {error}")
