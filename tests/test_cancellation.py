"""Work that runs until it ends or is stopped, in any order of what may happen meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from baton.cancellation import run_until
from baton.errors import DataLossError, UnavailableError

WORK_FAILED, STOP_FAILED = DataLossError("the work"), UnavailableError("the stop")


@pytest_asyncio.fixture(autouse=True)
async def nothing_left_running() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before | {asyncio.current_task()}


async def ending(outcome: object = None) -> Any:
    """Ends at once, with a result or an error."""
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


async def cleaning_up(cleaned: list[bool], outcome: object = None) -> Any:
    """Runs until it is cancelled; then takes a while to end, with the cancellation or an error."""
    try:
        await asyncio.Event().wait()
    finally:
        try:
            for _ in range(5):
                await asyncio.sleep(0)
        finally:
            cleaned.append(True)
        await ending(outcome)


def forever() -> Any:
    return asyncio.Event().wait()


@pytest.mark.parametrize("stop", [forever, ending])
async def test_run_until_returns_result_of_finished_work(stop):
    assert await run_until(ending("done"), stop()) == "done"


@pytest.mark.parametrize("stop", [forever, ending, lambda: ending(STOP_FAILED)])
async def test_run_until_keeps_error_of_failed_work(stop):
    with pytest.raises(DataLossError):
        await run_until(ending(WORK_FAILED), stop())


async def test_run_until_ends_work_before_it_returns_when_stopped():
    cleaned: list[bool] = []
    assert await run_until(cleaning_up(cleaned), ending()) is None
    assert cleaned


async def test_run_until_raises_error_of_stop_after_work_ended():
    cleaned: list[bool] = []
    with pytest.raises(UnavailableError):
        await run_until(cleaning_up(cleaned), ending(STOP_FAILED))
    assert cleaned


async def test_run_until_raises_error_of_stop_when_both_end_at_once():
    with pytest.raises(UnavailableError):
        await run_until(ending("done"), ending(STOP_FAILED))


async def test_run_until_keeps_error_of_work_while_it_is_stopped():
    with pytest.raises(DataLossError):
        await run_until(cleaning_up([], WORK_FAILED), ending(STOP_FAILED))


async def test_run_until_raises_cancellation_that_work_raises_itself():
    with pytest.raises(asyncio.CancelledError):
        await run_until(ending(asyncio.CancelledError()), forever())


@pytest.mark.parametrize("num_cancellations", [1, 3])
@pytest.mark.parametrize("stop", [forever, ending])
async def test_run_until_ends_both_when_cancelled(stop, num_cancellations):
    """Cancelled while both run, or while the stopped work still ends."""
    cleaned: list[bool] = []
    running = asyncio.create_task(run_until(cleaning_up(cleaned), stop()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for _ in range(num_cancellations):
        running.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(cleaned) == 1


async def test_run_until_keeps_cancellation_that_comes_with_the_result():
    running = asyncio.create_task(run_until(ending("done"), cleaning_up([])))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
