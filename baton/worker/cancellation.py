"""Cancellation of work that runs for a sequence outside the engine, when the sequence ends."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from baton.engine.async_engine import SequenceStream

_Result = TypeVar("_Result")


async def unless_ended(stream: SequenceStream, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Returns the result of `work`, which runs while no update of the sequence can come.

    If the sequence ends first, cancels `work` and raises what ended the sequence.
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
