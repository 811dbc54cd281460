"""A worker on a GPU whose blocks move by grpc says so once, in the bytes of its own layouts."""

import re
from types import SimpleNamespace

import pytest
import torch

from baton.v1.kv_transfer_pb2 import DescribeResponse
from baton_kvtransfer import gpu_notice
from baton_kvtransfer.gpu_notice import GpuNotice
from baton_kvtransfer.sources import Sources
from tests.support.kvtransfer.loopback import BLOCK_SIZE, HYBRID, connectors_of, pool_of

ON_GPU = [SimpleNamespace(layout=layout, device=torch.device("cuda", 0)) for layout in HYBRID]
IN_HOST_MEMORY = [pool_of(2, layout) for layout in HYBRID]


async def describe(_endpoint, _wanted):
    return DescribeResponse(epoch=7)


def sources_of(pools, connector: str) -> Sources:
    connectors = connectors_of(pools, nixl_problem="no network for it")
    return Sources(connectors, connector, describe, GpuNotice(pools, "KV"))


async def said_by(pools, connector: str, caplog) -> list[str]:
    """Returns what is logged at the start, and of two sources whose blocks come by gRPC."""
    sources = sources_of(pools, connector)
    said = [r.getMessage() for r in caplog.records if r.name == gpu_notice.__name__]
    assert bool(said) == (connector == "grpc" and pools is ON_GPU), "said at start"
    for endpoint in ("a", "b"):
        assert (await sources.transport(endpoint, 7)).connector.name == "grpc"
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
