"""Work on memory that is somebody else's as soon as whoever asked for it has gone."""

import asyncio
from typing import Any


async def ended(work: "asyncio.Future[Any]", within: float | None = None) -> bool:
    """Waits for work that cannot be called off, however often this is cancelled.

    `within`: at most so many seconds. Returns whether it has ended; what it came to is whoever
    waits for it to know, and nobody else.
    """
    clock = asyncio.get_running_loop().time
    until = None if within is None else clock() + within
    while not work.done():
        left = None if until is None else until - clock()
        if left is not None and left <= 0:
            return False
        try:
            await asyncio.wait({work}, timeout=left)
        except asyncio.CancelledError:
            continue
    if not work.cancelled():
        work.exception()
    return True
