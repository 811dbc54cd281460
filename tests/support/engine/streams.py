"""Streams of an engine behind its thread."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from baton.engine.async_engine import AsyncEngine, SequenceStream
from baton.engine.messages import SequenceUpdate


@asynccontextmanager
async def running(engine: Any, **callbacks: Any) -> AsyncIterator[AsyncEngine]:
    serving = AsyncEngine(engine, **callbacks)
    serving.start()
    try:
        yield serving
    finally:
        await serving.stop()


async def settled(serving: AsyncEngine) -> None:
    """Returns when the engine has run all commands before this one and its answers are here."""
    await asyncio.wait_for(serving._query(lambda: None), 30)


async def assert_empty(serving: AsyncEngine) -> None:
    await settled(serving)
    assert serving.num_streams == 0
    stats = serving.stats()
    assert (stats.num_held_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert (stats.num_awaiting_kv, stats.num_swapped, stats.num_kept) == (0, 0, 0)
    serving.engine.check_integrity()


async def read(stream: SequenceStream) -> list[SequenceUpdate]:
    async def all_of_it() -> list[SequenceUpdate]:
        return [update async for batch in stream.updates() for update in batch]

    return await asyncio.wait_for(all_of_it(), 60)
