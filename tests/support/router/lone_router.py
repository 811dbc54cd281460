"""A router process without workers, over a Redis of its own: it reads requests and refuses them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import psutil

from baton.cli.ports import HOST, free_port
from baton.cli.process import Process
from baton.cluster.embedded import EmbeddedRedis
from tests.support.waiting import wait_until


class LoneRouter:
    """A running router.

    Attributes:
        endpoint: address of gRPC, "host:port".
        http_address: address of HTTP, "http://host:port".
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self.endpoint = process.endpoint
        self.http_address = process.http_address

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
        process.start(Path(folder))
        try:
            router = LoneRouter(process)
            wait_until(router.listens, within=60.0, what="a router")
            yield router
        finally:
            process.signal(signal.SIGKILL)
