"""A second router over the workers of a running cluster, with settings of its own."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.ports import free_port
from baton.cli.local.process import Process
from baton.cli.local.tls_folder import TlsFolder
from baton.client.client import Client
from baton.errors import BatonError
from tests.support.cluster.started import start


class SecondRouter:
    """A cluster as its clients see it through this router: the attributes of `LocalCluster` that
    tests read."""

    def __init__(self, cluster: LocalCluster, router: Process) -> None:
        self._cluster = cluster
        self.router = router

    @property
    def tls(self) -> TlsFolder | None:
        return self._cluster.tls

    @property
    def address(self) -> str:
        return self.router.endpoint

    @property
    def admin_address(self) -> str:
        return self.router.admin_endpoint

    @property
    def http_address(self) -> str:
        return self.router.http_address

    @property
    def metrics_endpoints(self) -> dict[str, str]:
        return {p.name: p.metrics_endpoint for p in self.processes if p.metrics_endpoint}

    @property
    def processes(self) -> list[Process]:
        workers = [p for p in self._cluster.processes if p.role != "router"]
        return [self.router, *workers]

    def log(self) -> str:
        """Returns the text of the router's log."""
        return self.router.log_path.read_text()

    def process(self, name: str) -> Process:
        return next(process for process in self.processes if process.name == name)

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        self.process(name).signal(signum)

    def is_ready(self) -> bool:
        """Whether it says so, and would give work to every worker that runs."""
        running = {p.worker_id for p in self.processes if p.role != "router" and p.is_running}
        try:
            with Client(self.admin_address, timeout=2.0, tls=self.router.tls) as client:
                known = {w.id for w in client.list_workers() if w.state == "ready"}
                return running <= known and client.get_load().state == "ready"
        except BatonError:
            assert self.router.is_running, self.router.failure()
            return False


@contextmanager
def second_router(
    cluster: LocalCluster, *, http: bool = False, **flags: object
) -> Iterator[SecondRouter]:
    """Runs another router of these settings for the length of the block."""
    taken: set[int] = set()
    ports = []
    for _ in range(4):
        ports.append(free_port(taken))
        taken.add(ports[-1])
    settings = {
        "redis_url": cluster.redis_url,
        "model": "tiny",
        "drain_timeout_s": 5.0,
        **flags,
    }
    router = Process(
        "router",
        "router",
        ports[0],
        settings,
        admin_port=ports[1],
        metrics_port=ports[2],
        http_port=ports[3] if http else None,
        tls=cluster.tls,
    )
    with TemporaryDirectory(prefix="baton-router-") as folder:
        try:
            view = SecondRouter(cluster, router)
            start(router, Path(folder), view.is_ready)
            yield view
        finally:
            router.signal(signal.SIGKILL)
