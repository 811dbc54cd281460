"""Hundreds of requests that end in every way, on pools too small for them: nothing is left behind,
and those that end well have the right tokens."""

import asyncio
import random

import pytest

from baton.cli.local_cluster import LocalCluster
from baton.client import AsyncClient
from baton.errors import (
    CancelledError,
    DeadlineExceededError,
    NotFoundError,
    OverloadedError,
)
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import is_greedy, prompt_of
from tests.support.cluster.watch import load_of, until_nothing_is_held

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_REQUESTS = 400
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
    params = SamplingParams(max_tokens=chance.choice([1, 2, 20, 60]), ignore_eos=True)
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


@pytest.mark.parametrize(("size", "seed"), [((1, 1), 1), ((2, 2), 2)], ids=["1+1", "2+2"])
async def test_whatever_ends_however_nothing_is_left_behind(size, seed):
    chance = random.Random(seed)
    num_prefill, num_decode = size
    flags = {"max_num_batched_tokens": 64, "max_num_seqs": 24, "max_model_len": 384}
    with LocalCluster(
        num_prefill=num_prefill,
        num_decode=num_decode,
        worker_flags=flags,
        prefill_flags={"num_blocks": 40},
        decode_flags={"num_blocks": 48},
    ) as cluster:
        async with AsyncClient(cluster.address, admin_address=cluster.admin_address) as client:
            gate = asyncio.Semaphore(IN_FLIGHT)

            async def gated(index: int) -> str:
                async with gate:
                    return await persistent(client, index, seed * 1000 + index)

            order = list(range(NUM_REQUESTS))
            chance.shuffle(order)
            async with asyncio.timeout(240):
                endings = await asyncio.gather(*(gated(i) for i in order))
            await until_nothing_is_held(cluster, within=2.0)
        num_wanted = sum(wants_answer(seed * 1000 + i) for i in range(NUM_REQUESTS))
        assert endings.count("read, as wanted") == num_wanted > NUM_REQUESTS // 4, endings
        decodes = [p for p in cluster.processes if p.role == "decode"]
        assert sum(load_of(p.admin_endpoint).num_preemptions for p in decodes) > 0
