"""Decode workers that are told to end hand over what they run, and nothing is computed again."""

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from baton.cli.local_cluster import LocalCluster
from baton.client import AsyncClient
from baton.errors import UnavailableError
from baton.generation import AsyncGeneration
from baton.sampling import SamplingParams
from baton.v1 import admin_pb2
from baton.v1.admin_pb2_grpc import AdminStub
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.watch import loads, until_nothing_is_held
from tests.support.cluster.ways import CODE, SEEDED, answer_of, check_same, with_late_stop_string
from tests.support.cluster.wide import listed, name_of, stopped
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONG = SamplingParams(max_tokens=600, ignore_eos=True)
# Requests whose sequences fork end where they are, or are generated anew.
FORKING = {"several", "best", "beams"}


@pytest.fixture
async def client(pair: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(pair.address) as open_client:
        yield open_client


async def drain(cluster: LocalCluster, name: str) -> None:
    async with grpc.aio.insecure_channel(cluster.process(name).admin_endpoint) as channel:
        await AdminStub(channel).Drain(admin_pb2.DrainRequest(), timeout=5.0)


def computed(cluster: LocalCluster) -> dict[str, int]:
    """Tokens that each worker has computed."""
    return {name: load.num_computed_tokens for name, load in loads(cluster).items()}


_undisturbed: dict[tuple[int, ...], list[int]] = {}


async def undisturbed_tokens(client: AsyncClient, prompt: list[int]) -> list[int]:
    """What follows a prompt in `LONG`, generated when first asked for: it is the same for all tests
    and clusters."""
    key = tuple(prompt)
    if key not in _undisturbed:
        _undisturbed[key] = await client.generate(prompt, LONG).token_ids()
    return _undisturbed[key]


async def all_on_one(
    client: AsyncClient, cluster: LocalCluster, wanted: dict[str, tuple[object, SamplingParams]]
) -> dict[str, AsyncGeneration]:
    """Generations of which each has told some tokens, all decoded by the first decode worker."""
    with stopped(cluster, "decode-1"):
        await until_observed(
            lambda: listed(cluster)["decode-1"].state == "unreachable", within=4.0, what="silence"
        )
        running = {n: client.generate(prompt, p) for n, (prompt, p) in wanted.items()}  # type: ignore[arg-type]
        for generation in running.values():
            accepted = await generation.wait_accepted()
            assert name_of(cluster, accepted.placement.decode_worker) == "decode-0"
        for name in set(running) - FORKING:
            await anext(running[name])
            await anext(running[name])
    await until_observed(lambda: is_ready(cluster, "decode-1"), within=4.0, what="its return")
    return running


def is_ready(cluster: LocalCluster, name: str) -> bool:
    """One that has been silent for long is not even listed."""
    worker = listed(cluster).get(name)
    return worker is not None and worker.state == "ready"


async def test_a_crowd_is_handed_over_and_nothing_is_computed_twice(client, pair):
    prompts = {f"r{i}": (prompt_of(40 + 30 * i, seed=i), LONG) for i in range(4)}
    undisturbed = {n: await undisturbed_tokens(client, wanted[0]) for n, wanted in prompts.items()}
    running = await all_on_one(client, pair, prompts)
    before = computed(pair)
    await drain(pair, "decode-0")
    tokens = dict(
        zip(running, await asyncio.gather(*(g.token_ids() for g in running.values())), strict=True)
    )
    assert tokens == undisturbed
    for generation in running.values():
        assert generation.finished.usage.num_migrations == 1
    spent = {name: count - before[name] for name, count in computed(pair).items()}
    assert spent["prefill-0"] == spent["prefill-1"] == 0
    # Nothing that was computed before the drain is computed again, and the last token never is.
    assert spent["decode-1"] > 0
    assert spent["decode-0"] + spent["decode-1"] < sum(map(len, tokens.values()))
    await until_nothing_is_held(pair)


async def test_every_way_of_choosing_tokens_is_handed_over(client, pair):
    ways = with_late_stop_string(await client.generate(CODE, SEEDED).text())
    undisturbed = {n: await answer_of(client.generate(CODE, p)) for n, p in ways.items()}
    running = await all_on_one(client, pair, {n: (CODE, p) for n, p in ways.items()})
    pair.process("decode-0").signal(signal.SIGTERM)
    answers = await asyncio.gather(*(answer_of(generation) for generation in running.values()))
    num_moved = 0
    for (name, generation), answer in zip(running.items(), answers, strict=True):
        check_same(name, answer, undisturbed[name])
        num_moved += name not in FORKING and generation.finished.usage.num_migrations
    assert num_moved > 0
    await until_nothing_is_held(pair)


@pytest.mark.parametrize("victim", ["decode-0", "decode-1"])
async def test_either_worker_may_be_killed_while_it_hands_over(client, pair, victim):
    prompts = {f"r{i}": (prompt_of(50 + 10 * i, seed=20 + i), LONG) for i in range(3)}
    undisturbed = {n: await undisturbed_tokens(client, wanted[0]) for n, wanted in prompts.items()}
    running = await all_on_one(client, pair, prompts)
    await drain(pair, "decode-0")
    pair.kill(victim)
    if victim == "decode-1":  # nobody is left to go on but one that comes back, perhaps in time
        pair.restart(victim)
    ends = await asyncio.gather(*(g.token_ids() for g in running.values()), return_exceptions=True)
    for name, end in zip(running, ends, strict=True):
        may_be_late = victim == "decode-1" and isinstance(end, UnavailableError)
        assert may_be_late or end == undisturbed[name]
    await until_nothing_is_held(pair, within=3.0)


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.005, 0.01, 0.02, 0.04])
async def test_a_worker_may_be_killed_at_any_moment_of_its_drain(client, pair, delay):
    await killed_amid_its_drain(client, pair, delay)


async def killed_amid_its_drain(client: AsyncClient, pair: LocalCluster, delay: float) -> None:
    prompt = prompt_of(300, seed=31)
    undisturbed = await undisturbed_tokens(client, prompt)
    running = await all_on_one(client, pair, {"r": (prompt, LONG)})
    pair.process("decode-0").signal(signal.SIGTERM)
    await asyncio.sleep(delay)
    pair.kill("decode-0")
    assert await running["r"].token_ids() == undisturbed
    await until_nothing_is_held(pair, within=3.0)


async def test_a_client_that_leaves_during_a_drain_leaves_nothing(client, pair):
    prompts = {f"r{i}": (prompt_of(50 + 10 * i, seed=40 + i), LONG) for i in range(6)}
    running = await all_on_one(client, pair, prompts)
    await drain(pair, "decode-0")
    for i, generation in enumerate(running.values()):
        await asyncio.sleep(0.003 * i)
        generation.cancel()
    await until_nothing_is_held(pair)


async def test_where_nobody_can_take_over_the_answer_ends_where_it_is(client, pair):
    short = replace(LONG, max_tokens=200)
    running = await all_on_one(client, pair, {"r": (prompt_of(60, seed=50), short)})
    await drain(pair, "decode-1")
    await until_observed(lambda: listed(pair)["decode-1"].state == "draining", what="the drain")
    await drain(pair, "decode-0")
    tokens = await running["r"].token_ids()
    assert (len(tokens), running["r"].finished.usage.num_migrations) == (200, 0)
    await until_nothing_is_held(pair)
