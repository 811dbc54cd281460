"""A cluster of two workers of each role, to be broken and made whole again."""

import contextlib
import signal
import time
from collections.abc import Iterator

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.process import Process
from baton.client.client import AsyncClient, Client
from baton.client.generation import AsyncGeneration
from baton.client.types import Worker
from baton.errors import BatonError
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.watch import load_of
from tests.support.waiting import until_observed, wait_until

# A router with it sends every prompt through a prefill worker: for tests of the handoff.
HANDOFFS = {"conditional_disaggregation": False}
DECODE_WORKERS = ("decode-0", "decode-1")
LONG = SamplingParams(max_tokens=1900, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


def restored(cluster: LocalCluster) -> LocalCluster:
    """The cluster with all its processes running and taking work in their roles."""
    for process in cluster.processes:
        process.signal(signal.SIGCONT)
        if process.is_running and _is_draining(process):
            cluster.kill(process.name)
    for process in cluster.processes:
        if not process.is_running:
            cluster.restart(process.name)
    cluster.wait_ready()
    _restore_roles(cluster)
    return cluster


def _is_draining(process: Process) -> bool:
    """Whether it drains, or has closed its port already."""
    try:
        return load_of(process.admin_endpoint).state == "draining"
    except BatonError:
        return True


def _restore_roles(cluster: LocalCluster) -> None:
    """Returns once the router knows of each change, which it reads in Redis."""
    own = {p.worker_id: p.role for p in cluster.processes if p.role != "router"}
    with Client(cluster.address, admin_address=cluster.admin_address) as client:

        def changed() -> dict[str, str]:
            return {w.id: own[w.id] for w in client.list_workers() if w.role != own[w.id]}

        for worker, role in changed().items():
            client.set_role(worker, role)
        wait_until(lambda: not changed(), what="the return of all roles")


def name_of(cluster: LocalCluster, worker_id: str) -> str:
    return next(
        p.name for p in cluster.processes if p.role != "router" and p.worker_id == worker_id
    )


def listed(cluster: LocalCluster) -> dict[str, Worker]:
    with Client(cluster.admin_address) as client:
        return {name_of(cluster, w.id): w for w in client.list_workers()}


async def streaming(client: AsyncClient, cluster: LocalCluster) -> tuple[AsyncGeneration, str]:
    """A generation that is being decoded, and the name of the process that does it."""
    generation = client.generate(prompt_of(5), LONG)
    accepted = await generation.wait_accepted()
    await anext(generation)
    await anext(generation)
    return generation, name_of(cluster, accepted.placement.decode_worker)


async def prefilling(client: AsyncClient, cluster: LocalCluster) -> tuple[AsyncGeneration, str]:
    """A generation whose prompt is being computed, and the name of the process that does it."""
    generation = client.generate(prompt_of(2000, seed=time.monotonic_ns() % 1000), SHORT)
    accepted = await generation.wait_accepted()
    name = name_of(cluster, accepted.placement.prefill_worker)
    endpoint = cluster.process(name).admin_endpoint
    await until_observed(lambda: load_of(endpoint).num_running == 1, within=2.0, what="the prefill")
    return generation, name


@contextlib.contextmanager
def stopped(cluster: LocalCluster, name: str) -> Iterator[None]:
    """A process that says nothing for the length of the block."""
    cluster.kill(name, signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.kill(name, signal.SIGCONT)
