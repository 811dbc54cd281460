"""Connections of a running cluster, against the list that firewall rules are made from."""

import asyncio
import time
from urllib.parse import urlsplit

import psutil
import pytest

from baton import AsyncClient, SamplingParams
from baton.cli.local.local_cluster import LocalCluster
from baton.cluster.keys import record_key
from baton.cluster.redis.client import connect
from baton.cluster.registry.registry import WorkerRecord
from baton.serving.network_topology import CONNECTIONS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

Found = set[tuple[str, str, str | None]]
_TIMEOUT = 20.0


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


async def kv_ports_of(cluster: LocalCluster) -> dict[int, str]:
    """Returns the port at which each worker serves its blocks, with the worker's role."""
    async with connect(cluster.redis_url) as redis:
        ports = {}
        for process in cluster.processes:
            if process.role != "router":
                fields = await redis.hgetall(record_key(process.worker_id))
                endpoint = WorkerRecord.from_fields(fields).kv_endpoint
                ports[int(endpoint.rpartition(":")[2])] = process.role
    return ports


async def test_processes_connect_only_along_the_listed_edges(secured):
    listed: Found = {(e.source, e.target, e.port) for e in CONNECTIONS}
    kv_ports = await kv_ports_of(secured)
    seen: Found = set()
    roles = {process.role for process in secured.processes}
    wanted = {
        *((role, "redis", None) for role in roles),
        *(("router", role, "grpc") for role in roles - {"router"}),
        ("decode", "prefill", "kv"),
    }
    prompt = "def common(prefix):\n    return prefix\n\n\n" * 8
    async with AsyncClient(secured.address, tls=secured.tls.to_router()) as client:
        deadline = time.monotonic() + _TIMEOUT
        while not wanted <= seen:
            assert time.monotonic() < deadline, f"no connection of {wanted - seen}"
            prompt += await client.generate(prompt, SamplingParams(max_tokens=24)).text()
            seen |= await asyncio.to_thread(connections, secured, kv_ports)
    assert seen <= listed, seen - listed
