"""Live migration and remote prefixes between processes that read each other's blocks by NIXL.

The cases are those of `test_live_migration` and `test_prefix_sharing`; here no other connector
brings blocks, so that one that NIXL does not bring is computed, which they notice.
"""

from collections.abc import AsyncIterator, Iterator

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from tests.e2e.test_live_migration import (
    killed_amid_its_drain,
    test_cancelled_requests_leave_nothing_during_a_drain,
    test_drain_migrates_many_requests_without_recomputation,
    test_migration_survives_a_kill_of_either_worker,
)
from tests.e2e.test_prefix_sharing import (
    test_prefill_computes_only_new_tokens_of_the_next_turn,
    test_prefix_is_fetched_from_a_busy_worker_or_recomputed,
)
from tests.support.cluster import named_clusters
from tests.support.cluster.wide import restored

__all__ = [
    "test_cancelled_requests_leave_nothing_during_a_drain",
    "test_drain_migrates_many_requests_without_recomputation",
    "test_migration_survives_a_kill_of_either_worker",
    "test_prefill_computes_only_new_tokens_of_the_next_turn",
    "test_prefix_is_fetched_from_a_busy_worker_or_recomputed",
]

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.nightly]


@pytest.fixture(scope="module")
def over_nixl() -> Iterator[LocalCluster]:
    """The shape `pair`, whose workers know no other way."""
    with named_clusters.pair(kv_connector="nixl") as running:
        yield running


@pytest.fixture
def pair(over_nixl: LocalCluster) -> LocalCluster:
    return restored(over_nixl)


@pytest.fixture
async def client(pair: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(pair.address, admin_address=pair.admin_address) as open_client:
        await open_client.flush_cache()
        yield open_client


@pytest.mark.parametrize("delay", [0.005, 0.02])
async def test_drain_over_nixl_survives_a_kill(client, pair, delay):
    """Two of the moments that `test_live_migration` has."""
    await killed_amid_its_drain(client, pair, delay)
