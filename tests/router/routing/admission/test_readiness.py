"""Readiness of a router, by a clock of the test's."""

import asyncio

import pytest

from baton.errors import DeadlineExceededError, OverloadedError, UnavailableError
from baton.serving.deadline import Deadline
from baton_router.routing.admission.readiness import Readiness
from tests.support.waiting import settled

NONE = "no decode worker is known"
NO_PREFILL = "no prefill worker is known"


class Pool:
    """Workers of which a test says what they could take, and the time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.missing = NONE
        self.missing_prefill = NO_PREFILL

    def why_none(self, needs_prefill: bool) -> str:
        return self.missing or (self.missing_prefill if needs_prefill else "")

    def readiness(self, max_waiting: int = 8, **settings: object) -> Readiness:
        clock = lambda: self.now  # noqa: E731
        return Readiness(self.why_none, max_waiting, clock=clock, **settings)  # type: ignore[arg-type]


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_readiness_begins_when_a_request_could_be_placed(pool):
    readiness = pool.readiness()
    readiness.update()
    assert readiness.reason == NONE
    pool.missing = ""
    readiness.update()
    assert readiness.reason == ""


def test_readiness_ends_only_after_hold_without_workers(pool):
    readiness = pool.readiness(hold_seconds=30.0)
    pool.missing = ""
    readiness.update()
    pool.missing = NONE
    pool.now += 29.0
    readiness.update()
    assert readiness.reason == ""
    pool.now += 2.0
    readiness.update()
    assert readiness.reason == NONE
    pool.missing = ""
    readiness.update()
    assert readiness.reason == ""


def test_readiness_needs_no_workers_if_told(pool):
    readiness = pool.readiness(needs_workers=False)
    readiness.update()
    assert readiness.reason == ""


async def test_requests_wait_for_first_workers_and_never_again(pool):
    readiness = pool.readiness()
    waiting = asyncio.create_task(readiness.wait_for_workers(Deadline.after(5.0)))
    await settled()
    assert (waiting.done(), readiness.num_waiting) == (False, 1)
    pool.missing = ""
    readiness.update()
    await waiting
    assert readiness.num_waiting == 0
    pool.missing = NONE
    readiness.update()
    await readiness.wait_for_workers(Deadline.after(0.0))


async def test_request_that_scores_prompt_waits_for_prefill_workers(pool):
    readiness = pool.readiness()
    waiting = asyncio.create_task(
        readiness.wait_for_workers(Deadline.after(5.0), needs_prefill=True)
    )
    await settled()
    pool.missing = ""
    readiness.update()
    await settled()
    assert not waiting.done()
    # But not for longer than such workers take to start.
    pool.now += 11.0
    readiness.update()
    await waiting


async def test_deadline_of_waiting_request_names_missing_role(pool):
    with pytest.raises(DeadlineExceededError, match=NONE):
        await pool.readiness().wait_for_workers(Deadline.after(0.01))


async def test_requests_beyond_bound_are_rejected_with_retry_after(pool):
    readiness = pool.readiness(max_waiting=1)
    waiting = asyncio.create_task(readiness.wait_for_workers(Deadline.after(5.0)))
    await settled()
    with pytest.raises(OverloadedError, match="1 requests wait") as caught:
        await readiness.wait_for_workers(Deadline.after(5.0))
    assert caught.value.retry_after > 0
    waiting.cancel()
    await settled()
    assert readiness.num_waiting == 0


async def test_drain_ends_requests_that_wait_for_workers(pool):
    readiness = pool.readiness()
    waiting = asyncio.create_task(readiness.wait_for_workers(Deadline.after(5.0)))
    await settled()
    await readiness.drain()
    with pytest.raises(UnavailableError, match="draining"):
        await waiting
