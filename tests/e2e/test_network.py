"""Cut off, one way or both, delayed or damaged on the way: the tokens are those of an undisturbed
run, and nothing is held afterwards, not even while the cut lasts."""

import asyncio
from collections.abc import AsyncIterator

import psutil
import pytest
from _pytest.mark import ParameterSet

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.client.generation import AsyncGeneration
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.named_clusters import Networked
from tests.support.cluster.network import REDIS, Network
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.wide import listed, name_of, restored
from tests.support.proxy import Damage, corrupted, duplicated, ended, once, reordered, truncated
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.slow]

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
LONGER = SamplingParams(max_tokens=1600, ignore_eos=True)
FEW = SamplingParams(max_tokens=20, ignore_eos=True)
SILENCE = 3.0  # in which a cut is noticed on either side, and what it cost is given back


def nightly(value: str) -> ParameterSet:
    return pytest.param(value, marks=pytest.mark.nightly)


@pytest.fixture
async def cluster(networked_shape: Networked) -> AsyncIterator[LocalCluster]:
    """All links are whole before and after, and descriptors are what they were."""
    cluster, network = networked_shape.cluster, networked_shape.network
    network.heal()
    restored(cluster)
    async with AsyncClient(cluster.address) as client:  # each has talked with each
        for i in range(8):
            await client.generate(prompt_of(20, seed=900 + i), FEW).token_ids()
    before = num_files(cluster)
    yield cluster
    network.heal()
    await until_nothing_is_held(cluster, within=SILENCE)
    await until_observed(
        lambda: {w.state for w in listed(cluster).values()} == {"ready"}, 10.0, "readiness"
    )
    await until_observed(lambda: no_more(num_files(cluster), before), 10.0, f"return to {before}")


@pytest.fixture
def network(networked_shape: Networked) -> Network:
    return networked_shape.network


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as open_client:
        yield open_client


def num_files(cluster: LocalCluster) -> dict[str, int]:
    return {p.name: psutil.Process(p.pid).num_fds() for p in cluster.processes}


def no_more(now: dict[str, int], before: dict[str, int]) -> bool:
    """A connection to each of the others may have come since."""
    return all(now[name] <= before[name] + len(before) for name in before)


async def placed(cluster: LocalCluster, generation: AsyncGeneration) -> dict[str, str]:
    """Returns the workers that compute it, by role."""
    placement = (await generation.wait_accepted()).placement
    return {
        "prefill": name_of(cluster, placement.prefill_worker),
        "decode": name_of(cluster, placement.decode_worker),
    }


@pytest.mark.parametrize("direction", [nightly("there"), "back", nightly("both")])
async def test_request_survives_a_partition_of_its_decode_worker(
    client, cluster, network, direction
):
    prompt = prompt_of(40, seed=11)
    # Cut from the router to the worker alone, tokens still come: so many long answers at once
    # outlast the silence on a fast machine, too.
    params, count = (LONGER, 16) if direction == "there" else (LONG, 1)
    undisturbed = await client.generate(prompt, params).token_ids()
    generations = [client.generate(prompt, params) for _ in range(count)]
    decode = (await placed(cluster, generations[0]))["decode"]
    for _ in range(5):
        await anext(generations[0])
    with network.partition("router", decode, direction):
        answers = await asyncio.gather(*(each.token_ids() for each in generations))
        assert answers == [undisturbed] * count
        await until_nothing_is_held(cluster, within=SILENCE)
    assert generations[0].finished.usage.num_migrations >= 1


@pytest.mark.parametrize("direction", [nightly("there"), nightly("back"), "both"])
@pytest.mark.parametrize("link", ["router to prefill", "decode to prefill"])
async def test_request_survives_a_partition_during_prefill(
    client, cluster, network, link, direction
):
    prompt = prompt_of(1900, seed=len(link) + len(direction))
    generation = client.generate(prompt, FEW)
    names = await placed(cluster, generation)
    there = "router" if link.startswith("router") else names["decode"]
    with network.partition(there, names["prefill"], direction):
        tokens = await generation.token_ids()
        await until_nothing_is_held(cluster, within=SILENCE)
    # Of one that only its router does not hear, the decode worker may have had all by then.
    assert there == "router" or generation.finished.usage.num_migrations >= 1
    assert await client.generate(prompt, FEW).token_ids() == tokens


PER_COMMIT = ("corrupted", "truncated")
DAMAGES: dict[str, Damage] = {
    "corrupted": corrupted,
    "truncated": truncated,
    "reordered": reordered,
    "duplicated": duplicated,
    "ended": ended,
}


@pytest.mark.parametrize("name", [n if n in PER_COMMIT else nightly(n) for n in DAMAGES])
async def test_blocks_corrupted_in_transfer_are_never_used(client, cluster, network, name):
    ways = [network.link(f"decode-{d}", f"prefill-{p}").back for d in range(2) for p in range(2)]
    num_before = sum(way.num_damaged for way in ways)
    damage = once(DAMAGES[name])
    for way in ways:
        way.damage = damage
    prompt = prompt_of(1000, seed=77 + list(DAMAGES).index(name))
    tokens = await client.generate(prompt, FEW).token_ids()
    assert sum(way.num_damaged for way in ways) == num_before + 1
    network.heal()
    assert await client.generate(prompt, FEW).token_ids() == tokens


async def test_slow_network_causes_no_migration(client, cluster, network):
    prompt = prompt_of(200, seed=5)
    undisturbed = await client.generate(prompt, FEW).token_ids()
    for there in ("router", "decode-0", "decode-1"):
        for back in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            link = network.link(there, back)
            link.there.delay = link.back.delay = 0.05
    generation = client.generate(prompt, FEW)
    assert await generation.token_ids() == undisturbed
    assert generation.finished.usage.num_migrations == 0


@pytest.mark.nightly
async def test_requests_are_served_while_redis_takes_two_seconds(client, cluster, network):
    for process in cluster.processes:
        network.link(process.name, REDIS).back.delay = 2.0
    prompt = prompt_of(30, seed=8)
    expected = None
    end = asyncio.get_running_loop().time() + 8.0
    while asyncio.get_running_loop().time() < end:
        tokens = await client.generate(prompt, FEW, timeout=5.0).token_ids()
        expected = expected or tokens
        assert tokens == expected
        assert {w.state for w in listed(cluster).values()} == {"ready"}


@pytest.mark.nightly
async def test_router_started_on_slow_redis_serves_once_it_recovers(client, cluster, network):
    for process in cluster.processes:
        network.link(process.name, REDIS).back.delay = 2.0
    cluster.kill("router")
    router = cluster.process("router")
    router.start(router.log_path.parent)
    healing = asyncio.get_running_loop().call_later(3.0, network.heal)
    async with AsyncClient(cluster.address, wait_for_ready=True, timeout=60.0) as patient:
        assert len(await patient.generate(prompt_of(9), FEW).token_ids()) == FEW.max_tokens
    healing.cancel()
