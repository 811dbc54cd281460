"""Decode workers that are told to end hand over what they run, and nothing is computed again."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.client.generation import AsyncGeneration
from baton.errors import UnavailableError
from baton.sampling import SamplingParams
from baton.v1 import admin_pb2
from baton.v1.admin_pb2_grpc import AdminStub
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.sampling_modes import CODE, THREE_WAYS, answer_of, check_same
from tests.support.cluster.slowness import slowed
from tests.support.cluster.watch import loads, until_nothing_is_held
from tests.support.cluster.wide import DECODE_WORKERS, listed, name_of
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
# Requests of several sequences end where they are, or are generated again.
FORKING = {"several"}


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
    """Returns the tokens that follow a prompt in `LONG`, generated at the first call: they are the
    same for all tests and clusters."""
    key = tuple(prompt)
    if key not in _undisturbed:
        _undisturbed[key] = await client.generate(prompt, LONG).token_ids()
    return _undisturbed[key]


@dataclass
class Running:
    """Generations of which each has told some tokens.

    Attributes:
        leaving: the decode worker of the first, which is to leave; `other`: the one that stays.
        moving: those that run on the one that is to leave.
    """

    generations: dict[str, AsyncGeneration]
    leaving: str
    other: str
    moving: set[str]


@asynccontextmanager
async def running_on(
    client: AsyncClient, cluster: LocalCluster, wanted: dict[str, tuple[object, SamplingParams]]
) -> AsyncIterator[Running]:
    """Generations that are computed slowly until the end of the block, or of the first engine: none
    ends before something happens to it."""
    generations, places = {}, {}
    with slowed(cluster, *DECODE_WORKERS):
        for name, (prompt, params) in wanted.items():
            generations[name] = generation = client.generate(prompt, params)  # type: ignore[arg-type]
            accepted = await generation.wait_accepted()
            places[name] = name_of(cluster, accepted.placement.decode_worker)
            await anext(generation)
            await anext(generation)
        leaving = next(iter(places.values()))
        (other,) = {*DECODE_WORKERS} - {leaving}
        moving = {name for name, place in places.items() if place == leaving}
        yield Running(generations, leaving, other, moving)


async def test_drain_migrates_many_requests_without_recomputation(client, pair):
    prompts = {f"r{i}": (prompt_of(40 + 30 * i, seed=i), LONG) for i in range(4)}
    undisturbed = {n: await undisturbed_tokens(client, wanted[0]) for n, wanted in prompts.items()}
    async with running_on(client, pair, prompts) as running:
        before = computed(pair)
        await drain(pair, running.leaving)
    tokens = {n: await g.token_ids() for n, g in running.generations.items()}
    assert tokens == undisturbed
    for name, generation in running.generations.items():
        assert generation.finished.usage.num_migrations == int(name in running.moving)
    spent = {name: count - before[name] for name, count in computed(pair).items()}
    assert spent["prefill-0"] == spent["prefill-1"] == 0
    # Nothing that was computed before the drain is computed again, and the last token never is.
    assert spent[running.other] > 0
    assert spent["decode-0"] + spent["decode-1"] < sum(map(len, tokens.values()))
    await until_nothing_is_held(pair)


async def compile_everywhere(client: AsyncClient, cluster: LocalCluster) -> None:
    """Has each decode worker compile the grammar. The first one starts a process, which on a busy
    machine takes longer than these workers drain."""
    served: set[str] = set()
    for _ in range(10):
        both = [client.generate(CODE, THREE_WAYS["grammar"]) for _ in range(2)]
        served |= {
            name_of(cluster, (await each.wait_accepted()).placement.decode_worker) for each in both
        }
        await asyncio.gather(*map(answer_of, both))
        if served == {"decode-0", "decode-1"}:
            return
    raise AssertionError(f"all requests were placed on {served}")


async def test_drain_migrates_requests_of_every_kind(client, pair):
    """All ten are in tests/worker/test_sampling_modes.py."""
    await compile_everywhere(client, pair)
    undisturbed = {n: await answer_of(client.generate(CODE, p)) for n, p in THREE_WAYS.items()}
    # The slowest to begin comes first, so that none has ended once all have begun.
    slow_first = reversed(THREE_WAYS.items())
    async with running_on(client, pair, {n: (CODE, p) for n, p in slow_first}) as running:
        pair.process(running.leaving).signal(signal.SIGTERM)
    for name, generation in running.generations.items():
        check_same(name, await answer_of(generation), undisturbed[name])
        if name not in FORKING:
            assert generation.finished.usage.num_migrations == int(name in running.moving), name
    await until_nothing_is_held(pair)


@pytest.mark.parametrize("victim", ["leaving", "other"])
async def test_migration_survives_a_kill_of_either_worker(client, pair, victim):
    prompts = {f"r{i}": (prompt_of(50 + 10 * i, seed=20 + i), LONG) for i in range(3)}
    undisturbed = {n: await undisturbed_tokens(client, wanted[0]) for n, wanted in prompts.items()}
    async with running_on(client, pair, prompts) as running:
        await drain(pair, running.leaving)
    name = getattr(running, victim)
    pair.kill(name)
    if victim == "other":  # no worker is left to go on but one that comes back, perhaps in time
        pair.restart(name)
    reading = (g.token_ids() for g in running.generations.values())
    ends = await asyncio.gather(*reading, return_exceptions=True)
    for name, end in zip(running.generations, ends, strict=True):
        may_be_late = victim == "other" and isinstance(end, UnavailableError)
        assert may_be_late or end == undisturbed[name]
    await until_nothing_is_held(pair, within=3.0)


@pytest.mark.parametrize(
    "delay",
    [
        pytest.param(d, marks=() if d in (0.0, 0.01) else pytest.mark.nightly)
        for d in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04)
    ],
)
async def test_drain_survives_a_kill_at_any_moment(client, pair, delay):
    await killed_amid_its_drain(client, pair, delay)


async def killed_amid_its_drain(client: AsyncClient, pair: LocalCluster, delay: float) -> None:
    prompt = prompt_of(300, seed=31)
    undisturbed = await undisturbed_tokens(client, prompt)
    async with running_on(client, pair, {"r": (prompt, LONG)}) as running:
        pair.process(running.leaving).signal(signal.SIGTERM)
    await asyncio.sleep(delay)
    pair.kill(running.leaving)
    assert await running.generations["r"].token_ids() == undisturbed
    await until_nothing_is_held(pair, within=3.0)


async def test_cancelled_requests_leave_nothing_during_a_drain(client, pair):
    prompts = {f"r{i}": (prompt_of(50 + 10 * i, seed=40 + i), LONG) for i in range(6)}
    async with running_on(client, pair, prompts) as running:
        await drain(pair, running.leaving)
    for i, generation in enumerate(running.generations.values()):
        await asyncio.sleep(0.003 * i)
        generation.cancel()
    await until_nothing_is_held(pair)


async def test_request_finishes_in_place_without_a_migration_target(client, pair):
    short = replace(LONG, max_tokens=200)
    async with running_on(client, pair, {"r": (prompt_of(60, seed=50), short)}) as running:
        await drain(pair, running.other)
        await until_observed(
            lambda: listed(pair)[running.other].state == "draining", what="the drain"
        )
        await drain(pair, running.leaving)
    generation = running.generations["r"]
    tokens = await generation.token_ids()
    assert (len(tokens), generation.finished.usage.num_migrations) == (200, 0)
    await until_nothing_is_held(pair)
