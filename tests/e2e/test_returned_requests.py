"""Decode workers without room for all they run give requests back, and every one of them ends as if
it had been alone."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.models import locate
from baton.sampling import SamplingParams
from baton_router.lifecycle.recovery import MAX_RETURNS
from tests.support.cluster.checkpoints import is_greedy, prompt_of
from tests.support.cluster.sampling_modes import CODE, THREE_WAYS, answer_of, check_same
from tests.support.cluster.watch import loads, until_nothing_is_held

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def num_returns(cluster: LocalCluster) -> int:
    return sum(load.num_returns for load in loads(cluster).values())


@pytest.fixture
async def crowded(
    request: pytest.FixtureRequest, tight: LocalCluster
) -> AsyncIterator[tuple[LocalCluster, AsyncClient]]:
    """One or both of the decode workers, and what knows them."""
    if request.param == 1:
        tight.kill("decode-1")
    async with AsyncClient(tight.address) as client:
        yield tight, client
    await until_nothing_is_held(tight)


NUM_DECODE = pytest.mark.parametrize(
    "crowded", [pytest.param(1, marks=pytest.mark.nightly), 2], indirect=True
)


@NUM_DECODE
async def test_requests_of_every_kind_survive_being_returned(crowded):
    """All ten do in tests/worker/test_sampling_modes.py."""
    cluster, client = crowded
    before = num_returns(cluster)
    undisturbed = {n: await answer_of(client.generate(CODE, p)) for n, p in THREE_WAYS.items()}
    assert num_returns(cluster) == before
    crowd = [(n, client.generate(CODE, p)) for n, p in THREE_WAYS.items() for _ in range(2)]
    for name, generation in crowd:
        check_same(name, await answer_of(generation), undisturbed[name])
    migrated = [generation.finished.usage.num_migrations for _, generation in crowd]
    assert sum(migrated) == num_returns(cluster) - before > 0


@NUM_DECODE
async def test_returned_requests_that_never_fit_together_all_finish(crowded):
    """Each of them needs half of the pool or more at its end."""
    cluster, client = crowded
    params = SamplingParams(max_tokens=250, ignore_eos=True)
    prompts = [prompt_of(110 + 10 * i, seed=70 + i) for i in range(8)]
    before = num_returns(cluster)
    generations = [client.generate(p, params) for p in prompts]
    outputs = await asyncio.gather(*(g.token_ids() for g in generations))
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert len(tokens) == 250
        assert is_greedy(locate("tiny"), prompt, tokens)
    migrated = [g.finished.usage.num_migrations for g in generations]
    assert sum(migrated) == num_returns(cluster) - before > 0
    assert max(migrated) <= MAX_RETURNS
