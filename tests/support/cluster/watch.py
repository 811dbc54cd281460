"""Looking at a running cluster from outside, patiently."""

import asyncio
import time

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Client
from baton.client.types import Load
from baton.errors import UnavailableError


def load_of(endpoint: str) -> Load:
    with Client(endpoint, timeout=5.0) as client:
        return client.get_load()


def loads(cluster: LocalCluster) -> dict[str, Load]:
    """Returns the load of every running process, by name. One that stops may end meanwhile."""
    found = {}
    for process in cluster.processes:
        if process.is_running:
            try:
                found[process.name] = load_of(process.admin_endpoint)
            except UnavailableError:
                if not process.wait(time.monotonic() + 5.0):
                    raise
    return found


def held(cluster: LocalCluster) -> dict[str, str]:
    """Returns what each process holds, by name; empty if none holds anything."""
    found = {}
    for name, load in loads(cluster).items():
        counts = {
            "running": load.num_running,
            "waiting": load.num_waiting,
            "blocks": load.num_held_blocks,
            "leases": load.num_leases,
            "promised": load.num_promised_blocks,
        }
        if any(counts.values()):
            found[name] = str({k: v for k, v in counts.items() if v})
    return found


async def until_nothing_is_held(cluster: LocalCluster, within: float = 1.0) -> None:
    """The invariant: all is back within a second. A look at every process is not instant, so the
    last one may begin before the second is over."""
    deadline = time.monotonic() + within
    while True:
        began = time.monotonic()
        found = await asyncio.to_thread(held, cluster)
        if not found:
            return
        assert began < deadline, f"still held after {within} s: {found}"


def num_steps(cluster: LocalCluster) -> dict[str, int]:
    return {n: load.num_steps for n, load in loads(cluster).items() if n != "router"}
