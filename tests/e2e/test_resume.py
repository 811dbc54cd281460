"""A router dies, and the client goes on with another one as if nothing had happened."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.errors import UnavailableError
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.sampling_modes import (
    CODE,
    GREEDY,
    SEEDED,
    THREE_WAYS,
    answer_of,
    check_same,
)
from tests.support.cluster.second_router import SecondRouter, second_router
from tests.support.cluster.slowness import slowed
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.wide import DECODE_WORKERS, HANDOFFS
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.slow]


@pytest.fixture(scope="module")
def other_router(pair_shape: LocalCluster) -> Iterator[SecondRouter]:
    """A second router over the same workers."""
    with second_router(pair_shape, **HANDOFFS) as other:
        yield other


@pytest.fixture
async def client(pair: LocalCluster, other_router: SecondRouter) -> AsyncIterator[AsyncClient]:
    async with AsyncClient([pair.address, other_router.address]) as open_client:
        await until_observed(other_router.is_ready, what="the other router's workers")
        yield open_client


async def test_requests_of_every_kind_survive_their_router(client, pair):
    """All ten do in tests/worker/test_sampling_modes.py."""
    undisturbed = {n: await answer_of(client.generate(CODE, p)) for n, p in THREE_WAYS.items()}
    with slowed(pair, *DECODE_WORKERS):
        running = {name: client.generate(CODE, params) for name, params in THREE_WAYS.items()}
        for generation in running.values():
            await anext(generation)
        pair.kill("router")
    answers = await asyncio.gather(*(answer_of(generation) for generation in running.values()))
    for (name, generation), answer in zip(running.items(), answers, strict=True):
        assert generation.num_resumed == 1, name
        check_same(name, answer, undisturbed[name])
    await until_nothing_is_held(pair)


@pytest.mark.nightly
async def test_resumed_stream_has_no_gap_or_repetition(client, pair):
    undisturbed = client.generate(CODE, SEEDED)
    generation, position = client.generate(CODE, SEEDED), 0
    with slowed(pair, *DECODE_WORKERS):
        async for chunk in generation:
            assert chunk.position == position or not chunk.token_ids
            position += len(chunk.token_ids)
            if position >= 100:
                pair.kill("router")
    assert await generation.text() == await undisturbed.text()
    assert generation.num_resumed == 1


@pytest.mark.nightly
async def test_chat_survives_its_router(client, pair):
    chat = [{"role": "user", "content": "Write a function."}]
    undisturbed = await client.generate(chat, GREEDY).text()
    with slowed(pair, *DECODE_WORKERS):
        generation = client.generate(chat, GREEDY)
        await anext(generation)
        pair.kill("router")
    assert await generation.text() == undisturbed


async def test_client_leaves_a_silent_router(client, pair):
    undisturbed = await client.generate(prompt_of(9), GREEDY).token_ids()
    with slowed(pair, *DECODE_WORKERS):
        generation = client.generate(prompt_of(9), replace(GREEDY, max_tokens=300))
        await anext(generation)
        pair.kill("router", signal.SIGSTOP)
    try:
        assert await generation.token_ids() == undisturbed
        assert generation.num_resumed == 1
    finally:
        pair.kill("router", signal.SIGCONT)
    await until_nothing_is_held(pair, within=3.0)


async def test_client_resumes_on_its_only_router_after_restart(pair):
    async with AsyncClient(pair.address) as client:
        undisturbed = await client.generate(prompt_of(9), GREEDY).token_ids()
        with slowed(pair, *DECODE_WORKERS):
            generation = client.generate(prompt_of(9), GREEDY)
            await anext(generation)
            pair.kill("router")
        reading = asyncio.create_task(generation.token_ids())
        await asyncio.sleep(0.2)  # it has begun to look for it
        pair.restart("router")
        assert await reading == undisturbed
    await until_nothing_is_held(pair)


async def test_generation_fails_in_the_end_without_any_router(pair):
    async with AsyncClient(pair.address, timeout=2.0) as client:
        with slowed(pair, *DECODE_WORKERS):
            generation = client.generate(prompt_of(9), replace(GREEDY, max_tokens=1900))
            await anext(generation)
            pair.kill("router")
        with pytest.raises(UnavailableError):
            await generation.text()
    await until_nothing_is_held(pair)
    pair.restart("router")
    # Connections of this process wait for a while before they try it again.
    async with AsyncClient(pair.address, wait_for_ready=True) as client:
        await client.get_model()
