"""Who connects to whom in a running cluster, against the list that firewalls are made from."""

from urllib.parse import urlsplit

import psutil
import pytest

from baton import Client, SamplingParams
from baton.cli.local_cluster import LocalCluster
from baton.cli.ports import free_port
from baton.serving.edges import EDGES, WORKERS
from tests.support.cluster.wide import HANDOFFS
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

Found = set[tuple[str, str, str | None]]
_PATIENCE = 20.0
# NIXL over TCP takes ports of its own, which no list can have.
_FLAGS = {"num_blocks": 256, "kv_connector": "grpc"}


def connections(cluster: LocalCluster, kv_ports: dict[int, str]) -> Found:
    """(process, process, port) of every connection between processes of this cluster, and to its
    Redis, that is open now."""
    listening: dict[int, tuple[str, str | None]] = dict.fromkeys(
        [urlsplit(cluster.redis_url).port or 0], ("redis", None)
    )
    for process in cluster.processes:
        listening[process.port] = (process.role, "grpc")
        listening[process.admin_port] = (process.role, "admin")
    for port, role in kv_ports.items():
        listening[port] = (role, "kv")
    found: Found = set()
    for process in cluster.processes:
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_ESTABLISHED and connection.raddr:
                target = listening.get(connection.raddr.port)
                # The one who accepted has a known port at its own end.
                if target and connection.laddr.port not in listening:
                    found.add((process.role, *target))
    return found


def test_processes_connect_to_whom_the_list_says_and_to_nobody_else():
    listed: Found = {(e.source, e.target, e.port) for e in EDGES}
    taken: set[int] = set()
    kv_ports = {}
    for role in WORKERS:
        port = free_port(taken)
        taken.add(port)
        kv_ports[port] = role
    by_role = {role: {"kv_port": port} for port, role in kv_ports.items()}
    seen: Found = set()
    wanted = {
        *((role, "redis", None) for role in ("router", *WORKERS)),
        *(("router", role, "grpc") for role in WORKERS),
        ("decode", "prefill", "kv"),
    }
    prompt = "def common(prefix):\n    return prefix\n\n\n" * 8
    flags = {f"{role}_flags": by_role[role] for role in WORKERS}
    running = LocalCluster(worker_flags=_FLAGS, router_flags=HANDOFFS, **flags)
    with running as cluster, Client(cluster.address) as client:

        def all_seen() -> bool:
            nonlocal prompt
            prompt += client.generate(prompt, SamplingParams(max_tokens=24)).text()
            seen.update(connections(cluster, kv_ports))
            return wanted <= seen

        wait_until(all_seen, _PATIENCE, f"a connection of {wanted - seen}")
    assert seen <= listed, seen - listed
