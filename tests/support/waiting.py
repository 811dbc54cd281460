"""Waiting for a condition, with a bound on the time."""

import asyncio
import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    within: float = 10.0,
    what: str = "the condition",
    ignoring: tuple[type[BaseException], ...] = (),
) -> None:
    """Blocks until `condition()` holds; fails after `within` seconds.

    An exception of a type in `ignoring` counts as a condition that does not hold yet.
    """
    deadline = time.monotonic() + within
    while True:
        try:
            if condition():
                return
        except ignoring:
            pass
        assert time.monotonic() < deadline, f"{what} did not happen within {within} s"
        time.sleep(0.01)


async def until(
    condition: Callable[[], object], within: float = 10.0, what: str = "the condition"
) -> None:
    """Waits until `condition()`, which must not block, holds; fails after `within` seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {within} s"
        await asyncio.sleep(0.002)


async def settled() -> None:
    """Returns after every task that is ready has run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until_observed(
    condition: Callable[[], object], within: float = 10.0, what: str = "the condition"
) -> None:
    """Waits until `condition()`, which may block, holds; fails after `within` seconds."""
    await asyncio.to_thread(wait_until, condition, within, what)
