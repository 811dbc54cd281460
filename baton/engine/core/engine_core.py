"""Engine core: the seam between `AsyncEngine` and an engine that steps beside the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from baton.engine.cache.kv_pool import KvPool
from baton.engine.core.commands import Command
from baton.engine.core.reports import EngineReading, Report
from baton.engine.facts import EngineFacts
from baton.engine.messages import EngineRequest
from baton.models.encoder_input import EncoderInput

OnReport = Callable[[Report], None]


class EngineCore(Protocol):
    """Engine that steps in a thread or a process of its own. All methods belong to the event loop's
    thread, and none waits for a step."""

    @property
    def facts(self) -> EngineFacts:
        """Properties of the engine that never change."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def pools(self) -> Sequence[KvPool]:
        """KV pools over the engine's memory, in the order of their layouts."""
        ...

    @property
    def encoder_pool(self) -> KvPool | None:
        """Pool of encoder outputs over the engine's memory; None for a model without an encoder."""
        ...

    @property
    def reading(self) -> EngineReading:
        """A consistent reading: as of the last planned step, or later. It includes all updates and
        answers that have been reported."""
        ...

    def check(self, request: EngineRequest) -> None:
        """Raises the errors of `Engine.check` that do not concern a grammar."""
        ...

    def check_encoder_input(self, encoder_input: EncoderInput, *, has_tensors: bool) -> None:
        """Raises the errors of `Engine.check_encoder_input`."""
        ...

    def start(self, loop: asyncio.AbstractEventLoop, on_report: OnReport) -> None:
        """Begins to run commands. `on_report` is called in the loop's thread."""
        ...

    def submit(self, command: Command) -> None:
        """Queues a command. Before `start` too; dropped after the end."""
        ...

    async def stop(self) -> None:
        """Stops after the current step and frees all blocks."""
        ...
