"""A router process without workers, over a Redis of its own: it reads requests and refuses them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import psutil

from baton.cli.local.ports import HOST, free_port
from baton.cli.local.process import Process
from baton.cluster.redis.embedded import EmbeddedRedis
from tests.support.cluster.started import start


class LoneRouter:
    """A router, which may take other ports until it runs."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def endpoint(self) -> str:
        """Address of gRPC, "host:port"."""
        return self._process.endpoint

    @property
    def http_address(self) -> str:
        """Address of HTTP, "http://host:port"."""
        return self._process.http_address

    @property
    def admin_address(self) -> str:
        """Address of its admin service, "host:port"."""
        return self._process.admin_endpoint

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    def signal(self, signum: int) -> None:
        self._process.signal(signum)

    def log(self) -> str:
        """Returns what it has logged."""
        return self._process.log_path.read_text()

    def rss(self) -> int:
        """Returns its resident memory in bytes."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def cpu_seconds(self) -> float:
        """Returns the time that its threads have computed."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def channel(self) -> grpc.Channel:
        """Opens a channel to it that sends messages of any size."""
        return grpc.insecure_channel(self.endpoint, [("grpc.max_send_message_length", -1)])

    def listens(self) -> bool:
        """Returns whether gRPC answers."""
        assert self._process.is_running, self._process.failure()
        with grpc.insecure_channel(self.endpoint) as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=1.0)
            except grpc.FutureTimeoutError:
                return False
        return True


@contextmanager
def lone_router(**flags: object) -> Iterator[LoneRouter]:
    """Runs a router of these settings for the length of the block."""
    taken: set[int] = set()
    for _ in range(3):
        taken.add(free_port(taken))
    port, admin_port, http_port = taken
    with TemporaryDirectory(prefix="baton-router-") as folder, EmbeddedRedis() as redis:
        settings = {"redis_url": redis.url, "host": HOST, "model": "tiny", **flags}
        process = Process(
            "router", "router", port, settings, admin_port=admin_port, http_port=http_port
        )
        try:
            router = LoneRouter(process)
            start(process, Path(folder), router.listens)
            yield router
        finally:
            process.signal(signal.SIGKILL)
