"""A router dies, and the client goes on with another one as if nothing had happened."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.cli.local_cluster import LocalCluster
from baton.cli.ports import free_port
from baton.cli.process import Process
from baton.client import AsyncClient
from baton.errors import UnavailableError
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.ways import (
    CODE,
    GREEDY,
    SEEDED,
    answer_of,
    check_same,
    with_late_stop_string,
)
from tests.support.cluster.wide import HANDOFFS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def other_router(
    pair_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    """A second router over the same workers."""
    flags = {"redis_url": pair_cluster.redis_url, **HANDOFFS}
    port = free_port(set())
    process = Process("router-1", "router", port, flags, admin_port=free_port({port}))
    process.start(Path(tmp_path_factory.mktemp("logs")))
    yield process
    process.signal(signal.SIGKILL)


@pytest.fixture
async def client(pair: LocalCluster, other_router: Process) -> AsyncIterator[AsyncClient]:
    async with AsyncClient([pair.address, other_router.endpoint]) as open_client:
        async with AsyncClient(other_router.admin_endpoint, wait_for_ready=True) as other:
            while len(await other.list_workers()) < 4:  # noqa: ASYNC110 - looks from outside
                await asyncio.sleep(0.05)
        yield open_client


async def test_every_way_of_choosing_tokens_survives_its_router(client, pair):
    ways = with_late_stop_string(await client.generate(CODE, SEEDED).text())
    undisturbed = {n: await answer_of(client.generate(CODE, p)) for n, p in ways.items()}
    running = {name: client.generate(CODE, params) for name, params in ways.items()}
    await asyncio.gather(*(generation.wait_accepted() for generation in running.values()))
    for name in ("greedy", "several", "grammar"):
        await anext(running[name])
    pair.kill("router")
    answers = await asyncio.gather(*(answer_of(generation) for generation in running.values()))
    for (name, generation), answer in zip(running.items(), answers, strict=True):
        assert generation.num_resumed == 1, name
        check_same(name, answer, undisturbed[name])
    await until_nothing_is_held(pair)


async def test_chunks_go_on_without_a_gap_or_a_repetition(client, pair):
    undisturbed = client.generate(CODE, SEEDED)
    generation, position = client.generate(CODE, SEEDED), 0
    async for chunk in generation:
        assert chunk.position == position or not chunk.token_ids
        position += len(chunk.token_ids)
        if position >= 100:
            pair.kill("router")
    assert await generation.text() == await undisturbed.text()
    assert generation.num_resumed == 1


async def test_a_conversation_goes_on_too(client, pair):
    chat = [{"role": "user", "content": "Write a function."}]
    undisturbed = await client.generate(chat, GREEDY).text()
    generation = client.generate(chat, GREEDY)
    await anext(generation)
    pair.kill("router")
    assert await generation.text() == undisturbed


async def test_a_router_that_falls_silent_is_left(client, pair):
    undisturbed = await client.generate(prompt_of(9), GREEDY).token_ids()
    generation = client.generate(prompt_of(9), replace(GREEDY, max_tokens=300))
    await anext(generation)
    pair.kill("router", signal.SIGSTOP)
    try:
        assert await generation.token_ids() == undisturbed
        assert generation.num_resumed == 1
    finally:
        pair.kill("router", signal.SIGCONT)
    await until_nothing_is_held(pair, within=3.0)


async def test_the_only_router_may_die_and_come_back(pair):
    async with AsyncClient(pair.address) as client:
        undisturbed = await client.generate(prompt_of(9), GREEDY).token_ids()
        generation = client.generate(prompt_of(9), GREEDY)
        await anext(generation)
        pair.kill("router")
        reading = asyncio.create_task(generation.token_ids())
        await asyncio.sleep(0.2)  # it has begun to look for it
        pair.restart("router")
        assert await reading == undisturbed
    await until_nothing_is_held(pair)


async def test_where_no_router_is_left_the_reader_is_told_in_the_end(pair):
    async with AsyncClient(pair.address, timeout=2.0) as client:
        generation = client.generate(prompt_of(9), replace(GREEDY, max_tokens=1900))
        await anext(generation)
        pair.kill("router")
        with pytest.raises(UnavailableError):
            await generation.text()
    await until_nothing_is_held(pair)
