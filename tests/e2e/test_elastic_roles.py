"""Workers change their roles under load, and nobody who is being served notices."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.cli.local_cluster import LocalCluster
from baton.cli.ports import free_port
from baton.cli.process import Process
from baton.client import AsyncClient
from baton.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from baton.generation import AsyncGeneration
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.watch import load_of, until_nothing_is_held
from tests.support.cluster.wide import HANDOFFS, listed, made_whole
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Two tokens behind a long prompt; and many behind a short one.
PROMPTS = SamplingParams(max_tokens=2, ignore_eos=True)
ANSWERS = SamplingParams(max_tokens=1500, ignore_eos=True)
WATCHED = SamplingParams(max_tokens=300, ignore_eos=True)
# Requests of several sequences are not handed over, so a worker that has one drains for long.
SEVERAL = SamplingParams(max_tokens=900, n=2, temperature=0.9, seed=3, ignore_eos=True)

WORKERS = {"max_num_batched_tokens": 64, "num_blocks": 512, "drain_timeout_s": 30.0}
_seeds = itertools.count(1000)


# A first token within a tenth of a second is more than workers can do for long prompts; between
# tokens they may take any time.
ELASTIC = {
    "elastic": True,
    "elastic_dwell_s": 1.0,
    "elastic_cooldown_s": 2.0,
    "slo_ttft_ms": 100.0,
    "slo_itl_ms": 10_000.0,
    **HANDOFFS,
}


@pytest.fixture(scope="module")
def elastic() -> Iterator[LocalCluster]:
    """Two workers of each role."""
    with LocalCluster(
        num_prefill=2, num_decode=2, worker_flags=WORKERS, router_flags=ELASTIC
    ) as running:
        yield running


@pytest.fixture(scope="module")
def other_router(
    elastic: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    """A second elastic router over the same workers."""
    flags = {"redis_url": elastic.redis_url, **ELASTIC}
    port = free_port(set())
    process = Process("router-1", "router", port, flags, admin_port=free_port({port}))
    process.start(Path(tmp_path_factory.mktemp("logs")))
    yield process
    process.signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def by_hand() -> Iterator[LocalCluster]:
    """Two workers of each role, which change it when they are told to."""
    with LocalCluster(
        num_prefill=2, num_decode=2, worker_flags=WORKERS, router_flags=HANDOFFS
    ) as running:
        yield running


def roles(cluster: LocalCluster) -> dict[str, str]:
    """Of the workers that take work, by name."""
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


async def test_pools_follow_the_load_of_all_routers_and_what_runs_goes_on(elastic, other_router):
    """Two routers see to it, and do it once."""
    prompts = [prompt_of(30 + 10 * i, seed=i) for i in range(6)]
    async with (
        AsyncClient(elastic.address, timeout=300.0) as client,
        AsyncClient(other_router.endpoint, timeout=300.0, wait_for_ready=True) as other,
        AsyncClient(other_router.admin_endpoint, wait_for_ready=True) as admin,
    ):
        while len(await admin.list_workers()) < 4:  # noqa: ASYNC110 - looks from outside
            await asyncio.sleep(0.05)
        answers = [(p, await client.generate(p, WATCHED).token_ids()) for p in prompts]
        assert num_of(elastic, "prefill") == num_of(elastic, "decode") == 2
        watched, before = Watched(client), epochs(elastic)
        async with (
            watched.during(answers),
            load(client, 1500, PROMPTS, num_at_once=4),
            load(other, 1500, PROMPTS, num_at_once=4),
        ):
            await until_observed(
                lambda: (num_of(elastic, "prefill"), num_of(elastic, "decode")) == (3, 1),
                within=90.0,
                what="a third prefill worker",
            )
        assert watched.num_migrations > 0
        changed = [name for name, epoch in epochs(elastic).items() if epoch != before[name]]
        assert len(changed) == 1, "both routers have acted"
        async with (
            watched.during(answers),
            load(client, 20, ANSWERS, num_at_once=12),
            load(other, 20, ANSWERS, num_at_once=12),
        ):
            await until_observed(
                lambda: num_of(elastic, "decode") >= 2, within=90.0, what="a second decode worker"
            )
    await until_nothing_is_held(elastic, within=3.0)


async def held_open(client: AsyncClient, cluster: LocalCluster) -> tuple[AsyncGeneration, str]:
    """A request that is being decoded and is not handed over, and the process that does it."""
    generation = await begun(client.generate(prompt_of(20, seed=5), SEVERAL))
    names = {p.worker_id: p.name for p in cluster.processes if p.role != "router"}
    return generation, names[(await generation.wait_accepted()).placement.decode_worker]


async def test_a_worker_killed_between_its_roles_comes_back_and_nothing_is_lost(by_hand):
    cluster = made_whole(by_hand)
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


async def test_roles_are_changed_by_hand_but_for_the_last_of_each(by_hand):
    cluster = made_whole(by_hand)
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
            await client.set_role("nobody", "decode")
        with pytest.raises(InvalidArgumentError):
            await client.set_role(ids["prefill-0"], "neither")
        balance = await client.role_balance()
        assert (balance.proposal, balance.is_elastic) == (None, False)
    await until_nothing_is_held(cluster, within=3.0)
