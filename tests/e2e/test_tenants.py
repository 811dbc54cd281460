"""Tenants of one cluster: each finds its own, and nothing of the others."""

from collections.abc import Iterator

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.errors import NotFoundError
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.named_clusters import tenants_file
from tests.support.cluster.second_router import SecondRouter, second_router
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.wide import HANDOFFS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(
    single_shape: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecondRouter]:
    tokens = {"a secret": "acme", "another": "acme", "a third": "globex"}
    path = tenants_file(tmp_path_factory.mktemp("tenants"), tokens)
    flags = {"tenants_file": path, "allow_anonymous": True, **HANDOFFS}
    with second_router(single_shape, **flags) as running:
        yield running


async def num_cached(cluster: SecondRouter, token: str | None) -> int:
    """Prompt tokens that were found in the prefill worker's cache."""
    async with AsyncClient(cluster.address, token=token) as client:
        generation = client.generate(prompt_of(100, seed=333), SHORT)
        await generation.token_ids()
        return generation.finished.usage.num_cached_prompt_tokens


async def test_tenant_hits_only_its_own_prefixes(shared):
    assert await num_cached(shared, "a secret") == 0
    assert await num_cached(shared, "another") == 96
    assert await num_cached(shared, "a third") == 0
    assert await num_cached(shared, None) == 0
    assert await num_cached(shared, None) == 96
    await until_nothing_is_held(shared)


async def test_request_ids_and_aborts_are_scoped_to_the_tenant(shared):
    async with (
        AsyncClient(shared.address, admin_address=shared.admin_address, token="a secret") as owner,
        AsyncClient(shared.address, admin_address=shared.admin_address, token="a third") as other,
    ):
        generation = owner.generate(prompt_of(5), LONG, request_id="mine")
        await anext(generation)
        with pytest.raises(NotFoundError):
            await other.abort("mine")
        assert [one.request_id for one in await owner.list_requests()] == ["mine"]
        assert await other.list_requests() == []
        same_name = other.generate(prompt_of(5), SHORT, request_id="mine")
        assert len(await same_name.token_ids()) == 4
        await owner.abort("mine")
    await until_nothing_is_held(shared)
