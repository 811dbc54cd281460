"""Streams that have begun while no worker can take work: they wait for the fleet's next change."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.errors import CancelledError, DeadlineExceededError, InternalError
from baton_router.lifecycle.recovery import MAX_FAILURES
from baton_router.lifecycle.request_lifecycle import RequestLifecycle
from tests.support.router.scripted import (
    ADMITTED,
    READY,
    Cue,
    FakeFleet,
    Scripts,
    Worker,
    finished,
    fleet_of,
    letter_ids,
    lifecycle_of,
    messages_of,
    prefill_behind,
    tokens,
)
from tests.support.waiting import until

FULL = letter_ids()


@asynccontextmanager
async def without_workers(
    seconds: float = 20.0,
) -> AsyncIterator[tuple[FakeFleet, Worker, RequestLifecycle, "asyncio.Task[list[int]]"]]:
    """A request with two tokens, whose only decode worker is lost and does not come back yet."""
    lost = Cue()
    first = [ADMITTED, READY, tokens(1, 1), lost, InternalError("lost")]
    again = [ADMITTED, READY, tokens(3, 3, 4), finished()]
    decoding = Worker("d0", "decode", Scripts([first, again]))
    seen: list[int] = []

    async def read(lifecycle: RequestLifecycle) -> list[int]:
        async for event in messages_of(lifecycle):
            seen.extend(event.tokens.token_ids)
            if len(seen) == 2:
                decoding.is_away = True
                lost.event.set()
        return seen

    async with fleet_of(prefill_behind(0, 2), decoding) as fleet:
        lifecycle = lifecycle_of(fleet, seconds=seconds)
        reading = asyncio.create_task(read(lifecycle))
        await until(lambda: fleet.num_awaiting_change == 1 or reading.done())
        yield fleet, decoding, lifecycle, reading


async def test_stream_outlasts_any_number_of_changes_without_workers():
    async with without_workers() as (fleet, decoding, _, reading):
        for _ in range(3 * MAX_FAILURES):
            await fleet.note_change()
            await until(lambda: fleet.num_awaiting_change == 1)
        decoding.is_away = False
        await fleet.note_change()
        assert await reading == FULL


async def test_stream_without_workers_ends_at_its_deadline():
    async with without_workers(seconds=1.0) as (_, _, _, reading):
        with pytest.raises(DeadlineExceededError, match="waited for workers: no decode worker"):
            await reading


async def test_stream_without_workers_can_be_aborted():
    async with without_workers() as (_, _, lifecycle, reading):
        lifecycle.abort()
        with pytest.raises(CancelledError, match="was aborted"):
            await reading
