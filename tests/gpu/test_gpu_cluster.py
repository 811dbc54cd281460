"""A request through a whole cluster on one GPU: router, prefill worker, decode worker and Redis."""

import asyncio
from typing import Any

import pytest

from baton.sampling import SamplingParams

# Those of a cluster that an engine does without.
PACKAGES = ("grpc_health", "msgspec", "opentelemetry", "pydantic_settings", "redis", "setproctitle")
PROMPT = tuple(range(2, 602))
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.mark.timeout(120)
@pytest.mark.gpu  # without one the tests of clusters do the same
def test_cluster_hands_kv_over_by_cuda_ipc(load: Any, record_property: Any) -> None:
    for package in PACKAGES:
        pytest.importorskip(package)
    check_handoff(load, record_property, "cuda", "cuda-ipc")


def check_handoff(load: Any, record_property: Any, device: str, connector: str) -> None:
    """Compares a request's tokens with those of one engine; records figures of its handoff."""
    from baton.cli.local.local_cluster import LocalCluster
    from baton.client.client import AsyncClient
    from baton.models import locate
    from tests.support.cluster.scraped import scrape_all, total
    from tests.support.cluster.wide import HANDOFFS

    flags = {"device": device, "num_blocks": 256, "dtype": "float32", "kv_connector": connector}

    async def generate(cluster: LocalCluster) -> list[int]:
        async with AsyncClient(cluster.address) as client:
            return await client.generate(PROMPT, PARAMS).token_ids()

    changes = {"kernels": "torch", "device": "cpu", "num_blocks": 256}
    (expected,) = load(locate("tiny"), **changes).generate([PROMPT], PARAMS)
    with LocalCluster(worker_flags=flags, router_flags=HANDOFFS) as cluster:
        assert tuple(asyncio.run(generate(cluster))) == expected.token_ids
        scraped = scrape_all(cluster)
    for name in ("baton_kv_transfer_bytes_total", "baton_kv_transfer_seconds"):
        sample = name if name.endswith("_total") else f"{name}_sum"
        figure = total(scraped, name, sample, connector=connector)
        record_property(name, figure)
        assert figure > 0
