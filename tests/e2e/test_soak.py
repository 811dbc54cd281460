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

from .checkpoints import is_greedy, prompt_of
from .watch import load_of, until_nothing_is_held

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_REQUESTS = 400
IN_FLIGHT = 48


async def one(client: AsyncClient, index: int, chance: random.Random) -> str:
    """One request, ended in some way; how."""
    shared = prompt_of(chance.choice([0, 16, 40, 64]), seed=1)
    prompt = shared + prompt_of(chance.randint(1, 120), seed=index)
    params = SamplingParams(max_tokens=chance.choice([1, 2, 20, 60]), ignore_eos=True)
    ending = chance.choice(["read", "read", "read", "leave", "abort", "hurry"])
    timeout = chance.uniform(0.01, 0.5) if ending == "hurry" else None
    name = f"soak-{index}"
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


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("size", [(1, 1), (2, 2)], ids=["1+1", "2+2"])
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
        async with AsyncClient(cluster.address) as client:
            gate = asyncio.Semaphore(IN_FLIGHT)

            async def gated(index: int) -> str:
                async with gate:
                    return await one(client, index, random.Random(seed * 1000 + index))

            order = list(range(NUM_REQUESTS))
            chance.shuffle(order)
            async with asyncio.timeout(240):
                endings = await asyncio.gather(*(gated(i) for i in order))
            await until_nothing_is_held(cluster, within=2.0)
        assert endings.count("read") > NUM_REQUESTS // 4, endings
        decodes = [p for p in cluster.processes if p.role == "decode"]
        assert sum(load_of(p.endpoint).num_preemptions for p in decodes) > 0
