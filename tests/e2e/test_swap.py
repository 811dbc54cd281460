"""A decode worker without room for all it runs swaps sequences to host memory and back."""

import asyncio

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import is_greedy, prompt_of
from tests.support.cluster.scraped import scrape
from tests.support.cluster.watch import until_nothing_is_held

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


async def test_swapped_requests_finish_and_memory_report_counts(swapping: LocalCluster) -> None:
    """Each request needs half of the pool at its end, most of it for output, so that all of them
    are decoded at the same time. Several, since one that lacks a block itself is not swapped."""
    params = SamplingParams(max_tokens=260, ignore_eos=True)
    prompts = [prompt_of(60 + 10 * i, seed=70 + i) for i in range(8)]
    metrics_endpoint = swapping.metrics_endpoints["decode-0"]
    most_held = most_scraped = 0.0
    async with AsyncClient(swapping.address, admin_address=swapping.admin_address) as client:
        generating = asyncio.gather(*(client.generate(p, params).token_ids() for p in prompts))
        while not generating.done():
            decode, prefill = await client.get_memory()
            most_held = max(most_held, decode.num_held_host_blocks)
            host = (await asyncio.to_thread(scrape, metrics_endpoint))["baton_host_kv_blocks"]
            most_scraped = max(most_scraped, host.total("baton_host_kv_blocks", state="held"))
            await asyncio.sleep(0.05)
        for prompt, tokens in zip(prompts, await generating, strict=True):
            assert is_greedy(locate("tiny"), prompt, tokens)
        await until_nothing_is_held(swapping)
        decode, prefill = await client.get_memory()
    assert decode.num_swapped_out_blocks >= decode.num_swapped_in_blocks > 0
    assert decode.num_host_blocks >= most_held > 0
    assert (decode.num_held_host_blocks, decode.num_held_blocks) == (0, 0)
    assert decode.host_pool_bytes > 0
    assert (prefill.num_host_blocks, prefill.num_swapped_out_blocks) == (0, 0)
    assert 0 < most_scraped <= decode.num_host_blocks
    swapped = scrape(metrics_endpoint)["baton_swapped_kv_blocks_total"]
    for direction, num_blocks in (
        ("out", decode.num_swapped_out_blocks),
        ("in", decode.num_swapped_in_blocks),
    ):
        assert swapped.total("baton_swapped_kv_blocks_total", direction=direction) == num_blocks
