"""Trials of grammars, which run each one before the engine compiles it, in a process of their own.

llguidance releases the GIL while it compiles, but limits neither time, nor memory, nor stack: 40 KB
of mutually recursive rules overflow the stack and crash the process, others take minutes or
gigabytes. The engine can compile a grammar that has passed, at the same cost. The process runs
`baton.engine.executor.grammar.judge`.
"""

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, Final

from baton.engine.executor.grammar.judge import GrammarLimits, TrialResult
from baton.errors import InternalError, OverloadedError
from baton.sampling import Grammar

_JUDGE: Final = "baton.engine.executor.grammar.judge"
_Fields = dict[str, Any]
_START_S: Final = 120.0
_GRACE_S: Final = 5.0


class Trials:
    """Trials of grammars for one tokenizer, by a process that starts with the first.

    Thread-safe.
    """

    def __init__(self, tokenizer_file: Path, mark_ids: list[int], limits: GrammarLimits) -> None:
        self._limits = limits
        config = {"file": str(tokenizer_file), "marks": mark_ids, "limits": asdict(limits)}
        self._config = json.dumps(config)
        self._waiting = threading.BoundedSemaphore(limits.num_trials + limits.max_waiting)
        self._running = threading.BoundedSemaphore(limits.num_trials)
        self._starting = threading.Lock()
        self._processes: list[_TrialProcess] = []  # the one there is
        self.close = weakref.finalize(self, _kill_all, self._processes)

    @property
    def pid(self) -> int | None:
        """Id of the process, which has a child for each trial; None before the first."""
        return self._processes[0].pid if self._processes else None

    def run(self, grammar: Grammar) -> TrialResult:
        """Runs a trial. Blocks up to `time_s` seconds, twice that if it has to wait for others,
        longer on a busy machine. Raises `OverloadedError` if no trial ends in time, or too many
        grammars wait.
        """
        with self._turn():
            try:
                return self._process().run(grammar, self._limits.time_s + _GRACE_S)
            except TimeoutError as error:
                raise self._overloaded() from error
            except OSError as error:
                raise InternalError(f"cannot try out grammars: {error}") from error

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._waiting.acquire(blocking=False):
            raise self._overloaded()
        try:
            if not self._running.acquire(timeout=self._limits.time_s):
                raise self._overloaded()
            try:
                yield
            finally:
                self._running.release()
        finally:
            self._waiting.release()

    def _process(self) -> "_TrialProcess":
        """Returns the process, which is started if there is none. Raises `OSError`."""
        with self._starting:
            if self._processes and self._processes[0].has_ended:
                self._processes.pop().kill()
            if not self._processes:
                self._processes.append(_TrialProcess(self._config))
            return self._processes[0]

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(
            "other grammars are being compiled, and take long", self._limits.time_s
        )


class _TrialProcess:
    """Trial process. Raises `OSError` if it does not start."""

    def __init__(self, config: str) -> None:
        self._popen = subprocess.Popen(  # noqa: S603 - a command line of our own
            [sys.executable, "-m", _JUDGE, config],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        )
        self._lock = threading.Lock()
        self._numbers = count(1)
        is_ready = Future[_Fields]()
        self._asked = {0: is_ready}
        self._failure: OSError | None = None
        threading.Thread(target=self._read, name="grammar-trials", daemon=True).start()
        self._answer_to(is_ready, _START_S)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def run(self, grammar: Grammar, timeout_s: float) -> TrialResult:
        """Returns the result. Raises `OSError` if the process has ended, and ends it with a
        `TimeoutError`, which all others of it raise, too, if there is none in `timeout_s` seconds.
        """
        return TrialResult(**self._answer_to(self._ask(grammar), timeout_s))

    def kill(self, reason: OSError | None = None) -> None:
        """Ends the process. `reason`: what those that wait for it raise."""
        self._failure = self._failure or reason
        self._popen.kill()
        self._popen.wait()

    def _ask(self, grammar: Grammar) -> "Future[_Fields]":
        number, answer = next(self._numbers), Future[_Fields]()
        asked = {"number": number, "kind": grammar.kind.value, "text": grammar.text}
        assert self._popen.stdin is not None
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._asked[number] = answer
            self._popen.stdin.write(json.dumps(asked).encode() + b"\n")
            self._popen.stdin.flush()
        return answer

    def _answer_to(self, answer: "Future[_Fields]", timeout_s: float) -> _Fields:
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            self.kill(TimeoutError(f"no answer within {timeout_s:g} s"))
            raise

    def _read(self) -> None:
        """Passes the answers on, until the process ends."""
        assert self._popen.stdout is not None
        with self._popen.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):  # not of one that was killed amid it
                    self._pass_on(**json.loads(line))
        assert self._popen.stdin is not None
        with self._lock:
            failure = self._failure = self._failure or BrokenPipeError("the process ended")
            with suppress(BrokenPipeError):
                self._popen.stdin.close()
        for answer in self._asked.values():
            answer.set_exception(failure)

    def _pass_on(self, number: int, fields: _Fields) -> None:
        with self._lock:
            answer = self._asked.pop(number)
        answer.set_result(fields)


def _kill_all(running: list[_TrialProcess]) -> None:
    for process in running:
        process.kill()
