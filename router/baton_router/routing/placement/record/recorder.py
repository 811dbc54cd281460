"""Recorder of placement decisions, in a thread, so that requests never wait for the disk.

Entries that cannot be written, because the disk is full or slow, are dropped and counted; the
record resumes in a new file once the disk accepts writes again.
"""

import asyncio
import contextlib
import errno
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from baton.cluster.prefix import BlockHash
from baton.errors import InvalidArgumentError
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.placement.decision import Decision, Rules
from baton_router.routing.placement.record.record_file import RecordFile
from baton_router.routing.placement.record.record_format import (
    decision_line,
    ended_line,
    header_line,
)

logger = logging.getLogger(__name__)

_MAX_WAITING = 4096  # queued entries; more are dropped
_PAUSE = 1.0  # seconds between retries after a disk error
_STOP_SECONDS = 5.0

Hashing = Callable[[], list[BlockHash]]

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class _Decided:
    at: float
    decision: Decision
    hashing: Hashing


@dataclass(frozen=True, slots=True)
class _Ended:
    at: float
    request_id: str
    num_output_tokens: int


@asynccontextmanager
async def recording(file: RecordFile | None, rules: Rules) -> AsyncIterator["Recorder | None"]:
    """Records decisions to `file` within the block, and flushes it after; None: records nothing."""
    if file is None:
        yield None
        return
    recorder = Recorder(file, rules)
    recorder.start()
    try:
        yield recorder
    finally:
        await asyncio.to_thread(recorder.stop)


class Recorder:
    """Recorder of decisions, from `start` to `stop`.

    Args:
        clock: returns seconds of the wall clock.

    Attributes:
        num_lost: number of dropped entries.
    """

    def __init__(
        self, file: RecordFile, rules: Rules, clock: Callable[[], float] = time.time
    ) -> None:
        self.num_lost = 0
        self._file = file
        self._rules = rules
        self._clock = clock
        self._entries: queue.Queue[_Decided | _Ended | None] = queue.Queue(_MAX_WAITING)
        self._before: dict[str, Candidate] = {}
        self._is_stopping = False
        self._is_failing = False
        self._resume_at = 0.0
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        """Starts the thread. Raises `InvalidArgumentError` if the file cannot be written, unless
        the disk is full, which may be temporary."""
        try:
            self._begin()
        except OSError as error:
            if error.errno not in _FULL:
                raise InvalidArgumentError("record", f"cannot be written: {error}") from error
            self._pause_writing(error)
        self._thread.start()

    def stop(self) -> None:
        """Writes queued entries, for up to twice `_STOP_SECONDS`. Later entries are dropped."""
        self._is_stopping = True
        try:
            self._entries.put(None, timeout=_STOP_SECONDS)
        except queue.Full:
            return
        self._thread.join(_STOP_SECONDS)

    def decided(self, decision: Decision, hashing: Hashing) -> None:
        """Queues a decision. Never blocks: `hashing` is called in the recorder's thread."""
        self._put(_Decided(self._clock(), decision, hashing))

    def ended(self, request_id: str, num_output_tokens: int) -> None:
        """Queues the end of a request, successful or not. Never blocks."""
        self._put(_Ended(self._clock(), request_id, num_output_tokens))

    def _put(self, entry: _Decided | _Ended) -> None:
        with contextlib.suppress(queue.Full):
            if not self._is_stopping:
                self._entries.put_nowait(entry)
                return
        self.num_lost += 1

    # Methods of the thread.

    def _run(self) -> None:
        while (entry := self._entries.get()) is not None:
            if time.monotonic() < self._resume_at:
                self.num_lost += 1
                continue
            try:
                self._write(entry)
                self._is_failing = False
            except OSError as error:
                self.num_lost += 1
                self._pause_writing(error)
        self._file.close()

    def _write(self, entry: _Decided | _Ended) -> None:
        if not self._file.is_open:
            self._begin()
        line = self._line(entry)
        if not self._file.has_room(len(line)):
            self._begin()
            line = self._line(entry)
        if not self._file.has_room(len(line)):
            self.num_lost += 1
            return
        self._file.append(line)
        if isinstance(entry, _Decided):
            self._before = {c.worker: c for c in entry.decision.inputs.candidates}

    def _begin(self) -> None:
        """Begins a new file that can be read by itself."""
        self._file.begin()
        self._before = {}
        self._file.append(header_line(self._rules))

    def _line(self, entry: _Decided | _Ended) -> bytes:
        if isinstance(entry, _Ended):
            return ended_line(entry.at, entry.request_id, entry.num_output_tokens)
        return decision_line(entry.at, entry.decision, entry.hashing(), self._before)

    def _pause_writing(self, error: OSError) -> None:
        self._resume_at = time.monotonic() + _PAUSE
        if not self._is_failing:
            logger.warning("placements are not recorded for now: %s", error)
        self._is_failing = True
