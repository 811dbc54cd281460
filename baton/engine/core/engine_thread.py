"""Engine core in a thread of this process."""

import asyncio
import logging

import torch

from baton.engine.cache.kv_pool import KvPool
from baton.engine.core.commands import Command
from baton.engine.core.engine_core import OnReport
from baton.engine.core.engine_loop import EngineLoop
from baton.engine.core.reports import EngineReading, Report
from baton.engine.device import CUDA, Gpus, use_device
from baton.engine.engine import Engine
from baton.engine.facts import EngineFacts
from baton.engine.messages import EngineRequest
from baton.models.encoder_input import EncoderInput

logger = logging.getLogger(__name__)


class EngineThread:
    """`EngineCore` whose engine steps in a thread.

    Attributes:
        engine: the engine, which belongs to the thread from `start` to the end of `stop`.
    """

    def __init__(self, engine: Engine, gpus: Gpus = CUDA) -> None:
        """`gpus`: of which the engine's device may be one."""
        self.engine = engine
        self._gpus = gpus
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._on_report: OnReport = lambda _report: None
        self._engine_loop = EngineLoop(engine, self._pass_on, gpus=gpus)

    @property
    def facts(self) -> EngineFacts:
        return self.engine.facts

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def pools(self) -> list[KvPool]:
        return self.engine.cache.pools

    @property
    def encoder_pool(self) -> KvPool | None:
        return self.engine.encoder_pool

    @property
    def reading(self) -> EngineReading:
        return self._engine_loop.reading

    def check(self, request: EngineRequest) -> None:
        self.engine.check(request)

    def check_encoder_input(self, encoder_input: EncoderInput, *, has_tensors: bool) -> None:
        self.engine.check_encoder_input(encoder_input, has_tensors=has_tensors)

    def start(self, loop: asyncio.AbstractEventLoop, on_report: OnReport) -> None:
        self._event_loop, self._on_report = loop, on_report
        use_device(self.device, self._gpus)
        self._engine_loop.start()

    def submit(self, command: Command) -> None:
        self._engine_loop.submit(command)

    async def stop(self) -> None:
        await asyncio.to_thread(self._engine_loop.stop)

    def _pass_on(self, report: Report) -> None:
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(self._on_report, report)
        except RuntimeError:
            logger.debug("the event loop is closed; the report is dropped")
