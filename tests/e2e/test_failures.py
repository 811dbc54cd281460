"""Death, silence and shutdown of processes, as the others and the clients see them."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.client.generation import AsyncGeneration
from baton.errors import BatonError, UnavailableError
from baton.models import locate
from baton.sampling import SamplingParams
from baton.v1 import admin_pb2
from baton.v1.admin_pb2_grpc import AdminStub
from tests.support.cluster.checkpoints import is_greedy, prompt_of
from tests.support.cluster.watch import load_of, loads, until_nothing_is_held
from tests.support.cluster.wide import (
    LONG,
    SHORT,
    listed,
    name_of,
    prefilling,
    streaming,
)
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

PROMPTLY = 3.0


@pytest.fixture
async def client(pair: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(pair.address) as open_client:
        yield open_client


async def prompt_failure_of(generation: AsyncGeneration) -> BatonError:
    began = time.monotonic()
    with pytest.raises(BatonError) as caught:
        await generation.text()
    assert time.monotonic() - began < PROMPTLY
    return caught.value


async def answers(client: AsyncClient, number: int = 8) -> None:
    """Requests are served, with the right tokens."""
    prompts = [prompt_of(20 + i, seed=i) for i in range(number)]
    every = await asyncio.gather(*(client.generate(p, SHORT).token_ids() for p in prompts))
    for prompt, tokens in zip(prompts, every, strict=True):
        assert len(tokens) == SHORT.max_tokens
        assert is_greedy(locate("tiny"), prompt, tokens)


async def test_requests_spread_over_all_workers(client, pair):
    """Also if one worker counts as slower, which may be so after a step without a core: there is
    more work than one of them can do before the other would be done."""
    generations = [client.generate(prompt_of(400, seed=100 + i), SHORT) for i in range(24)]
    accepted = await asyncio.gather(*(g.wait_accepted() for g in generations))
    for generation in generations:
        assert len(await generation.token_ids()) == SHORT.max_tokens
    assert len({a.placement.prefill_worker for a in accepted}) == 2
    assert len({a.placement.decode_worker for a in accepted}) == 2
    await until_nothing_is_held(pair)


async def test_killed_router_leaves_no_resources_held(pair):
    async with AsyncClient(pair.address, resume=False) as client:
        generation, _ = await streaming(client, pair)
        waiting, _ = await prefilling(client, pair)
        pair.kill("router")
        for ended in (generation, waiting):
            assert isinstance(await prompt_failure_of(ended), UnavailableError)
    await until_nothing_is_held(pair)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
async def test_router_restarted_under_load_rejects_no_request(pair):
    """Clients that wait for it reach it before it has read a word of Redis, which is slow."""
    over, refusals, served = asyncio.Event(), [], 0

    async def ask_again(client: AsyncClient, seed: int) -> None:
        nonlocal served
        while not over.is_set():
            try:
                tokens = await client.generate(prompt_of(12, seed=seed), SHORT).token_ids()
            except UnavailableError as error:
                refusals.append(str(error))
            else:
                assert len(tokens) == SHORT.max_tokens
                served += 1

    async with AsyncClient(pair.address, wait_for_ready=True, resume=False) as client:
        tasks = [asyncio.create_task(ask_again(client, 700 + i)) for i in range(8)]
        await until_observed(lambda: served > 8, within=10.0, what="service")
        pair.kill("router")
        assert pair.redis is not None
        router, redis = pair.process("router"), pair.redis.pid
        os.kill(redis, signal.SIGSTOP)
        try:
            router.start(router.log_path.parent)
            await until_observed(lambda: listens(router.port), within=30.0, what="its start")
            await asyncio.sleep(1.5)  # they have all found it by now
        finally:
            os.kill(redis, signal.SIGCONT)
        served = 0
        await until_observed(lambda: served > 8, within=10.0, what="service")
        over.set()
        await asyncio.gather(*tasks)
    # What was on its way when the router was killed is lost; what reached the next one is not.
    assert [text for text in refusals if "worker" in text] == []
    await until_nothing_is_held(pair)


async def test_decode_worker_drains_on_sigterm(client, pair):
    finishing = SamplingParams(max_tokens=400, ignore_eos=True)
    generation = client.generate(prompt_of(5), finishing)
    accepted = await generation.wait_accepted()
    await anext(generation)
    await anext(generation)
    leaving = pair.process(name_of(pair, accepted.placement.decode_worker))
    leaving.signal(signal.SIGTERM)
    await until_observed(
        lambda: listed(pair)[leaving.name].state != "ready", within=2.0, what="the drain"
    )
    for i in range(8):
        new = client.generate(prompt_of(12, seed=200 + i), SHORT)
        place = (await new.wait_accepted()).placement
        assert place.decode_worker != leaving.worker_id
        assert len(await new.token_ids()) == SHORT.max_tokens
    assert len(await generation.token_ids()) == 400
    assert await asyncio.to_thread(leaving.wait, time.monotonic() + 5.0)
    await until_observed(lambda: leaving.name not in listed(pair), within=3.0, what="its leaving")


@pytest.mark.slow
async def test_router_drains_on_sigterm(client, pair):
    router = pair.process("router")
    generation = client.generate(prompt_of(5), SamplingParams(max_tokens=400, ignore_eos=True))
    await anext(generation)
    router.signal(signal.SIGTERM)
    await until_observed(
        lambda: load_of(pair.admin_address).state == "draining", within=2.0, what="the drain"
    )
    failure = await prompt_failure_of(client.generate(prompt_of(9), SHORT))
    assert isinstance(failure, UnavailableError)
    assert len(await generation.token_ids()) == 400
    assert await asyncio.to_thread(router.wait, time.monotonic() + 5.0)
    await until_nothing_is_held(pair)


async def test_requests_sent_as_a_decode_worker_drains_go_elsewhere(client, pair):
    with_retry = [client.generate(prompt_of(9, seed=300 + i), SHORT) for i in range(10)]
    drain(pair, "decode-0")
    with_retry += [client.generate(prompt_of(9, seed=400 + i), SHORT) for i in range(20)]
    for generation in with_retry:
        assert len(await generation.token_ids()) == SHORT.max_tokens


@pytest.mark.slow
async def test_requests_sent_as_a_prefill_worker_drains_go_elsewhere(client, pair):
    before = [client.generate(prompt_of(9, seed=500 + i), SHORT) for i in range(10)]
    await asyncio.gather(*(generation.wait_accepted() for generation in before))
    drain(pair, "prefill-0")
    after = [client.generate(prompt_of(9, seed=600 + i), SHORT) for i in range(20)]
    for generation in before + after:
        assert len(await generation.token_ids()) == SHORT.max_tokens


def drain(cluster: LocalCluster, name: str) -> None:
    with grpc.insecure_channel(cluster.process(name).admin_endpoint) as channel:
        AdminStub(channel).Drain(admin_pb2.DrainRequest(), timeout=5.0)


@pytest.mark.slow
async def test_router_rejects_at_once_when_all_decode_workers_drain(client, pair):
    drain(pair, "decode-0")
    drain(pair, "decode-1")
    failure = await prompt_failure_of(client.generate(prompt_of(9), SHORT))
    assert isinstance(failure, UnavailableError)
    await until_observed(
        lambda: {w.state for n, w in listed(pair).items() if "decode" in n} == {"draining"},
        within=3.0,
        what="that the router knows",
    )
    failure = await prompt_failure_of(client.generate(prompt_of(9), SHORT))
    assert isinstance(failure, UnavailableError)
    assert "no decode worker can take work: draining" in str(failure)


@pytest.mark.slow
async def test_requests_survive_loss_and_empty_restart_of_redis(client, pair):
    assert pair.redis is not None
    generation, _ = await streaming(client, pair)
    os.kill(pair.redis.pid, signal.SIGKILL)
    await answers(client)
    assert len(await generation.token_ids()) == LONG.max_tokens
    await until_nothing_is_held(pair)
    pair.redis.stop()
    pair.redis.start()
    # A router that starts now knows only what the living workers have said since.
    await asyncio.to_thread(pair.kill, "router")
    await asyncio.to_thread(pair.restart, "router")
    async with AsyncClient(pair.address, admin_address=pair.admin_address) as newcomer:
        assert {w.state for w in await newcomer.list_workers()} == {"ready"}
        assert len(await newcomer.list_workers()) == 4
        await answers(newcomer)
    # And one that starts late is seen.
    pair.kill("decode-1")
    await asyncio.to_thread(pair.restart, "decode-1")
    assert {n: w.state for n, w in listed(pair).items()}["decode-1"] == "ready"
    assert loads(pair)["decode-1"].num_held_blocks == 0
