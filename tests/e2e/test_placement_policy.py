"""The router's setting decides where requests go."""

import random
import time

import pytest

from baton import Client, SamplingParams
from baton.cli.local.local_cluster import LocalCluster
from tests.support.cluster.second_router import second_router
from tests.support.cluster.wide import HANDOFFS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_REQUESTS = 8


def prefill_workers(cluster: LocalCluster, placement: str) -> list[str]:
    """Those that requests of one long prompt, one after the other, were placed on."""
    source = random.Random(placement)
    prompt = [source.randrange(3, 3000) for _ in range(128)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    chosen = []
    with (
        second_router(cluster, placement=placement, **HANDOFFS) as router,
        Client(router.address, admin_address=router.admin_address) as client,
    ):
        for _ in range(NUM_REQUESTS):
            generation = client.generate(prompt, params)
            generation.token_ids()
            chosen.append(generation.accepted.placement.prefill_worker)
            wait_until_indexed(client, chosen[-1])
    return chosen


def wait_until_indexed(client: Client, worker: str) -> None:
    deadline = time.monotonic() + 10.0
    while not {w.id: w.num_indexed_hashes for w in client.list_workers()}[worker]:
        assert time.monotonic() < deadline, "the router never heard what the worker holds"
        time.sleep(0.05)


def test_baton_policy_places_a_prompt_where_its_prefix_is_cached(pair):
    assert len(set(prefill_workers(pair, "baton"))) == 1


def test_round_robin_policy_ignores_cached_prefixes(pair):
    chosen = prefill_workers(pair, "round-robin")
    assert set(chosen[::2]).isdisjoint(chosen[1::2])
