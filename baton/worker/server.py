"""Server of a worker in any role: its ports, its metrics and the calls in flight.

Listens before the model is loaded. Independent of services, model, role and Redis.
"""

from contextlib import AsyncExitStack

from baton.serving.bounds import Bounds
from baton.serving.grpc.large_messages import LargeMessages
from baton.serving.grpc.large_requests import LargeRequests
from baton.serving.server import Server
from baton.serving.telemetry.exposition import Exposition
from baton.serving.telemetry.serving import serve_metrics
from baton.worker.settings import WorkerSettings

# Of each field of a message that is large for its images: no prompt is longer.
_MAX_ELEMENTS = 2**20


class WorkerServer:
    """Server of one worker. Before `start`, services are added to `main` and `kv`, and collectors
    of metrics to `exposition`.

    Attributes:
        main: gRPC server of requests and administration.
        kv: gRPC server of blocks, with limits of its own; `main` unless `kv_port` is set.
        exposition: the worker's metrics.
        metrics_endpoint: "host:port" of the metrics, after `start`; empty if they are turned off.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        # A message is larger than others may be for its images alone; the rest of it is bounded.
        self._large_requests = LargeRequests()
        bounds = Bounds(max_elements=_MAX_ELEMENTS, max_bytes=settings.max_encoder_input_bytes)
        self.main = Server(
            settings,
            large=LargeMessages(self._large_requests, bounds, settings.server.max_message_bytes),
            max_message_bytes=settings.server.max_message_bytes + settings.max_encoder_input_bytes,
        )
        self.kv = self.main
        if settings.kv_port is not None:
            apart = {"port": settings.kv_port, "max_message_bytes": settings.kv_max_message_bytes}
            self.kv = Server(settings.model_copy(update=apart))
        self._servers = tuple(dict.fromkeys((self.main, self.kv)))
        self.exposition = Exposition()
        self.metrics_endpoint = ""

    @property
    def num_calls(self) -> int:
        """Calls in flight, except health, reflection and administration."""
        return sum(server.num_calls for server in self._servers)

    async def wait_idle(self) -> None:
        """Waits until no call is in flight."""
        while self.num_calls:
            for server in self._servers:
                await server.wait_idle()

    async def start(self, stack: AsyncExitStack) -> None:
        """Listens on all ports. Closing `stack` closes them."""
        self.metrics_endpoint = await serve_metrics(
            self._settings, self.exposition, self.main, stack
        )
        for server in self._servers:
            await server.start()
            stack.push_async_callback(server.stop)
        stack.callback(self._large_requests.close)
