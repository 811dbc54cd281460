"""Another worker of a running cluster, with settings of its own."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.ports import free_port
from baton.cli.local.process import Process, Role
from baton.client.client import Client
from tests.support.cluster.started import start
from tests.support.waiting import wait_until


@contextmanager
def worker_beside(cluster: LocalCluster, role: Role, **flags: object) -> Iterator[Process]:
    """Runs another worker for the length of the block, in which the router gives it work."""
    port = free_port(set())
    settings = {"redis_url": cluster.redis_url, "model": "tiny", "drain_timeout_s": 1.0, **flags}
    worker = Process(f"{role}-beside", role, port, settings, admin_port=free_port({port}))
    with (
        TemporaryDirectory(prefix="baton-worker-") as folder,
        Client(cluster.address, admin_address=cluster.admin_address) as client,
    ):

        def states() -> list[str]:
            return [w.state for w in client.list_workers() if w.id == worker.worker_id]

        try:
            start(worker, Path(folder), lambda: states() == ["ready"])
            yield worker
        finally:
            worker.signal(signal.SIGTERM)
            wait_until(lambda: not states(), what=f"the end of {worker.name}")
            worker.signal(signal.SIGKILL)
