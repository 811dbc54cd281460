"""Clients that stop reading: the router keeps little for them, and others notice nothing."""

import asyncio
import time
from itertools import pairwise

import psutil
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.watch import loads, until_nothing_is_held
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.nightly]

MUCH = SamplingParams(max_tokens=1000, ignore_eos=True, logprobs=True, top_logprobs=20)
NUM_SLOW = 12
PROBE = SamplingParams(max_tokens=200, ignore_eos=True)


async def longest_gap(client: AsyncClient) -> float:
    """Between two chunks of one request."""
    moments = [time.monotonic() async for _ in client.generate(prompt_of(20), PROBE)]
    return max(b - a for a, b in pairwise(moments))


def is_computed(cluster: LocalCluster) -> bool:
    """Whether all that was asked for is, though it may not be read yet."""
    return all(n == "router" or load.num_held_blocks == 0 for n, load in loads(cluster).items())


async def test_slow_readers_cost_little_and_delay_no_other_request(pair):
    router = psutil.Process(pair.process("router").pid)
    async with AsyncClient(pair.address) as client, AsyncClient(pair.address) as other:
        undisturbed = await client.generate(prompt_of(30), MUCH).token_ids()
        before = router.memory_info().rss
        stalled = [client.generate(prompt_of(30), MUCH) for _ in range(NUM_SLOW)]
        await asyncio.gather(*(generation.wait_accepted() for generation in stalled))
        assert await longest_gap(other) < 1.0
        # The workers do not wait for readers: their blocks are back when all is computed.
        await until_observed(
            lambda: is_computed(pair), within=30.0, what="the end of the computing"
        )
        assert router.memory_info().rss - before < 8 * 2**20
        for generation in stalled:
            assert await generation.token_ids() == undisturbed
    await until_nothing_is_held(pair)
