"""Engine's process: loads a model, steps, and ends with its parent.

Its main thread passes commands on, so that no step delays a grammar's compilation or the end of the
process; the engine steps in a thread of its own, as it does in a process with a server.
"""

import gc
import logging
import os
import select
import socket
import threading
from dataclasses import replace

from baton.engine.core.engine_core import EngineCore
from baton.engine.core.engine_loop import EngineLoop
from baton.engine.core.process.command_codec import decode_command
from baton.engine.core.process.control import (
    LoadedBytes,
    LoadFailed,
    NotShared,
    Progress,
    Ready,
    Sample,
    SampleOpened,
    Start,
    Stop,
    receive,
    send,
)
from baton.engine.core.process.error_codec import data_of
from baton.engine.core.process.pool_memory import (
    MemoryNotSharedError,
    descriptors_of,
    places_of,
    sample_memory,
)
from baton.engine.core.process.reading_page import ReadingPage
from baton.engine.core.process.report_codec import encode_report
from baton.engine.core.process.ring import Ring, RingReader, RingWriter
from baton.engine.core.reports import Failed, Report
from baton.errors import BatonError, InternalError

logger = logging.getLogger(__name__)

MAX_BACKLOG = 64 << 20
"""Bytes of reports that may wait for a parent that reads none; then the steps wait, too."""
_FLUSH_MS = 5000
_DESCRIPTORS_OF_RING = 3


def run(control: socket.socket) -> int:
    """Serves the parent at the other end of `control` until it stops this process or is gone.
    Returns the exit code."""
    start, descriptors = receive(control)
    if not isinstance(start, Start):
        return 0
    return _Child(control, start, descriptors).run()


class _Child:
    """Process of one engine."""

    def __init__(self, control: socket.socket, start: Start, descriptors: list[int]) -> None:
        self._control = control
        self._start = start
        self._commands = Ring(*descriptors[:_DESCRIPTORS_OF_RING])
        self._reports = Ring(*descriptors[_DESCRIPTORS_OF_RING : 2 * _DESCRIPTORS_OF_RING])
        self._page = ReadingPage(descriptors[-1])
        self._reader = RingReader(self._commands)
        self._writer = RingWriter(self._reports, on_backlog=self._wake)
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._engine_loop: EngineLoop | None = None
        self._failed = threading.Event()

    def run(self) -> int:
        """Passes commands on until the end. Returns the exit code."""
        try:
            is_wanted = self._sample_is_opened()
        except Exception as error:
            self._refuse(error)
            return 1
        if not is_wanted:
            return 0
        threading.Thread(target=self._load, name="loader", daemon=True).start()
        while not self._failed.is_set():
            ready = self._wait()
            if self._control.fileno() in ready:
                return self._stop()
            if self._reports.freed in ready:
                self._writer.flush()
            if self._commands.filled in ready:
                self._pass_commands_on()
        self._flush()
        return 1

    def _sample_is_opened(self) -> bool:
        """Returns whether the parent can open memory of the engine's device; if not, it loads the
        model elsewhere."""
        sample = sample_memory(self._start.config.device)
        if sample is None:
            return True
        send(self._control, Sample(str(sample.device), sample.place))
        message, _ = receive(self._control)
        return isinstance(message, SampleOpened)

    def _wait(self) -> set[int]:
        """Waits for the parent, or for this process to wake it; returns the ready descriptors."""
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._commands.filled, self._woken):
            poll.register(descriptor, select.POLLIN)
        if self._writer.has_backlog:
            poll.register(self._reports.freed, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll()}
        if self._woken in ready:
            os.eventfd_read(self._woken)
        return ready

    def _wake(self) -> None:
        os.eventfd_write(self._woken, 1)

    def _pass_commands_on(self) -> None:
        assert self._engine_loop is not None, "a command before the parent knows of the engine"
        for record in self._reader.read():
            self._engine_loop.submit(decode_command(record))

    def _stop(self) -> int:
        """Ends the engine if the parent says so, and all at once if the parent is gone."""
        message, _ = receive(self._control)
        if isinstance(message, Stop) and self._engine_loop is not None:
            self._engine_loop.stop()
            self._flush()
        return 0

    def _flush(self) -> None:
        """Writes the reports that are left, for a parent that still reads."""
        poll = select.poll()
        poll.register(self._reports.freed, select.POLLIN)
        self._writer.flush()
        while self._writer.has_backlog and poll.poll(_FLUSH_MS):
            self._writer.flush()

    def _load(self) -> None:
        """Loads the engine, starts its loop and tells the parent, in a thread."""
        try:
            core = EngineCore.from_pretrained(
                self._start.model,
                replace(self._start.config, shared_pools=True),
                on_progress=lambda *done: send(self._control, Progress(*done)),
                on_loaded_bytes=lambda *done: send(self._control, LoadedBytes(*done)),
            )
            pools = [*core.cache.pools]
            if core.cache.encoder_pool is not None:
                pools.append(core.cache.encoder_pool)
            places, descriptors = places_of(pools), descriptors_of(pools)
            # Each full collection would scan all loaded objects between two steps.
            gc.collect()
            gc.freeze()
            self._engine_loop = EngineLoop(core, self._report, self._page.write)
            self._page.write(self._engine_loop.reading)
            self._engine_loop.start()
            send(self._control, Ready(core.facts, places), descriptors)
        except Exception as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        if isinstance(error, MemoryNotSharedError):
            send(self._control, NotShared(str(error)))
            self._end()
            return
        if not isinstance(error, BatonError):
            logger.exception("the model was not loaded")
            error = InternalError(f"the model was not loaded: {type(error).__name__}: {error}")
        send(self._control, LoadFailed(data_of(error)))
        self._end()

    def _report(self, report: Report) -> None:
        self._writer.write(encode_report(report), MAX_BACKLOG)
        if isinstance(report, Failed):
            self._end()

    def _end(self) -> None:
        self._failed.set()
        self._wake()
