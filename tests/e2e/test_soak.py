"""Hundreds of requests that end in every way, on pools too small for them: nothing is left behind,
and those that end well have the right tokens."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.errors import (
    CancelledError,
    DeadlineExceededError,
    NotFoundError,
    OverloadedError,
)
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import is_greedy, prompt_of
from tests.support.cluster.second_router import SecondRouter, second_router
from tests.support.cluster.watch import loads, until_nothing_is_held
from tests.support.cluster.wide import HANDOFFS

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.slow]

IN_FLIGHT = 48
ENDINGS = ["read", "read", "read", "leave", "abort", "hurry"]


def wants_answer(seed: int) -> bool:
    """Whether the request of this seed is to be read to its end; what `one` draws first."""
    return random.Random(seed).choice(ENDINGS) == "read"


async def persistent(client: AsyncClient, index: int, seed: int) -> str:
    """One request, ended in some way; how. Who wants an answer asks again when refused."""
    while True:
        ending, wants_answer = await one(client, index, random.Random(seed))
        if not (wants_answer and ending == "OverloadedError"):
            return f"{ending}, as wanted" if wants_answer and ending == "read" else ending
        await asyncio.sleep(0.05)


async def one(client: AsyncClient, index: int, chance: random.Random) -> tuple[str, bool]:
    """One try: how it ended, and whether it was to be read to its end."""
    ending = chance.choice(ENDINGS)
    shared = prompt_of(chance.choice([0, 16, 40, 64]), seed=1)
    prompt = shared + prompt_of(chance.randint(1, 120), seed=index)
    params = SamplingParams(max_tokens=chance.choice([1, 2, 20, 200]), ignore_eos=True)
    return await ended(client, f"soak-{index}", prompt, params, ending, chance), ending == "read"


async def ended(
    client: AsyncClient,
    name: str,
    prompt: list[int],
    params: SamplingParams,
    ending: str,
    chance: random.Random,
) -> str:
    """Ends a request in the given way, if it does not end before; says how."""
    timeout = chance.uniform(0.01, 0.5) if ending == "hurry" else None
    generation = client.generate(prompt, params, request_id=name, timeout=timeout)
    try:
        async with generation:
            if ending in ("leave", "abort"):
                for _ in range(chance.randint(0, 10)):
                    await anext(generation)
            if ending == "leave":
                return ending
            if ending == "abort":
                await client.abort(name)
            tokens = await generation.token_ids()
    except StopAsyncIteration:
        return "read"
    except (CancelledError, DeadlineExceededError, NotFoundError, OverloadedError) as error:
        return type(error).__name__
    assert len(tokens) == params.max_tokens
    assert is_greedy(locate("tiny"), prompt, tokens)
    return "read"


@pytest.fixture(scope="module")
def admitting(tight_shape: LocalCluster) -> Iterator[SecondRouter]:
    """A router that lets requests wait until there is room for them."""
    with second_router(tight_shape, **HANDOFFS) as router:
        yield router


@pytest.mark.parametrize(
    ("num_requests", "seed"), [(120, 1), pytest.param(1000, 2, marks=pytest.mark.nightly)]
)
async def test_requests_that_end_in_any_way_leak_nothing(tight, admitting, num_requests, seed):
    chance = random.Random(seed)
    before = num_preemptions(tight)
    async with AsyncClient(admitting.address, admin_address=admitting.admin_address) as client:
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def gated(index: int) -> str:
            async with gate:
                return await persistent(client, index, seed * 1000 + index)

        order = list(range(num_requests))
        chance.shuffle(order)
        async with asyncio.timeout(240):
            endings = await asyncio.gather(*(gated(i) for i in order))
        await until_nothing_is_held(tight, within=2.0)
    num_wanted = sum(wants_answer(seed * 1000 + i) for i in range(num_requests))
    assert endings.count("read, as wanted") == num_wanted > num_requests // 4, endings
    assert num_preemptions(tight) > before


def num_preemptions(cluster: LocalCluster) -> int:
    return sum(load.num_preemptions for load in loads(cluster).values())
