"""Core handle: the seam between `EngineClient` and an engine core beside the event loop."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import torch

from baton.engine.core.commands import Command
from baton.engine.core.reports import EngineReading, Report
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.facts import EngineFacts

OnReport = Callable[[Report], None]


class CoreHandle(Protocol):
    """Handle of an engine core that steps in a thread or a process of its own. All methods belong
    to the event loop's thread, and none waits for a step.

    Attributes:
        facts: properties of the engine that never change.
        pools: KV pools over the engine's memory, in the order of their layouts; the first has the
            largest window.
        encoder_pool: pool of encoder outputs over that memory: a block is `block_size` rows, K of
            one head of one layer without V. None for a model without an encoder.
    """

    facts: EngineFacts
    device: torch.device
    pools: list[KvPool]
    encoder_pool: KvPool | None

    @property
    def reading(self) -> EngineReading:
        """A consistent reading: as of the last planned step, or later. It includes all updates and
        answers that have been reported."""
        ...

    def start(self, loop: asyncio.AbstractEventLoop, on_report: OnReport) -> None:
        """Begins to run commands. `on_report` is called in the loop's thread."""
        ...

    def submit(self, command: Command) -> None:
        """Queues a command. Before `start` too; dropped after the end."""
        ...

    @property
    def cpu_seconds(self) -> float:
        """CPU time that the process or thread in which the engine steps has used, in steps of 10
        ms; where threads are not told apart, that of this process."""
        ...

    def kill(self, reason: str) -> None:
        """Ends an engine that stands still, which is reported as `Failed`. `stop` then waits for no
        step."""
        ...

    async def stop(self) -> None:
        """Stops after the current step and frees all blocks."""
        ...
