"""Work that runs until it ends or is stopped, in any order of what may happen meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from baton.errors import DataLossError, UnavailableError
from baton.rpc.cancellation import run_until

WORK_FAILED, STOP_FAILED = DataLossError("the work"), UnavailableError("the stop")
CANCELLED = asyncio.CancelledError()


@pytest_asyncio.fixture(autouse=True)
async def nothing_left_running() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    assert asyncio.all_tasks() <= before | {asyncio.current_task()}


async def ends(outcome: object = None) -> Any:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


async def runs(outcome: object = None) -> Any:
    """Runs until it is cancelled, and a while longer; ends as cancelled, or with an error."""
    try:
        await asyncio.Event().wait()
    finally:
        for _ in range(5):
            await asyncio.sleep(0)
        await ends(outcome)


@pytest.mark.parametrize(
    ("work", "stop", "expected"),
    [
        (lambda: ends("done"), runs, "done"),
        (lambda: ends("done"), ends, "done"),
        (lambda: ends("done"), lambda: ends(STOP_FAILED), STOP_FAILED),
        (lambda: ends(WORK_FAILED), runs, WORK_FAILED),
        (lambda: ends(WORK_FAILED), ends, WORK_FAILED),
        (lambda: ends(WORK_FAILED), lambda: ends(STOP_FAILED), WORK_FAILED),
        (lambda: ends(CANCELLED), runs, CANCELLED),
        (runs, ends, None),
        (runs, lambda: ends(STOP_FAILED), STOP_FAILED),
        (lambda: runs(WORK_FAILED), lambda: ends(STOP_FAILED), WORK_FAILED),
    ],
)
async def test_run_until_ends_both_and_keeps_errors(
    work: Callable[[], Any], stop: Callable[[], Any], expected: object
) -> None:
    if isinstance(expected, BaseException):
        with pytest.raises(type(expected)):
            await run_until(work(), stop())
    else:
        assert await run_until(work(), stop()) == expected


@pytest.mark.parametrize("num_cancellations", [1, 3])
@pytest.mark.parametrize(("work", "stop"), [(runs, runs), (runs, ends), (ends, runs)])
async def test_run_until_ends_both_when_cancelled(
    work: Callable[[], Any], stop: Callable[[], Any], num_cancellations: int
) -> None:
    """Cancelled while both run, or while one that was cancelled still ends."""
    running = asyncio.create_task(run_until(work(), stop()))
    for _ in range(3):
        await asyncio.sleep(0)
    for _ in range(num_cancellations):
        running.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
