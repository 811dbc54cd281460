"""Streams of an engine behind its thread."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from baton.engine.client import EngineClient, SequenceStream
from baton.engine.core.engine_thread import EngineThread
from baton.engine.core.process.engine_process import EngineProcess
from baton.engine.llm import LLM
from baton.engine.outputs import SequenceUpdate


@asynccontextmanager
async def running(engine: LLM | EngineProcess, **callbacks: Any) -> AsyncIterator[EngineClient]:
    """Runs an engine in a thread, or one in a process."""
    handle = engine if isinstance(engine, EngineProcess) else EngineThread(engine.core)
    serving = EngineClient(handle, **callbacks)
    serving.start()
    try:
        yield serving
    finally:
        await serving.stop()


async def settled(serving: EngineClient) -> None:
    """Returns when the engine has run all commands before this one and its answers are here."""
    await asyncio.wait_for(serving.memory_report(), 30)


async def assert_empty(serving: EngineClient) -> None:
    await settled(serving)
    assert serving.num_streams == 0
    stats = serving.reading.stats
    assert (stats.num_held_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert (stats.num_awaiting_kv, stats.num_swapped, stats.num_kept) == (0, 0, 0)
    assert (stats.num_encode_jobs, stats.num_held_encoder_blocks) == (0, 0)
    if isinstance(serving.handle, EngineThread):
        serving.handle.core.scheduler.check_integrity()


async def read(stream: SequenceStream) -> list[SequenceUpdate]:
    async def all_of_it() -> list[SequenceUpdate]:
        return [update async for batch in stream.updates() for update in batch]

    return await asyncio.wait_for(all_of_it(), 60)
