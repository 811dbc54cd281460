"""Reference of the metrics, from the collectors of router and workers."""

from collections.abc import Iterable
from unittest.mock import MagicMock

from prometheus_client.core import Metric

from baton.worker.metrics import WorkerMetrics
from baton_decode_worker.service import DecodeService
from baton_kvtransfer.exchange.metrics import exchange_metrics
from baton_kvtransfer.transfer_service import ENCODER, KV
from baton_picker.metrics import PickerMetrics
from baton_router.apis.edge.body.unknown_fields import UnknownFields
from baton_router.apis.edge.metrics import HttpMetrics
from baton_router.metrics.connection_metrics import ConnectionMetrics
from baton_router.metrics.image_metrics import ImageMetrics
from baton_router.metrics.router_metrics import RouterMetrics
from baton_router.metrics.tenant_metrics import TenantMetrics
from baton_router.telemetry.tenant_meter import TenantMeter
from docs.tables import code, page, prose, table

_INTRODUCTION = """```
baton router --metrics-port 9464
curl -s http://127.0.0.1:9464/metrics | grep baton_requests
```

Every process serves its metrics at `/metrics`, on any free port unless `--metrics-port` is set, in
the format of Prometheus. [Telemetry](../telemetry.md) has their units, and says how to scrape and
watch them. Besides, every process on Linux serves the `process_*` metrics of prometheus_client:
memory, CPU time, start time and open files.

A histogram has the samples `_bucket`, `_sum` and `_count`."""


def families() -> dict[str, list[Metric]]:
    """Returns the metrics of each process and those that router and worker share, by title."""
    router = [
        *RouterMetrics(*(MagicMock() for _ in range(4))).collect(),
        *TenantMetrics(TenantMeter()).collect(),
        *ConnectionMetrics(MagicMock()).collect(),
        *HttpMetrics(UnknownFields()).collect(),
        *ImageMetrics(MagicMock(), {}).collect(),
    ]
    worker = [
        *WorkerMetrics(MagicMock(), MagicMock()).collect(),
        *exchange_metrics(KV, "", MagicMock(), MagicMock()),
        *exchange_metrics(ENCODER, "", MagicMock(), MagicMock()),
        *DecodeService.collect(MagicMock()),
    ]
    picker = list(PickerMetrics(MagicMock(), MagicMock(), MagicMock()).collect())
    both = {metric.name for metric in router} & {metric.name for metric in worker}
    return {
        "Router": [metric for metric in router if metric.name not in both],
        "Endpoint picker": picker,
        "Workers": [metric for metric in worker if metric.name not in both],
        "Router and workers": [metric for metric in router if metric.name in both],
    }


def name_of(metric: Metric) -> str:
    """Returns the name as it is exposed: a counter's ends in `_total`."""
    return f"{metric.name}_total" if metric.type == "counter" else str(metric.name)


def labels_of(metric: Metric) -> tuple[str, ...]:
    """Returns the names of the labels."""
    return tuple(vars(metric)["_labelnames"])


def metrics() -> str:
    """Returns the page of all metrics."""
    parts = [f"## {title}\n\n{_table(of)}" for title, of in families().items()]
    return page("Metrics", _INTRODUCTION, *parts)


def _table(metrics: Iterable[Metric]) -> str:
    rows = [
        (
            code(name_of(metric)),
            metric.type,
            ", ".join(map(code, labels_of(metric))),
            prose(metric.documentation),
        )
        for metric in metrics
    ]
    return table(("metric", "type", "labels", "meaning"), rows)
