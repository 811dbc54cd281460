"""Waiting for a condition, with a bound on the time."""

import asyncio
import time
from collections.abc import Callable, Collection


def wait_until(
    condition: Callable[[], object],
    within: float = 10.0,
    what: str = "the condition",
    ignoring: tuple[type[BaseException], ...] = (),
    interval: float = 0.01,
) -> None:
    """Blocks until `condition()` holds; fails after `within` seconds.

    An exception of a type in `ignoring` counts as a condition that does not hold yet. A condition
    that costs more than a little is asked for each `interval` seconds.
    """
    deadline = time.monotonic() + within
    while True:
        try:
            if condition():
                return
        except ignoring:
            pass
        assert time.monotonic() < deadline, f"{what} did not happen within {within} s"
        time.sleep(interval)


async def until(
    condition: Callable[[], object], within: float = 10.0, what: str = "the condition"
) -> None:
    """Waits until `condition()`, which must not block, holds; fails after `within` seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {within} s"
        await asyncio.sleep(0.002)


async def until_none_is_left(
    found: Callable[[], Collection[str]], within: float = 10.0, what: str = "things"
) -> None:
    """Waits until `found()`, which may block, is empty; fails after `within` seconds with what it
    is then."""
    deadline = time.monotonic() + within
    while left := await asyncio.to_thread(found):
        assert time.monotonic() < deadline, f"{what} left after {within} s: {', '.join(left)}"
        await asyncio.sleep(0.01)


async def settled() -> None:
    """Returns after every task that is ready has run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until_observed(
    condition: Callable[[], object], within: float = 10.0, what: str = "the condition"
) -> None:
    """Waits until `condition()`, which may block, holds; fails after `within` seconds."""
    await asyncio.to_thread(wait_until, condition, within, what)
