"""Prometheus metrics of the HTTP API, collected on scrape from counters that exist anyway."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from baton.serving.telemetry.families import counter
from baton_router.apis.edge.body.unknown_fields import UnknownFields


class HttpMetrics:
    """Prometheus collector of the HTTP API."""

    def __init__(self, unknown: UnknownFields) -> None:
        self._unknown = unknown

    def collect(self) -> Iterable[Metric]:
        yield counter(
            "baton_ignored_fields_total",
            "Unknown fields of HTTP requests that were ignored, by the names of known hints; other "
            "names share one label.",
            {(name,): number for name, number in self._unknown.num_ignored.items()},
            ("field",),
        )
