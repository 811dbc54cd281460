"""A worker on a GPU whose blocks move by grpc says so once, in the bytes of its own layouts."""

import re
from types import SimpleNamespace

import pytest
import torch

from baton_kvtransfer import gpu_notice
from baton_kvtransfer.connector import GRPC
from baton_kvtransfer.connectors.nixl.claimant import NixlReader
from baton_kvtransfer.offers import Description
from baton_kvtransfer.sources import Sources
from tests.support.kvtransfer.loopback import BLOCK_SIZE, HYBRID, pool_of

ON_GPU = [SimpleNamespace(layout=layout, device=torch.device("cuda", 0)) for layout in HYBRID]
IN_HOST_MEMORY = [pool_of(2, layout) for layout in HYBRID]


async def describe(_endpoint, _wanted):
    return Description(7, "its pools are not in shared memory", "nixl is not installed there")


def sources_of(pools, connector: str) -> Sources:
    return Sources(pools, connector, describe, NixlReader(()), nixl_problem="no network for it")


async def said_by(pools, connector: str, caplog) -> list[str]:
    """Returns what is logged at the start, and of two sources whose blocks come by gRPC."""
    sources = sources_of(pools, connector)
    said = [r.getMessage() for r in caplog.records if r.name == gpu_notice.__name__]
    assert bool(said) == (connector == "grpc" and pools is ON_GPU), "said at start"
    for endpoint in ("a", "b"):
        assert (await sources.transport(endpoint, 7)).connector is GRPC
    sources.close()
    return [r.getMessage() for r in caplog.records if r.name == gpu_notice.__name__]


@pytest.mark.parametrize(
    ("connector", "reason"),
    [
        ("grpc", r"grpc \(no other is allowed here\)"),
        ("auto", r"grpc \(not by cuda-ipc: .* not by nixl: "),
    ],
)
async def test_worker_on_gpu_says_once_that_grpc_moves_its_kv(connector, reason, caplog):
    (said,) = await said_by(ON_GPU, connector, caplog)
    megabytes = 1000 * sum(layout.block_bytes for layout in HYBRID) / BLOCK_SIZE / 1e6
    assert re.match(f"KV of this GPU moves by {reason}", said)
    assert f"1000 tokens are up to {megabytes:.1f} MB" in said
    assert "Install nixl" in said


async def test_worker_in_host_memory_says_nothing_of_grpc(caplog):
    for connector in ("grpc", "auto"):
        assert await said_by(IN_HOST_MEMORY, connector, caplog) == []
