"""Remote prefix fetch between real workers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.watch import load_of, loads, until_nothing_is_held
from tests.support.cluster.wide import listed, name_of, stopped
from tests.support.waiting import until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TURN = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture
async def client(pair: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(pair.address, admin_address=pair.admin_address) as open_client:
        await open_client.flush_cache()
        yield open_client


async def until_known(cluster: LocalCluster, name: str, num_blocks: int) -> None:
    """The router has heard of what a worker has cached."""
    await until_observed(
        lambda: listed(cluster)[name].num_indexed_hashes >= num_blocks, what="the news"
    )


async def conversation(
    client: AsyncClient, cluster: LocalCluster, *, shares: bool
) -> tuple[list[list[int]], int, int]:
    """Three turns: their answers, and the tokens that prefill workers computed and pulled for the
    last two."""
    prompt, answers, writer = prompt_of(100, seed=60), [], ""
    before = totals(cluster)
    for turn in range(3):
        if not shares:
            await client.flush_cache()
            await until_observed(
                lambda: not any(w.num_indexed_hashes for w in listed(cluster).values()),
                what="the news",
            )
        generation = client.generate(prompt, TURN)
        placement = (await generation.wait_accepted()).placement
        answers.append(await generation.token_ids())
        if turn == 0:
            before = totals(cluster)
        elif shares:
            assert placement.prefix_source == writer
            terms = {c.worker: c.terms for c in placement.candidates}[placement.prefill_worker]
            assert terms["fetch"] > 0  # seconds by what transfers took; that it pays was decided
        known, writer = (len(prompt) + 199) // 16, placement.decode_worker
        prompt = [*prompt, *answers[-1], *prompt_of(21, seed=61 + turn)]
        await until_known(cluster, name_of(cluster, writer), known)
    num_computed, num_pulled = (b - a for a, b in zip(before, totals(cluster), strict=True))
    return answers, num_computed, num_pulled


def totals(cluster: LocalCluster) -> tuple[int, int]:
    """Returns the tokens computed and pulled by all prefill workers."""
    found = [load for name, load in loads(cluster).items() if name.startswith("prefill")]
    return sum(x.num_computed_tokens for x in found), sum(x.num_pulled_tokens for x in found)


async def test_prefill_computes_only_new_tokens_of_the_next_turn(client, pair):
    undisturbed, all_tokens, _ = await conversation(client, pair, shares=False)
    assert all_tokens == 321 + 542
    await client.flush_cache()
    await until_observed(
        lambda: not any(w.num_indexed_hashes for w in listed(pair).values()), what="the news"
    )
    answers, num_computed, num_pulled = await conversation(client, pair, shares=True)
    assert answers == undisturbed
    # Of each turn what is new, and what of the last answer did not fill a block.
    assert num_computed == (321 - 288) + (542 - 512)
    assert num_pulled >= (288 - 96) + (512 - 320)
    await until_nothing_is_held(pair)


async def busy_with(client: AsyncClient, pair: LocalCluster, prefix: list[int]) -> str:
    """Has one prefill worker cache a prefix, and the router know it; its name."""
    generation = client.generate(prefix, replace(TURN, max_tokens=2))
    name = name_of(pair, (await generation.wait_accepted()).placement.prefill_worker)
    await generation.token_ids()
    await until_known(pair, name, len(prefix) // 16)
    return name


@pytest.mark.parametrize(
    "fate",
    [
        "lives",
        "dies",
        pytest.param("is silent", marks=pytest.mark.nightly),
        pytest.param("forgets", marks=pytest.mark.nightly),
    ],
)
async def test_prefix_is_fetched_from_a_busy_worker_or_recomputed(client, pair, fate):
    prefix = prompt_of(800, seed=70)
    prompt = [*prefix, *prompt_of(30, seed=71)]
    undisturbed = await client.generate(prompt, TURN).token_ids()
    await client.flush_cache()
    await until_observed(
        lambda: not any(w.num_indexed_hashes for w in listed(pair).values()), what="the news"
    )
    holder = await busy_with(client, pair, prefix)
    before = totals(pair)
    long = client.generate([*prefix, *prompt_of(1100, seed=72)], replace(TURN, max_tokens=2))
    assert name_of(pair, (await long.wait_accepted()).placement.prefill_worker) == holder
    await until_observed(
        lambda: load_of(pair.process(holder).admin_endpoint).num_running == 1, what="the prefill"
    )
    generation = client.generate(prompt, TURN)
    placement = (await generation.wait_accepted()).placement
    assert name_of(pair, placement.prefill_worker) != holder
    source = name_of(pair, placement.prefix_source)
    match fate:
        case "dies":
            pair.kill(source)
        case "is silent":
            with stopped(pair, source):
                await asyncio.sleep(2.5)
        case "forgets":
            await client.flush_cache()
    assert await generation.token_ids() == undisturbed
    await long.token_ids()
    if fate == "lives":
        computed, pulled = (b - a for a, b in zip(before, totals(pair), strict=True))
        assert pulled == 800
        assert computed == 1100 + 30
    await until_nothing_is_held(pair, within=3.0)
