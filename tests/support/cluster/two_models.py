"""A cluster of two models: one Redis and one router, and workers of both roles for each."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.ports import free_port
from baton.cli.local.process import Process
from baton.client.client import Client
from tests.support.waiting import wait_until

WORKER_FLAGS: dict[str, Any] = {"num_blocks": 64, "drain_timeout_s": 5.0}


class TwoModels:
    """Two models behind one router.

    Attributes:
        cluster: the router, Redis, and the workers of the first model.
        others: the workers of the second model.
    """

    def __init__(self, cluster: LocalCluster, others: list[Process]) -> None:
        self.cluster = cluster
        self.others = others

    def num_ready(self, model: str) -> int:
        """Workers of a model that take requests, as the router sees them."""
        with Client(self.cluster.admin_address) as client:
            listed = client.list_workers()
        return sum(one.state == "ready" and one.model == model for one in listed)


@contextmanager
def two_models(
    first: str, second: str, folder: Path, **router_flags: object
) -> Iterator[TwoModels]:
    """Runs a prefill and a decode worker of each of two models, given as NAME=CHECKPOINT."""
    with LocalCluster(
        model=first,
        router_flags={"model": f"{first},{second}", **router_flags},
        worker_flags=WORKER_FLAGS,
        http_port=0,
    ) as cluster:
        taken: set[int] = set()
        others = []
        for role in ("prefill", "decode"):
            ports = [free_port(taken) for _ in range(2)]
            taken |= set(ports)
            flags = {"redis_url": cluster.redis_url, "model": second, **WORKER_FLAGS}
            name = f"other-{role}"
            others.append(
                Process(name, role, ports[0], {**flags, "worker_id": name}, admin_port=ports[1])
            )
        running = TwoModels(cluster, others)
        try:
            for process in others:
                process.start(folder)
            name = second.partition("=")[0]
            wait_until(lambda: running.num_ready(name) == 2, within=60.0, what="the other model")
            yield running
        finally:
            for process in others:
                process.signal(9)
