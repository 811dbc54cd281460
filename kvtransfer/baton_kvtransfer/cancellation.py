"""Cancellation-safe waiting for work that writes to blocks until it ends."""

import asyncio
from typing import Any


async def ended(work: "asyncio.Future[Any]", within: float | None = None) -> bool:
    """Waits until `work` ends, even if this is cancelled; `work` itself cannot be cancelled.

    Waits at most `within` seconds. Returns whether it has ended; never raises its error.
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
