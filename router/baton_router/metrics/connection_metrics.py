"""Metrics of the connections of clients."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from baton.serving.server import Server
from baton.serving.telemetry.families import counter, gauge


class ConnectionMetrics:
    """Prometheus collector of the connections to a router's gRPC server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        yield counter(
            "baton_dropped_connections_total",
            "gRPC connections of clients dropped since they opened, or opened and reset, too many "
            "calls a second, or were idle beyond --max-connections.",
            self._server.num_dropped_connections,
        )
        yield gauge(
            "baton_refused_addresses",
            "Addresses that may open no gRPC connection now, since more than "
            "--max-drops-per-address were dropped within a minute.",
            self._server.num_refused_addresses,
        )
