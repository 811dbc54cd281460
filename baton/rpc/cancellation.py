"""Cancellation of work that is no longer wanted. Independent of what runs and of what stops it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar, overload

_Result = TypeVar("_Result")


def is_task_cancelled() -> bool:
    """Returns whether the current task is being cancelled. If not, an `asyncio.CancelledError` is
    of the call that it reads: `grpc.aio` raises the same for both."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@overload
async def run_until(
    work: Coroutine[Any, Any, _Result], stop: Coroutine[Any, Any, NoReturn]
) -> _Result: ...


@overload
async def run_until(
    work: Coroutine[Any, Any, _Result], stop: Coroutine[Any, Any, object]
) -> _Result | None: ...


async def run_until(
    work: Coroutine[Any, Any, _Result], stop: Coroutine[Any, Any, object]
) -> _Result | None:
    """Returns the result of `work`; None if `stop` ends first, which cancels `work`.

    Raises the error of either; if both fail, that of `work`, as `asyncio.timeout` does. Both have
    ended when it returns or raises, even if it is cancelled itself.
    """
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop)
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_stopped = stopping.done()
        working.cancel()
        stopping.cancel()
        # Waits for both even if this is cancelled meanwhile, and raises that only then.
        await asyncio.gather(working, stopping, return_exceptions=True)
    result = None if is_stopped and working.cancelled() else working.result()
    if is_stopped:
        stopping.result()
    return result
