"""Handle of an engine core in a thread of this process."""

import asyncio
import logging
import time

from baton.engine.core.commands import Command
from baton.engine.core.core_handle import OnReport
from baton.engine.core.cpu_time import cpu_seconds_of
from baton.engine.core.engine_core import EngineCore
from baton.engine.core.engine_loop import EngineLoop
from baton.engine.core.reports import EngineReading, Failed, Report
from baton.engine.executor.device import CUDA, Gpus, use_device

logger = logging.getLogger(__name__)


class EngineThread:
    """`CoreHandle` of an engine core that steps in a thread.

    Attributes:
        core: the engine, which belongs to the thread from `start` to the end of `stop`.
    """

    def __init__(self, core: EngineCore, gpus: Gpus = CUDA) -> None:
        """`gpus`: of which the engine's device may be one."""
        self.core = core
        self.facts = core.facts
        self.device = core.device
        self.pools = core.cache.pools
        self.encoder_pool = core.cache.encoder_pool
        self._gpus = gpus
        self._is_killed = False
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._on_report: OnReport = lambda _report: None
        self._engine_loop = EngineLoop(core, self._pass_on, gpus=gpus)

    @property
    def reading(self) -> EngineReading:
        return self._engine_loop.reading

    def start(self, loop: asyncio.AbstractEventLoop, on_report: OnReport) -> None:
        self._event_loop, self._on_report = loop, on_report
        use_device(self.device, self._gpus)
        self._engine_loop.start()

    def submit(self, command: Command) -> None:
        self._engine_loop.submit(command)

    @property
    def cpu_seconds(self) -> float:
        used = cpu_seconds_of(f"/proc/self/task/{self._engine_loop.native_id}")
        return time.process_time() if used is None else used

    def kill(self, reason: str) -> None:
        # A thread cannot be ended; as a daemon it ends with this process.
        self._is_killed = True
        self._on_report(Failed(reason))

    async def stop(self) -> None:
        if not self._is_killed:
            await asyncio.to_thread(self._engine_loop.stop)

    def _pass_on(self, report: Report) -> None:
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(self._on_report, report)
        except RuntimeError:
            logger.debug("the event loop is closed; the report is dropped")
