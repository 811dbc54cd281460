"""Waiting, on behalf of a sequence, for something else than the engine."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from baton.engine.async_engine import SequenceStream

_Result = TypeVar("_Result")


async def unless_ended(stream: SequenceStream, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, which runs while no update of the sequence can come.

    Raises what ends the sequence, if something does meanwhile; `work` has then been cancelled.
    """
    working = asyncio.create_task(work)
    ending = asyncio.create_task(stream.failure())
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            ending.result()
        return working.result()
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)
