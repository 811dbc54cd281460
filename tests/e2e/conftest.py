"""Clusters of real processes. One that tests only send requests to is shared by all of them."""

from collections.abc import AsyncIterator, Iterator

import pytest

from baton.cli.local_cluster import LocalCluster
from baton.client import AsyncClient
from tests.support.cluster.wide import HANDOFFS, made_whole


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """The shipped model with one worker of each role.

    Prompts come in several chunks. The decode pool holds one sequence of the model's length, but
    not two dozen of any length.
    """
    with LocalCluster(
        worker_flags={"max_num_batched_tokens": 48, "max_num_seqs": 32},
        decode_flags={"num_blocks": 130},
        router_flags={"reflection": True, **HANDOFFS},
        http_port=0,
    ) as running:
        yield running


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address, admin_address=cluster.admin_address) as open_client:
        yield open_client


@pytest.fixture(scope="session")
def pair_cluster() -> Iterator[LocalCluster]:
    """For the tests that break it: two workers of each role with room for a dozen sequences."""
    flags = {"max_num_batched_tokens": 32, "num_blocks": 1024, "drain_timeout_s": 1.0}
    with LocalCluster(
        num_prefill=2, num_decode=2, worker_flags=flags, router_flags=HANDOFFS
    ) as running:
        yield running


@pytest.fixture
def pair(pair_cluster: LocalCluster) -> LocalCluster:
    """The pair of pairs, whatever an earlier test did to them."""
    return made_whole(pair_cluster)
