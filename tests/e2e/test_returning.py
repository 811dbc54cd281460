"""Decode workers without room for all they run give requests back, and every one of them ends as if
it had been alone."""

import asyncio

import pytest

from baton.cli.local_cluster import LocalCluster
from baton.client import AsyncClient
from baton.models import locate
from baton.sampling import SamplingParams
from router.recovery import MAX_RETURNS
from tests.support.cluster.checkpoints import is_greedy, prompt_of
from tests.support.cluster.watch import loads, until_nothing_is_held
from tests.support.cluster.ways import CODE, SEEDED, answer_of, check_same, with_late_stop_string
from tests.support.cluster.wide import HANDOFFS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Room for two requests of `ways` or for one of several sequences, which the router does not mind.
CROWDED = {"num_blocks": 44, "max_num_seqs": 16, "preemption": "return"}
EVERYBODY = {**HANDOFFS, "admission": "none"}


def crowded(num_decode: int, **decode_flags: object) -> LocalCluster:
    return LocalCluster(
        num_decode=num_decode, decode_flags={**CROWDED, **decode_flags}, router_flags=EVERYBODY
    )


def num_returns(cluster: LocalCluster) -> int:
    return sum(load.num_returns for load in loads(cluster).values())


@pytest.mark.parametrize("num_decode", [1, 2])
async def test_every_way_of_choosing_tokens_survives_being_given_back(num_decode):
    with crowded(num_decode) as cluster:
        async with AsyncClient(cluster.address) as client:
            ways = with_late_stop_string(await client.generate(CODE, SEEDED).text())
            undisturbed = {n: await answer_of(client.generate(CODE, p)) for n, p in ways.items()}
            assert num_returns(cluster) == 0
            crowd = {n: client.generate(CODE, p) for n, p in ways.items()}
            answers = await asyncio.gather(*map(answer_of, crowd.values()))
            for name, answer in zip(crowd, answers, strict=True):
                check_same(name, answer, undisturbed[name])
            migrated = [g.finished.usage.num_migrations for g in crowd.values()]
            assert sum(migrated) == num_returns(cluster) > 0
        await until_nothing_is_held(cluster)


@pytest.mark.parametrize("num_decode", [1, 2])
async def test_a_crowd_that_never_fits_ends_all_the_same(num_decode):
    """Each of them needs half of the pool or more at its end."""
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    prompts = [prompt_of(60 + 10 * i, seed=70 + i) for i in range(8)]
    with crowded(num_decode, num_blocks=20) as cluster:
        async with AsyncClient(cluster.address) as client:
            crowd = [client.generate(p, params) for p in prompts]
            outputs = await asyncio.gather(*(g.token_ids() for g in crowd))
            for prompt, tokens in zip(prompts, outputs, strict=True):
                assert len(tokens) == 150
                assert is_greedy(locate("tiny"), prompt, tokens)
            migrated = [g.finished.usage.num_migrations for g in crowd]
            assert sum(migrated) == num_returns(cluster) > 0
            assert max(migrated) <= MAX_RETURNS
        await until_nothing_is_held(cluster)
