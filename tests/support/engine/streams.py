"""Streams of an engine behind its thread."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from baton.engine.async_engine import AsyncEngine, SequenceStream
from baton.engine.core.engine_thread import EngineThread
from baton.engine.messages import SequenceUpdate
from baton.engine.process.engine_process import EngineProcess


@asynccontextmanager
async def running(engine: Any, **callbacks: Any) -> AsyncIterator[AsyncEngine]:
    """Runs an engine in a thread, or one in a process."""
    core = engine if isinstance(engine, EngineProcess) else EngineThread(engine)
    serving = AsyncEngine(core, **callbacks)
    serving.start()
    try:
        yield serving
    finally:
        await serving.stop()


async def settled(serving: AsyncEngine) -> None:
    """Returns when the engine has run all commands before this one and its answers are here."""
    await asyncio.wait_for(serving.memory_report(), 30)


async def assert_empty(serving: AsyncEngine) -> None:
    await settled(serving)
    assert serving.num_streams == 0
    stats = serving.stats()
    assert (stats.num_held_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert (stats.num_awaiting_kv, stats.num_swapped, stats.num_kept) == (0, 0, 0)
    assert (stats.num_encode_jobs, stats.num_held_encoder_blocks) == (0, 0)
    if isinstance(serving.core, EngineThread):
        serving.core.engine.check_integrity()


async def read(stream: SequenceStream) -> list[SequenceUpdate]:
    async def all_of_it() -> list[SequenceUpdate]:
        return [update async for batch in stream.updates() for update in batch]

    return await asyncio.wait_for(all_of_it(), 60)
