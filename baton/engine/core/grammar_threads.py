"""Threads that compile grammars beside the steps of an engine, in turns by tenant."""

from collections.abc import Callable
from typing import Final

from baton.engine.core.commands import Command, CompileGrammar
from baton.engine.core.engine_core import EngineCore
from baton.engine.core.reports import Report
from baton.errors import OverloadedError
from baton.fairness.fair_threads import FairThreads, Task

# As many as trials at once; a tenant has all but one.
_NUM_THREADS: Final = 3
_NUM_CACHED_THREADS: Final = 2
# Above what clients send that wait for answers.
_MAX_WAITING: Final = 256
_RETRY_SECONDS: Final = 2.0


class GrammarThreads:
    """Threads for the grammars of one engine. A cached grammar waits for no compilation."""

    def __init__(
        self,
        core: EngineCore,
        execute: Callable[[Command], None],
        report: Callable[[Report], None],
    ) -> None:
        """`execute` runs a command and reports its answer, in a thread."""
        self._core = core
        self._execute = execute
        self._report = report
        self._cached = FairThreads(_NUM_CACHED_THREADS, _MAX_WAITING, "cached-grammar")
        self._new = FairThreads(_NUM_THREADS, _MAX_WAITING, "grammar")

    def submit(self, command: CompileGrammar) -> None:
        """Queues a command, which is refused if too many wait."""
        request = command.request
        threads = self._cached if self._core.has_grammar(request) else self._new
        threads.submit(
            Task(request.tenant, lambda: self._execute(command), lambda: self._refuse(command))
        )

    def close(self) -> None:
        """Ends the threads, once each has run the command that it has."""
        self._cached.close()
        self._new.close()

    def _refuse(self, command: CompileGrammar) -> None:
        error = OverloadedError(
            f"{_MAX_WAITING} grammars wait to be compiled already, the most of them of this "
            "request's tenant",
            _RETRY_SECONDS,
        )
        self._report(command.refusal(error))
