"""Cancellation-safe waiting for work that reads or writes blocks until it ends."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, Protocol, TypeVar

_Result = TypeVar("_Result")


class _Closable(Protocol):
    def close(self) -> None: ...


_Opened = TypeVar("_Opened", bound=_Closable)


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


async def in_thread(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Returns the result of a function that is called in a thread. The call has ended when this
    returns or raises, even by cancellation."""
    calling = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
    try:
        return await asyncio.shield(calling)
    finally:
        await ended(calling)


async def opened(attach: Callable[[], _Opened]) -> _Opened:
    """Calls `attach` in a thread and returns what it opened; closes that if this is cancelled."""
    opening = asyncio.get_running_loop().run_in_executor(None, attach)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(opening: "asyncio.Future[_Opened]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


async def one_ahead(calls: Iterable[Callable[[], _Result]]) -> AsyncGenerator[_Result, None]:
    """Yields the results of `calls` in order. Each is called in a thread while the result before it
    is used. Has to be closed (`contextlib.aclosing`): no call is running after that."""
    start = asyncio.get_running_loop().run_in_executor
    calling: asyncio.Future[_Result] | None = None
    try:
        for call in calls:
            before, calling = calling, start(None, call)
            if before is not None:
                yield before.result()
            await asyncio.shield(calling)
        if calling is not None:
            yield calling.result()
    finally:
        if calling is not None:
            await ended(calling)
