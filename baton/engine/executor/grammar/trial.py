"""Trial processes for grammars, which run each one before the engine compiles it.

llguidance releases the GIL while it compiles, but limits neither time, nor memory, nor stack: 40 KB
of mutually recursive rules overflow the stack and crash the process, others take minutes or
gigabytes. The engine can compile a grammar that has passed, at the same cost. The processes run
`baton.engine.executor.grammar.judge`.
"""

import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Final

from baton.engine.executor.grammar.judge import GrammarLimits, TrialResult
from baton.errors import InternalError, OverloadedError
from baton.sampling import Grammar

_JUDGE: Final = "baton.engine.executor.grammar.judge"
_START_S: Final = 120.0
_GRACE_S: Final = 5.0


class TrialPool:
    """Pool of trial processes of one tokenizer, started on first use. Thread-safe."""

    def __init__(self, tokenizer_file: Path, mark_ids: list[int], limits: GrammarLimits) -> None:
        self._limits = limits
        config = {"file": str(tokenizer_file), "marks": mark_ids, "limits": asdict(limits)}
        self._config = json.dumps(config)
        self._idle: queue.LifoQueue[_TrialProcess | None] = queue.LifoQueue()
        for _ in range(limits.num_trials):
            self._idle.put(None)
        self._waiting = threading.BoundedSemaphore(limits.num_trials + limits.max_waiting)
        self._running: list[_TrialProcess] = []
        self.close = weakref.finalize(self, _kill_all, self._running)

    @property
    def pids(self) -> list[int]:
        """Ids of its processes, which wait for a grammar or try one."""
        return [process.pid for process in self._running]

    def run(self, grammar: Grammar) -> TrialResult:
        """Runs a trial. Blocks up to `time_s` seconds, twice that if it has to wait for a process,
        longer on a busy machine. Raises `OverloadedError` if no process is free or answers in time,
        or too many grammars wait.
        """
        if not self._waiting.acquire(blocking=False):
            raise self._overloaded()
        try:
            process = self._idle.get(timeout=self._limits.time_s)
            try:
                if process is None or process.has_ended:
                    self._end(process)
                    process = None
                    process = self._start()
                return process.run(grammar, self._limits.time_s + _GRACE_S)
            except OSError as error:
                self._end(process)
                process = None
                if isinstance(error, TimeoutError):
                    raise self._overloaded() from error
                raise InternalError(f"cannot try out grammars: {error}") from error
            finally:
                self._idle.put(process)
        except queue.Empty:
            raise self._overloaded() from None
        finally:
            self._waiting.release()

    def _start(self) -> "_TrialProcess":
        process = _TrialProcess(self._config)
        self._running.append(process)
        return process

    def _end(self, process: "_TrialProcess | None") -> None:
        if process is not None:
            self._running.remove(process)
            process.kill()

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(
            "other grammars are being compiled, and take long", self._limits.time_s
        )


class _TrialProcess:
    """Trial process that runs one grammar at a time."""

    def __init__(self, config: str) -> None:
        self._popen = subprocess.Popen(  # noqa: S603 - a command line of our own
            [sys.executable, "-m", _JUDGE, config],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        )
        self._received = b""
        try:
            self._read_line(_START_S)
        except OSError:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def run(self, grammar: Grammar, timeout_s: float) -> TrialResult:
        """Returns the result. Raises `OSError`, after which the process is unusable; a
        `TimeoutError` if there is none within `timeout_s` seconds."""
        assert self._popen.stdin is not None
        request = json.dumps({"kind": grammar.kind.value, "text": grammar.text}).encode()
        self._popen.stdin.write(request + b"\n")
        self._popen.stdin.flush()
        return TrialResult(**json.loads(self._read_line(timeout_s)))

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._popen.stdout is not None
        file = self._popen.stdout.fileno()
        poll = select.poll()
        poll.register(file, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not poll.poll(1000 * remaining_s):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            chunk = os.read(file, 1 << 16)
            if not chunk:
                raise BrokenPipeError("the process ended")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line


def _kill_all(running: list[_TrialProcess]) -> None:
    for process in running:
        process.kill()
