"""A cluster whose processes know each other by IPv6 addresses alone."""

import json
import urllib.request
from collections.abc import Iterator

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Client
from baton.sampling import SamplingParams
from tests.support.addresses import needs_ipv6
from tests.support.cluster.checkpoints import prompt_of

pytestmark = [pytest.mark.e2e, needs_ipv6]

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
LISTENS = {"host": "[::]", "advertise_host": "::1", "insecure": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    workers = {**LISTENS, "kv_port": 0, "kv_connector": "grpc", "num_blocks": 64}
    router = {**LISTENS, "conditional_disaggregation": False, "admin_host": "[::1]"}
    with LocalCluster(http_port=0, worker_flags=workers, router_flags=router) as running:
        yield running


def at_ipv6(address: str) -> str:
    return address.replace("127.0.0.1", "[::1]")


def test_cluster_hands_over_between_ipv6_addresses(cluster):
    with Client(at_ipv6(cluster.address), admin_address=at_ipv6(cluster.admin_address)) as client:
        generation = client.generate(prompt_of(40, seed=6), PARAMS)
        assert len(generation.token_ids()) == PARAMS.max_tokens
        assert generation.finished is not None
        assert generation.finished.usage.num_transferred_bytes > 0
        workers = client.list_workers()
    assert {worker.role for worker in workers} == {"prefill", "decode"}
    assert all(worker.endpoint.startswith("[::1]:") for worker in workers)


def test_http_and_metrics_answer_at_both_loopbacks(cluster):
    for address in (cluster.http_address, at_ipv6(cluster.http_address)):
        with urllib.request.urlopen(f"{address}/v1/models", timeout=10) as answer:
            assert json.load(answer)["data"]
    for endpoint in cluster.metrics_endpoints.values():
        for address in (endpoint, at_ipv6(endpoint)):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
                assert b"baton_" in answer.read()
