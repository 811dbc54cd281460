"""Budget of large requests: growth, order, and refusal where none could go on."""

import asyncio
import threading

import pytest

from baton.errors import OverloadedError
from baton.serving.grpc.large_requests import LARGE_BYTES, LargeRequests

KIB = 2**10


async def waits(task: asyncio.Task[None]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def test_budget_is_free_for_small_requests():
    requests = LargeRequests(LARGE_BYTES)
    with requests.share() as full, requests.share() as small:
        await full.grow(LARGE_BYTES + 1)
        await small.grow(LARGE_BYTES)
        assert small.num_bytes == 0


async def test_budget_grants_shares_in_order_of_arrival():
    requests = LargeRequests(500 * KIB)
    with requests.share() as second, requests.share() as third:
        with requests.share() as first:
            await first.grow(400 * KIB)
            growing = [asyncio.create_task(one.grow(200 * KIB)) for one in (second, third)]
            assert await waits(growing[0])
            assert await waits(growing[1])
        await asyncio.gather(*growing)
        assert second.num_bytes == third.num_bytes == 200 * KIB


async def test_budget_lets_a_request_alone_exceed_it():
    requests = LargeRequests(100 * KIB)
    with requests.share() as alone:
        await alone.grow(90 * KIB)
        await alone.grow(300 * KIB)
        assert alone.num_bytes == 300 * KIB


async def test_budget_refuses_last_of_shares_that_all_wait():
    requests = LargeRequests(400 * KIB)
    with requests.share() as first:
        await first.grow(200 * KIB)
        with requests.share() as last:
            await last.grow(150 * KIB)
            growing = asyncio.create_task(first.grow(300 * KIB))
            assert await waits(growing)
            with pytest.raises(OverloadedError) as caught:
                await last.grow(200 * KIB)
            assert caught.value.retry_after > 0
        await growing


async def test_budget_refuses_share_after_its_wait():
    requests = LargeRequests(400 * KIB, wait_seconds=0.05)
    with requests.share() as held, requests.share() as late:
        await held.grow(400 * KIB)
        with pytest.raises(OverloadedError, match="hold 409600 bytes; expected at most 409600"):
            await late.grow(100 * KIB)
        assert late.num_bytes == 0


async def test_budget_forgets_share_that_is_cancelled():
    requests = LargeRequests(400 * KIB)
    with requests.share() as held:
        await held.grow(400 * KIB)

        async def ask() -> None:
            with requests.share() as share:
                await share.grow(100 * KIB)

        task = asyncio.create_task(ask())
        assert await waits(task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    with requests.share() as whole, requests.share() as other:
        await whole.grow(300 * KIB)
        await other.grow(100 * KIB)


async def test_large_requests_are_parsed_in_a_thread():
    requests = LargeRequests()
    assert await requests.parse(threading.current_thread) is not threading.current_thread()
    requests.close()
