"""A client that resets its calls as fast as it can, beside clients that want answers."""

import asyncio
from itertools import chain

import pytest

from baton.client.client import AsyncClient
from baton.sampling import SamplingParams
from bench.router.stream_resets import attackers
from tests.support.cluster.second_router import second_router
from tests.support.cluster.watch import until_nothing_is_held

pytestmark = pytest.mark.e2e

GENERATE = "/baton.v1.Inference/Generate"
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


async def answers_until(stop: asyncio.Event, address: str) -> list[str]:
    """Returns the answers to one client after the other, without a second try."""
    answers = []
    while not stop.is_set():
        async with AsyncClient(address, resume=False) as client:
            answers.append(await client.generate("def", SHORT).text())
    return answers


async def test_router_drops_resetting_clients_and_answers_others(cluster):
    stop = asyncio.Event()
    port = int(cluster.address.rpartition(":")[2])
    async with AsyncClient(cluster.address) as client:
        expected = await client.generate("def", SHORT).text()
    innocents = [asyncio.create_task(answers_until(stop, cluster.address)) for _ in range(3)]
    with attackers(port, GENERATE, 2, seconds=20.0) as outcomes:
        await asyncio.sleep(1.5)
        stop.set()
        answers = [*chain(*await asyncio.gather(*innocents))]
    assert set(answers) == {expected}
    assert len(answers) >= 3
    assert [was_dropped for _, was_dropped in outcomes] == [True, True]
    await until_nothing_is_held(cluster)


async def test_router_takes_connection_limits_from_its_settings(single_shape):
    flags = {"max_resets_per_s": 10**6, "max_new_streams_per_s": 10**6}
    with second_router(single_shape, **flags) as unguarded:
        port = int(unguarded.address.rpartition(":")[2])
        with attackers(port, GENERATE, 1, seconds=0.5) as outcomes:
            pass
    (outcome,) = outcomes
    assert outcome[0] > 1000
    assert not outcome[1], "a connection was dropped below the limits"
