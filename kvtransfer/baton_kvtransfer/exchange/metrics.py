"""Metrics of a worker's KV exchange, collected when scraped."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from baton.serving.telemetry.families import counter, gauge, histogram
from baton.worker.worker import Worker
from baton_kvtransfer.lease_table import LeaseTable
from baton_kvtransfer.meter import REASONS, TransferMeter


def exchange_metrics(
    worker: Worker, leases: LeaseTable, transfers: TransferMeter
) -> Iterable[Metric]:
    """Yields the metric families of this worker's leases and of its fetches from other workers."""
    role = worker.role
    yield gauge(
        "baton_leases",
        "Leases that are not over: what other workers are to fetch here.",
        {(role,): len(leases)},
        ("role",),
    )
    yield gauge(
        "baton_oldest_lease_age_seconds",
        "Since the oldest lease that is not over was opened; 0 where there is none.",
        {(role,): leases.oldest_age},
        ("role",),
    )
    yield histogram(
        "baton_kv_transfer_seconds",
        "From asking another worker for blocks until they are confirmed; those that are yet "
        "to be computed are waited for.",
        transfers.seconds.by_labels,
        ("connector",),
    )
    yield histogram(
        "baton_kv_transfer_exposed_seconds",
        "The part of a transfer after the last block was computed: what a request waits for.",
        transfers.exposed.by_labels,
        ("connector",),
    )
    yield counter(
        "baton_kv_transfer_bytes_total",
        "KV that has come from other workers, in bytes.",
        {(connector,): n for connector, n in transfers.num_bytes.items()},
        ("connector",),
    )
    yield counter(
        "baton_kv_transfer_blocks_total",
        "KV blocks that have come from other workers.",
        {(connector,): n for connector, n in transfers.num_blocks.items()},
        ("connector",),
    )
    yield counter(
        "baton_kv_transfer_failures_total",
        "Transfers that brought nothing, by reason: the lease was over, bytes were damaged or "
        "late, the workers may not pair, the source was lost, the request was called off.",
        {(reason,): transfers.num_failures[reason] for reason in REASONS},
        ("reason",),
    )
