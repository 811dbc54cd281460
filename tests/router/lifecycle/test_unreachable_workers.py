"""A worker that lives, and cannot be reached any more, one way or both."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.errors import UnavailableError
from tests.support.proxy import Link, Proxy
from tests.support.router.scripted import (
    PREFILL_ADMITTED,
    READY,
    RELEASED,
    Forever,
    Scripts,
    Worker,
    decode,
    finished,
    first,
    fleet_of,
    letter_ids,
    lifecycle_of,
    messages_of,
    prefill_behind,
    tokens,
)
from tests.support.waiting import until

SILENCE_BOUND = 2.0


@asynccontextmanager
async def behind_a_proxy(worker: Worker) -> AsyncIterator[Link]:
    """The worker is reached over the proxy alone."""
    link = Link()
    async with Proxy.on(link, int(worker.endpoint.rpartition(":")[2])) as proxy:
        worker.endpoint = f"127.0.0.1:{proxy.port}"
        yield link


@pytest.mark.parametrize("directions", [("there",), ("back",), ("there", "back")])
async def test_lifecycle_replaces_cut_off_worker_within_silence_bound(directions):
    cut_off = decode(READY, tokens(0, 0, 1), Forever())
    other = decode(READY, tokens(2, 2), finished(), name="d1")
    async with (
        fleet_of(prefill_behind(0, 2), cut_off, other) as fleet,
        behind_a_proxy(cut_off) as link,
    ):
        seen: list[int] = []
        cut_at = 0.0
        async for event in messages_of(lifecycle_of(fleet)):
            seen += event.tokens.token_ids
            if len(seen) == 2:
                for direction in directions:
                    getattr(link, direction).is_cut = True
                cut_at = time.monotonic()
        assert time.monotonic() - cut_at < SILENCE_BOUND + 0.5
        assert seen == letter_ids()[:3]
        # It learns of nothing, and must find out by itself that no worker listens.
        await until(lambda: not cut_off.num_running, within=SILENCE_BOUND + 0.5)
    assert (cut_off.num_losses, other.num_losses) == (1, 0)


async def test_lifecycle_pairs_unreachable_workers_with_others():
    cannot = UnavailableError("cannot fetch from p0")
    apart = decode(cannot)
    # It is no worker's fault: with another prefill worker the request goes on.
    together = Scripts([apart.script, decode(READY, tokens(1, 1), finished()).script])
    workers = [
        Worker("p0", "prefill", [PREFILL_ADMITTED, first(), Forever()]),
        Worker("p1", "prefill", [PREFILL_ADMITTED, first(), RELEASED]),
        Worker("d0", "decode", together),
    ]
    async with fleet_of(*workers) as fleet:
        seen = [
            t async for event in messages_of(lifecycle_of(fleet)) for t in event.tokens.token_ids
        ]
    assert seen == letter_ids()[:2]
    assert [len(worker.requests) for worker in workers] == [1, 1, 2]
    assert all(worker.num_losses == 0 for worker in workers)
