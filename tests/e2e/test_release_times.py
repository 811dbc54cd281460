"""Time from the end of a request to free blocks, leases and queue entries, by the workers' clocks.

Prints the 99th percentile and the maximum for each kind of ending.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.client.generation import AsyncGeneration
from baton.errors import BatonError, CancelledError, DeadlineExceededError, UnavailableError
from baton.sampling import SamplingParams
from tests.support.cluster import named_clusters
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.second_router import second_router
from tests.support.cluster.watch import loads, until_nothing_is_held
from tests.support.cluster.wide import HANDOFFS

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.nightly]

NUM_ROUNDS = 20
NUM_ROUTER_KILLS = 5
# Requests that end together, at all stages of their lives.
NUM_AT_ONCE = 6
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
# The promise, and what the milliseconds of two clocks may be rounded by.
BOUND_MS = 1000.0
ROUNDING_MS = 2.0

End = Callable[[AsyncClient, str, int], Awaitable[float]]
"""Runs requests to their end, by a client of the address; returns the time of the last end, in
seconds since 1970."""


@pytest.fixture(scope="module")
def quick() -> Iterator[LocalCluster]:
    with named_clusters.pair() as cluster:
        yield cluster


def begun(
    client: AsyncClient, number: int, params: SamplingParams = LONG, **options: object
) -> list[AsyncGeneration]:
    """Requests of several lengths, so that some are prefilled while others decode."""
    return [
        client.generate(prompt_of(30 + 60 * i, seed=number + i), params, **options)  # type: ignore[arg-type]
        for i in range(NUM_AT_ONCE)
    ]


async def until_some_decode(generations: list[AsyncGeneration]) -> None:
    for generation in generations[: NUM_AT_ONCE // 2]:
        await anext(generation)


async def finished(client: AsyncClient, _address: str, number: int) -> float:
    short = SamplingParams(max_tokens=20, ignore_eos=True)
    await asyncio.gather(*(g.token_ids() for g in begun(client, number, short)))
    return time.time()


async def stop_string(client: AsyncClient, _address: str, number: int) -> float:
    stopping = SamplingParams(max_tokens=1500, ignore_eos=True, stop=("e", "a", " "))
    await asyncio.gather(*(g.text() for g in begun(client, number, stopping)))
    return time.time()


async def cancelled(client: AsyncClient, _address: str, number: int) -> float:
    generations = begun(client, number)
    await until_some_decode(generations)
    for generation in generations:
        generation.cancel()
    return time.time()


async def aborted(client: AsyncClient, _address: str, number: int) -> float:
    generations = [
        client.generate(prompt_of(30 + 60 * i, seed=number + i), LONG, request_id=f"{number}-{i}")
        for i in range(NUM_AT_ONCE)
    ]
    for generation in generations:
        await generation.wait_accepted()
    await until_some_decode(generations)
    at = time.time()
    await asyncio.gather(*(client.abort(f"{number}-{i}") for i in range(NUM_AT_ONCE)))
    for generation in generations:
        with pytest.raises(CancelledError):
            await generation.text()
    return at


async def connection_closed(_client: AsyncClient, address: str, number: int) -> float:
    leaving = AsyncClient(address)
    generations = begun(leaving, number)
    await until_some_decode(generations)
    await leaving.close()
    return time.time()


async def deadline(_client: AsyncClient, address: str, number: int) -> float:
    async with AsyncClient(address, timeout=0.3) as hasty:
        began = time.time()
        outcomes = await asyncio.gather(
            *(g.text() for g in begun(hasty, number)), return_exceptions=True
        )
    assert any(isinstance(outcome, DeadlineExceededError) for outcome in outcomes)
    assert all(isinstance(outcome, BatonError) for outcome in outcomes), outcomes
    return began + 0.3


ENDS: list[End] = [finished, stop_string, cancelled, aborted, connection_closed, deadline]


async def released_at(cluster: LocalCluster, *, with_router: bool = True) -> float:
    """Returns the time since which no process holds anything, by the processes' own clocks."""
    await until_nothing_is_held(cluster, within=5.0)
    found = await asyncio.to_thread(loads, cluster)
    times = [
        load.idle_since_unix_ms for name, load in found.items() if with_router or name != "router"
    ]
    assert all(times), found
    return max(times) / 1000


def check(kind: str, delays: list[float]) -> None:
    ordered = sorted(delays)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    print(f"{kind:18} {len(ordered):3} rounds: p99 {p99:6.1f} ms, maximum {ordered[-1]:6.1f} ms")
    assert ordered[-1] < BOUND_MS + ROUNDING_MS


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_everything_is_released_within_a_second(quick, end):
    delays = []
    async with AsyncClient(quick.address, admin_address=quick.admin_address) as client:
        for number in range(NUM_ROUNDS):
            ended_at = await end(client, quick.address, 100 * number)
            delays.append(1000 * max(0.0, await released_at(quick) - ended_at))
    check(end.__name__, delays)


async def test_everything_is_released_after_a_router_dies(quick):
    delays = []
    for number in range(NUM_ROUTER_KILLS):
        with second_router(quick, **HANDOFFS) as router:
            async with AsyncClient(router.address) as client:
                generations = begun(client, 100 * number)
                await until_some_decode(generations)
                router.router.signal(signal.SIGKILL)
                ended_at = time.time()
                for generation in generations:
                    with pytest.raises(UnavailableError):
                        await generation.text()
        delays.append(1000 * max(0.0, await released_at(quick, with_router=False) - ended_at))
    check("router killed", delays)
