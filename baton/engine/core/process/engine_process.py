"""Handle of an engine core in a process of its own: the parent's end."""

import asyncio
import contextlib
import logging

import torch

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import LoadProgress, OnLoadedBytes
from baton.engine.core.commands import Command
from baton.engine.core.core_handle import OnReport
from baton.engine.core.process.command_codec import encode_command
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
from baton.engine.core.process.engine_child import EngineChild
from baton.engine.core.process.error_codec import error_of
from baton.engine.core.process.pool_memory import (
    MemoryNotSharedError,
    check_sample,
    close_pools,
    open_pools,
)
from baton.engine.core.process.reading_page import ReadingPage
from baton.engine.core.process.report_codec import decode_report
from baton.engine.core.process.ring import Ring, RingReader, RingWriter
from baton.engine.core.reports import EngineReading, Failed
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.facts import EngineFacts
from baton.errors import UnavailableError

logger = logging.getLogger(__name__)

_COMMAND_BYTES = 1 << 20
_REPORT_BYTES = 4 << 20
_STOP_SECONDS = 30.0
"""Time for the last step after `Stop`; then the process is killed."""
_KILL_SECONDS = 5.0


class EngineProcess:
    """`CoreHandle` of an engine core that steps in a child process.

    Its pools are the child's memory, mapped here until `stop`. A child that ends by itself is
    reported as `Failed`, with its last error, exit code or signal.

    Attributes:
        facts: properties of the engine that never change.
        device: device of the engine.
        pools: KV pools over the engine's memory, in the order of their layouts.
        encoder_pool: pool of encoder outputs over that memory; None for a model without an encoder.
        child: the child process.
    """

    def __init__(
        self,
        child: EngineChild,
        facts: EngineFacts,
        pools: list[KvPool],
        commands: Ring,
        reports: Ring,
        page: ReadingPage,
    ) -> None:
        """Takes over an engine that is ready; all descriptors belong to it. `pools`: as of
        `open_pools`."""
        self.child = child
        self.facts = facts
        self.device = torch.device(facts.device)
        self.pools = pools[: len(facts.layouts)]
        self.encoder_pool = pools[-1] if len(pools) > len(self.pools) else None
        self._all_pools = pools
        self._commands = commands
        self._reports = reports
        self._page = page
        self._writer = RingWriter(commands, on_backlog=self._watch_space)
        self._reader = RingReader(reports)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_report: OnReport = lambda _report: None
        self._ended = asyncio.Event()
        self._is_stopping = self._has_failed = self._is_killed = False

    @classmethod
    def load(
        cls,
        child: EngineChild,
        model: str,
        config: EngineConfig,
        on_progress: LoadProgress = lambda _phase, _fraction: None,
        on_loaded_bytes: OnLoadedBytes = lambda _loaded, _all: None,
    ) -> "EngineProcess":
        """Has the child load a checkpoint, and waits. Arguments and errors as in
        `EngineCore.from_pretrained`; `UnavailableError` if the child ends, and
        `MemoryNotSharedError` if this process cannot open memory of its GPU. After an error the
        child has ended and is closed."""
        commands, reports = Ring.create(_COMMAND_BYTES), Ring.create(_REPORT_BYTES)
        page = ReadingPage.create()
        shared = [*commands.descriptors, *reports.descriptors, page.descriptor]
        with contextlib.suppress(OSError):  # a child that is gone is noticed below
            send(child.control, Start(model, config), shared)
        try:
            ready, descriptors = _await_ready(child, on_progress, on_loaded_bytes)
            pools = open_pools(ready.facts, ready.places, descriptors)
        except BaseException:
            child.kill()
            child.reap()
            for each in (commands, reports, page, child):
                each.close()
            raise
        if not config.shared_pools:
            for pool in pools:
                pool.shared = None  # not for other workers
        return cls(child, ready.facts, pools, commands, reports, page)

    @property
    def reading(self) -> EngineReading:
        return self._page.read()

    def start(self, loop: asyncio.AbstractEventLoop, on_report: OnReport) -> None:
        self._loop, self._on_report = loop, on_report
        loop.add_reader(self._reports.filled, self._read)
        loop.add_reader(self.child.pidfd, self._note_end)
        if self._writer.has_backlog:
            self._watch_space()

    def submit(self, command: Command) -> None:
        if not self._ended.is_set():
            self._writer.write(encode_command(command))

    @property
    def cpu_seconds(self) -> float:
        return self.child.cpu_seconds

    def kill(self, reason: str) -> None:
        # Reported at once: a process that hangs in its driver survives the signal.
        self._is_killed = self._has_failed = True
        self._on_report(Failed(reason))
        self.child.kill()

    async def stop(self) -> None:
        self._is_stopping = True
        assert self._loop is not None, "an engine that was not started"
        if not self._ended.is_set():
            with contextlib.suppress(OSError):
                send(self.child.control, Stop())
        if not self._is_killed and not await self._has_ended(_STOP_SECONDS):
            logger.warning("the engine's process did not stop in %g s; killed", _STOP_SECONDS)
            self.child.kill()
        if not await self._has_ended(_KILL_SECONDS):
            logger.error("the engine's process hangs in its driver; it ends with this one")
        close_pools(self._all_pools)

    async def _has_ended(self, seconds: float) -> bool:
        """Waits for the child's end, up to `seconds`; returns whether it has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        return self._ended.is_set()

    def _read(self) -> None:
        for record in self._reader.read():
            report = decode_report(record)
            self._has_failed |= isinstance(report, Failed)
            self._on_report(report)

    def _note_end(self) -> None:
        """Notes the end of the child, after its last reports."""
        self._unwatch()
        self.child.reap()
        self._read()
        if not self._is_stopping and not self._has_failed:
            logger.error("the engine has ended: %s", self.child.end)
            self._on_report(Failed(self.child.end))
        self._ended.set()
        self._commands.close()
        self._reports.close()
        self._page.close()
        self.child.close()

    def _watch_space(self) -> None:
        if self._loop is not None:
            self._loop.add_reader(self._commands.freed, self._flush)

    def _flush(self) -> None:
        self._writer.flush()
        if not self._writer.has_backlog and self._loop is not None:
            self._loop.remove_reader(self._commands.freed)

    def _unwatch(self) -> None:
        assert self._loop is not None
        for descriptor in (self.child.pidfd, self._reports.filled, self._commands.freed):
            self._loop.remove_reader(descriptor)


def _await_ready(
    child: EngineChild, on_progress: LoadProgress, on_loaded_bytes: OnLoadedBytes
) -> tuple[Ready, list[int]]:
    """Waits until the child has loaded its model. Returns what it says of it, with the descriptors
    of its pools."""
    while True:
        message, descriptors = receive(child.control)
        match message:
            case Progress(phase, fraction):
                on_progress(phase, fraction)
            case LoadedBytes(num_loaded, num_all):
                on_loaded_bytes(num_loaded, num_all)
            case Ready():
                return message, descriptors
            case Sample(device, place):
                check_sample(place, torch.device(device))
                with contextlib.suppress(OSError):
                    send(child.control, SampleOpened())
            case LoadFailed(data):
                child.reap()
                raise error_of(data)
            case NotShared(problem):
                raise MemoryNotSharedError(problem)
            case _:
                child.reap()
                raise UnavailableError(f"the engine ended while it was being loaded: {child.end}")
