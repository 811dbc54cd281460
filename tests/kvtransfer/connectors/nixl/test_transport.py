"""Transport that NIXL reads by: found by a read, printed by UCX, required to be RDMA."""

import subprocess
import sys

import psutil
import pytest

from baton.errors import FailedPreconditionError, UnavailableError
from baton_kvtransfer.connectors.nixl.transport import (
    NixlTransport,
    check_rdma,
    find_transport,
    read_lanes,
)
from tests.support.repository import ROOT

# As UCX 1.23 prints it, but for the devices.
TABLES = """
[1.0] [vm:1 :0]   | reader inter-node cfg#1                                          |
[1.0] [vm:1 :0]   | remote memory write by ucp_put* from host memory to host         |
[1.0] [vm:1 :0]   | Range  | Description |              Config                       |
[1.0] [vm:1 :0]   | 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0         |
[1.0] [vm:1 :0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [vm:1 :0]   | Range     | Description     |              Config                |
[1.0] [vm:1 :0]   | 0..64     | software emulation | tcp/eth0                        |
[1.0] [vm:1 :0]   | 65..inf   | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |
"""


def test_lanes_are_those_of_the_largest_reads():
    lanes = (("rc_mlx5", "mlx5_0:1"), ("rc_mlx5", "mlx5_1:1"))
    assert read_lanes(TABLES) == lanes
    assert str(NixlTransport(lanes)) == "RDMA (rc_mlx5/mlx5_0:1, rc_mlx5/mlx5_1:1)"
    assert read_lanes("") == ()


@pytest.mark.parametrize(
    ("lanes", "is_rdma"),
    [
        ((("rc_mlx5", "mlx5_0:1"),), True),
        ((("dc_mlx5", "mlx5_0:1"), ("ud_verbs", "efa_0:1")), True),
        ((("tcp", "eth0"),), False),
        ((("rc_verbs", "mlx5_0:1"), ("tcp", "eth0")), False),
    ],
)
def test_rdma_is_required_of_all_lanes(lanes, is_rdma):
    transport = NixlTransport(lanes)
    assert transport.is_rdma == is_rdma
    if is_rdma:
        check_rdma(transport)
    else:
        with pytest.raises(FailedPreconditionError, match=r"expected RDMA.*--nixl-devices"):
            check_rdma(transport)


@pytest.mark.parametrize("transports", [None, "tcp,sm", "^rc"])
def test_transport_of_loopback_is_found_to_be_tcp(transports, monkeypatch):
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)
    assert str(find_transport("lo")) == "TCP (tcp/lo)"


@pytest.mark.parametrize(
    ("devices", "transports"), [("mlx5_9:1", "all"), ("lo", "sm,self"), ("lo", "rc")]
)
def test_missing_transport_is_named_by_ucx(devices, transports, monkeypatch):
    monkeypatch.setenv("UCX_TLS", transports)
    with pytest.raises(UnavailableError, match="no transport to other hosts: no usable transports"):
        find_transport(devices)


AGENT = """
from baton.engine.executor.cache.kv_pool import KvPool
from baton_kvtransfer.connectors.nixl.agent import Agent
from tests.support.kvtransfer.loopback import pool_of
agent = Agent([pool_of(4)], "lo", is_read=True)
print("started", flush=True)
input()
"""


@pytest.mark.slow
def test_agent_on_loopback_listens_nowhere_else():
    command = [sys.executable, "-c", AGENT]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        sockets = psutil.Process(process.pid).net_connections("tcp")
        process.communicate("\n", timeout=30)
    addresses = {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
    assert addresses == {"127.0.0.1"}


@pytest.mark.e2e
@pytest.mark.slow
def test_worker_says_transport_and_refuses_tcp_before_it_loads():
    command = [sys.executable, "-m", "baton", "decode-worker", "--kv-connector", "nixl"]
    command += ["--require-rdma", "--device", "cpu", "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    print(done.stderr)
    assert done.returncode == 1
    assert '"nixl reads from other hosts over TCP (tcp/lo)"' in done.stderr
    assert "decode: nixl reads from other hosts over TCP (tcp/lo); expected RDMA" in done.stderr
    assert "loading" not in done.stderr
