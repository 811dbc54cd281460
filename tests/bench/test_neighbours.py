"""Calls of an innocent tenant beside attacks on limits that it shares: each is answered."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.cli.local.local_cluster import LocalCluster
from bench.router.neighbours import CASES, MODEL, Measured, measure_all, tenants_file

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SIZES = {
    "admission queue": 60,
    "gRPC connections": 40,
    "streams reset": 1,
    "HTTP connections": 40,
    "slow grammars, cached one": 6,
    "slow grammars, new one": 6,
    "masks of grammars": 2,
    "image decoders": 2,
    "long texts": 6,
    "large bodies": 1,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[LocalCluster]:
    flags = {
        "tenants_file": tenants_file(tmp_path_factory.mktemp("tenants")),
        "max_waiting": 20,
        "max_connections": 24,
        "http_max_connections": 24,
        "large_request_budget_bytes": 2**20,
    }
    workers = {"max_num_seqs": 8}
    with LocalCluster(MODEL, http_port=0, router_flags=flags, worker_flags=workers) as running:
        yield running


@pytest.mark.parametrize("name", CASES)
async def test_neighbour_is_answered_beside_attack(cluster, name):
    cases = {name: replace(CASES[name], size=SIZES[name])}
    measured: Measured = (await measure_all(cluster, cases, num_calls=3, repeats=1))[name]
    assert measured.errors == []
    assert len(measured.alone) == len(measured.beside) == 3
