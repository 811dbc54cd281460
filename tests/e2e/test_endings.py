"""However and whenever a request ends, everything it held is back within a second."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.client.generation import AsyncGeneration
from baton.client.types import Load
from baton.errors import CancelledError, DeadlineExceededError
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.watch import loads, until_nothing_is_held
from tests.support.cluster.wide import stopped
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

LONG = SamplingParams(max_tokens=2000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=30, ignore_eos=True)

Loads = dict[str, Load]


@pytest.fixture
async def client(narrow: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(narrow.address, admin_address=narrow.admin_address) as open_client:
        yield open_client


# Each stage: what goes before, the request itself, and how one sees that it is there.


async def queued(client: AsyncClient) -> tuple[list[AsyncGeneration], AsyncGeneration]:
    """Behind another prompt."""
    blocker = client.generate(prompt_of(1500), SHORT)
    await blocker.wait_accepted()
    return [blocker], client.generate(prompt_of(40), SHORT, request_id="victim")


async def prefilling(client: AsyncClient) -> tuple[list[AsyncGeneration], AsyncGeneration]:
    """Computed token by token, while the decode worker fetches block by block."""
    return [], client.generate(prompt_of(1501), SHORT, request_id="victim")


async def waiting_for_decode(
    client: AsyncClient,
) -> tuple[list[AsyncGeneration], AsyncGeneration]:
    """Computed and leased; the decode worker is busy and has not fetched it."""
    blocker = client.generate(prompt_of(2), LONG)
    await anext(blocker)
    await anext(blocker)
    return [blocker], client.generate(prompt_of(20), SHORT, request_id="victim")


async def decoding(client: AsyncClient) -> tuple[list[AsyncGeneration], AsyncGeneration]:
    """Written, token by token."""
    return [], client.generate(prompt_of(3), LONG, request_id="victim")


def is_queued(now: Loads) -> bool:
    return now["prefill-0"].num_waiting == 1


def is_prefilling(now: Loads) -> bool:
    return (
        now["prefill-0"].num_running == 1
        and now["decode-0"].num_waiting == 1
        and now["decode-0"].num_held_blocks > 90
    )


def is_waiting_for_decode(now: Loads) -> bool:
    return (
        now["prefill-0"].num_leases == 1
        and now["prefill-0"].num_running == 0
        and now["decode-0"].num_waiting == 1
        and now["decode-0"].num_running == 1
    )


def is_decoding(now: Loads) -> bool:
    return now["decode-0"].num_running == 1 and now["prefill-0"].num_leases == 0


STAGES = {
    "queued": (queued, is_queued),
    "prefilling": (prefilling, is_prefilling),
    "waiting for decode": (waiting_for_decode, is_waiting_for_decode),
    "decoding": (decoding, is_decoding),
}

Stage = Callable[[AsyncClient], Awaitable[tuple[list[AsyncGeneration], AsyncGeneration]]]


async def brought_to(
    stage: Stage, is_there: Callable[[Loads], bool], client: AsyncClient, cluster: LocalCluster
) -> tuple[list[AsyncGeneration], AsyncGeneration]:
    await until_nothing_is_held(cluster)
    blockers, victim = await stage(client)
    await victim.wait_accepted()
    await until_observed(lambda: is_there(loads(cluster)), within=3.0, what="the stage")
    return blockers, victim


def holds_no_more_than(blockers: list[AsyncGeneration]) -> Callable[[Loads], bool]:
    def holds(now: Loads) -> bool:
        return (
            now["router"].num_running == len(blockers)
            and now["prefill-0"].num_waiting == 0
            and now["prefill-0"].num_leases <= len(blockers)
            and (blockers != [] or now["prefill-0"].num_held_blocks == 0)
            and (blockers != [] or now["decode-0"].num_held_blocks == 0)
            and now["decode-0"].num_waiting + now["decode-0"].num_running <= len(blockers)
        )

    return holds


async def check_all_is_back(blockers: list[AsyncGeneration], cluster: LocalCluster) -> None:
    """The ended request's share first, while what it waited for goes on; then the rest."""
    holds = holds_no_more_than(blockers)
    await until_observed(
        lambda: holds(loads(cluster)), within=1.0, what="the request's end everywhere"
    )
    for blocker in blockers:
        blocker.cancel()
    await until_nothing_is_held(cluster)


@pytest.mark.parametrize(("stage", "is_there"), STAGES.values(), ids=STAGES)
async def test_cancelled_request_releases_all_resources(client, narrow, stage, is_there):
    blockers, victim = await brought_to(stage, is_there, client, narrow)
    victim.cancel()
    await check_all_is_back(blockers, narrow)


@pytest.mark.parametrize(("stage", "is_there"), STAGES.values(), ids=STAGES)
async def test_aborted_request_releases_all_resources(client, narrow, stage, is_there):
    blockers, victim = await brought_to(stage, is_there, client, narrow)
    await client.abort("victim")
    await check_all_is_back(blockers, narrow)
    with pytest.raises(CancelledError):
        await victim.text()


# Whose turn would come after its deadline is refused at the router.
BEYOND_THE_QUEUE = {name: stage for name, stage in STAGES.items() if name != "queued"}


@pytest.mark.parametrize(("stage", "is_there"), BEYOND_THE_QUEUE.values(), ids=BEYOND_THE_QUEUE)
async def test_expired_deadline_releases_all_resources(client, narrow, stage, is_there):
    async with AsyncClient(
        narrow.address, admin_address=narrow.admin_address, timeout=1.5
    ) as hasty:
        blockers, victim = await brought_to(stage, is_there, Blended(client, hasty), narrow)
        with pytest.raises(DeadlineExceededError):
            await victim.text()
        await check_all_is_back(blockers, narrow)


async def test_expired_deadline_on_a_hung_worker_releases_resources(client, narrow):
    """Behind a prompt that was to be computed in time. It is over before the worker is missed."""
    async with AsyncClient(
        narrow.address, admin_address=narrow.admin_address, timeout=1.5
    ) as hasty:
        await until_nothing_is_held(narrow)
        blocker = client.generate(prompt_of(48), LONG)
        await blocker.wait_accepted()
        victim = hasty.generate(prompt_of(40), SHORT)
        await victim.wait_accepted()
        with stopped(narrow, "prefill-0"), pytest.raises(DeadlineExceededError):
            await victim.text()
        await check_all_is_back([blocker], narrow)
    narrow.wait_ready()  # the router may have missed the worker shortly after the deadline


class Blended:
    """The request itself through a hasty client, what goes before it through a patient one."""

    def __init__(self, patient: AsyncClient, hasty: AsyncClient) -> None:
        self._patient = patient
        self._hasty = hasty

    def generate(self, *args: object, request_id: str = "") -> AsyncGeneration:
        client = self._hasty if request_id else self._patient
        return client.generate(*args, request_id=request_id)


async def test_broken_connection_releases_all_resources(client, narrow):
    async with AsyncClient(narrow.address, admin_address=narrow.admin_address) as leaving:
        _, victim = await brought_to(decoding, is_decoding, leaving, narrow)
        await anext(victim)
    await until_nothing_is_held(narrow)


async def test_request_waiting_for_decode_capacity_is_served(client, narrow):
    blockers, victim = await brought_to(waiting_for_decode, is_waiting_for_decode, client, narrow)
    assert len((await anext(victim)).token_ids) == 1, "the first token does not wait"
    blockers[0].cancel()
    assert len(await victim.token_ids()) == 30
    await until_nothing_is_held(narrow)


@pytest.mark.slow
async def test_requests_waiting_on_both_pools_are_all_served(client, narrow):
    generations = [client.generate(prompt_of(10 + i, seed=i), SHORT) for i in range(20)]
    for generation in generations:
        assert len(await generation.token_ids()) == 30
    await until_nothing_is_held(narrow)


@pytest.mark.slow
async def test_priority_policy_serves_the_smaller_priority_first(narrow):
    ended: list[str] = []

    async def run(client: AsyncClient, name: str, priority: int) -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        await client.generate(prompt_of(20, seed=len(name)), params, priority=priority).text()
        ended.append(name)

    async with AsyncClient(narrow.address) as client:
        tasks = []
        for name, priority in (("first", 0), ("unimportant", 9), ("important", -9)):
            tasks.append(asyncio.create_task(run(client, name, priority)))
            await asyncio.sleep(0.1)
        await asyncio.gather(*tasks)
    await until_nothing_is_held(narrow)
    assert ended.index("important") < ended.index("unimportant")


async def test_load_names_time_since_nothing_is_held(client, narrow):
    blockers, victim = await brought_to(decoding, is_decoding, client, narrow)
    busy = [load.idle_since_unix_ms for load in loads(narrow).values()]
    assert busy.count(0) >= 2  # the router and the decode worker
    before = time.time()
    victim.cancel()
    await check_all_is_back(blockers, narrow)
    idle = loads(narrow)
    assert all(load.idle_since_unix_ms for load in idle.values())
    assert before - 0.01 <= idle["decode-0"].idle_since_unix_ms / 1000 <= time.time()
