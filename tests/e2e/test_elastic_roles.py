"""Workers change their roles under load, and no client that is being served notices."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.client.generation import AsyncGeneration
from baton.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from baton.sampling import SamplingParams
from tests.support.cluster import named_clusters
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.rolling import Pools
from tests.support.cluster.watch import load_of, until_nothing_is_held
from tests.support.cluster.wide import listed
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.slow]

# Two tokens behind a long prompt; and many behind a short one.
PROMPTS = SamplingParams(max_tokens=2, ignore_eos=True)
ANSWERS = SamplingParams(max_tokens=1500, ignore_eos=True)
WATCHED = SamplingParams(max_tokens=300, ignore_eos=True)
# Requests of several sequences are not handed over, so a worker that has one drains for long.
# No draw is nearer than 2e-6 to the border of two tokens: which of them it is may depend on the
# rounding of KV that another worker computes in other chunks, by up to 1e-6.
SEVERAL = SamplingParams(max_tokens=500, n=2, temperature=0.9, seed=107, ignore_eos=True)

_seeds = itertools.count(1000)


# A first token within a tenth of a second is more than workers can do for long prompts; between
# tokens they may take any time.
ELASTIC = {
    "elastic": True,
    "elastic_dwell_s": 1.0,
    "elastic_cooldown_s": 2.0,
    "slo_ttft_ms": 100.0,
    "slo_itl_ms": 10_000.0,
}


@pytest.fixture(scope="module")
def elastic() -> Iterator[Pools]:
    """The shape `rolling`, whose two routers see to the roles of its workers."""
    with named_clusters.rolling(worker_drain_s=30.0, **ELASTIC) as running:
        yield running


def roles(cluster: LocalCluster) -> dict[str, str]:
    """Returns the roles of the workers that take work, by name."""
    return {name: w.role for name, w in listed(cluster).items() if w.state == "ready"}


def num_of(cluster: LocalCluster, role: str) -> int:
    return list(roles(cluster).values()).count(role)


@asynccontextmanager
async def load(
    client: AsyncClient, length: int, params: SamplingParams, num_at_once: int
) -> AsyncIterator[None]:
    """So many requests at any time, each with another prompt; none may fail."""

    async def one_after_the_other() -> None:
        while True:
            generation = client.generate(prompt_of(length, seed=next(_seeds)), params)
            try:
                assert len(await generation.token_ids()) == params.max_tokens
            finally:
                generation.cancel()

    tasks = [asyncio.create_task(one_after_the_other()) for _ in range(num_at_once)]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def begun(generation: AsyncGeneration) -> AsyncGeneration:
    await anext(generation)
    await anext(generation)
    return generation


class Watched:
    """Requests that are made again and again, each of which must be answered as before."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._is_over = False
        self.num_migrations = 0

    async def __call__(self, prompt: list[int], undisturbed: list[int]) -> None:
        while not self._is_over:
            generation = self._client.generate(prompt, WATCHED)
            assert await generation.token_ids() == undisturbed
            self.num_migrations += generation.finished.usage.num_migrations

    @asynccontextmanager
    async def during(self, answers: list[tuple[list[int], list[int]]]) -> AsyncIterator[None]:
        """Those of these prompts, until the end of the block; what is wrong is raised there."""
        self._is_over = False
        tasks = [asyncio.create_task(self(*answer)) for answer in answers]
        try:
            yield
            self._is_over = True
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def epochs(cluster: LocalCluster) -> dict[str, int]:
    return {name: worker.epoch for name, worker in listed(cluster).items()}


@pytest.mark.nightly
async def test_elastic_roles_follow_the_load_without_losing_requests(elastic):
    """Two routers see to it, and do it once."""
    prompts = [prompt_of(30 + 10 * i, seed=i) for i in range(6)]
    cluster, (first, second) = elastic.cluster, elastic.addresses
    async with (
        AsyncClient(first, timeout=300.0) as client,
        AsyncClient(second, timeout=300.0) as other,
    ):
        answers = [(p, await client.generate(p, WATCHED).token_ids()) for p in prompts]
        assert num_of(cluster, "prefill") == num_of(cluster, "decode") == 2
        watched, before = Watched(client), epochs(cluster)
        async with (
            watched.during(answers),
            load(client, 1500, PROMPTS, num_at_once=4),
            load(other, 1500, PROMPTS, num_at_once=4),
        ):
            await until_observed(
                lambda: (num_of(cluster, "prefill"), num_of(cluster, "decode")) == (3, 1),
                within=90.0,
                what="a third prefill worker",
            )
        assert watched.num_migrations > 0
        changed = [name for name, epoch in epochs(cluster).items() if epoch != before[name]]
        assert len(changed) == 1, "both routers have acted"
        async with (
            watched.during(answers),
            load(client, 20, ANSWERS, num_at_once=12),
            load(other, 20, ANSWERS, num_at_once=12),
        ):
            await until_observed(
                lambda: num_of(cluster, "decode") >= 2, within=90.0, what="a second decode worker"
            )
    await until_nothing_is_held(cluster, within=3.0)


async def held_open(client: AsyncClient, cluster: LocalCluster) -> tuple[AsyncGeneration, str]:
    """A request that is being decoded and is not handed over, and the process that does it."""
    generation = await begun(client.generate(prompt_of(20, seed=5), SEVERAL))
    names = {p.worker_id: p.name for p in cluster.processes if p.role != "router"}
    return generation, names[(await generation.wait_accepted()).placement.decode_worker]


async def test_worker_killed_during_its_role_change_loses_no_request(pair):
    cluster = pair
    async with AsyncClient(
        cluster.address, admin_address=cluster.admin_address, timeout=120.0
    ) as client:
        undisturbed = await client.generate(prompt_of(20, seed=5), SEVERAL).completions()
        generation, name = await held_open(client, cluster)
        worker = cluster.process(name)
        changing = asyncio.create_task(client.set_role(worker.worker_id, "prefill"))
        await until_observed(
            lambda: load_of(worker.admin_endpoint).state == "draining", what="the drain"
        )
        await asyncio.to_thread(cluster.kill, name)
        with pytest.raises(UnavailableError):
            await changing
        answer = await generation.completions()
        assert [c.token_ids for c in answer] == [c.token_ids for c in undisturbed]
        await asyncio.to_thread(cluster.restart, name)
        assert roles(cluster)[name] == "decode"
        await client.set_role(worker.worker_id, "prefill")
        await until_observed(lambda: num_of(cluster, "prefill") == 3, what="the change")
    await until_nothing_is_held(cluster, within=3.0)


async def test_set_role_moves_workers_except_the_last_of_a_role(pair):
    cluster = pair
    ids = {p.name: p.worker_id for p in cluster.processes if p.role != "router"}
    prompt, params = prompt_of(40, seed=9), SamplingParams(max_tokens=20, ignore_eos=True)
    async with AsyncClient(cluster.address, admin_address=cluster.admin_address) as client:
        undisturbed = await client.generate(prompt, params).token_ids()
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            while len(leaving := [n for n, r in roles(cluster).items() if r == other]) > 1:
                number = num_of(cluster, role)
                await client.set_role(ids[leaving[0]], role)
                await until_observed(lambda: num_of(cluster, role) == number + 1, what="the change")  # noqa: B023
            with pytest.raises(FailedPreconditionError, match=f"the only {other} worker"):
                await client.set_role(ids[leaving[0]], role)
            assert num_of(cluster, role) == 3
            assert await client.generate(prompt, params).token_ids() == undisturbed
        with pytest.raises(NotFoundError):
            await client.set_role("unknown", "decode")
        with pytest.raises(InvalidArgumentError):
            await client.set_role(ids["prefill-0"], "neither")
        balance = await client.role_balance()
        assert (balance.proposal, balance.is_elastic) == (None, False)
    await until_nothing_is_held(cluster, within=3.0)
