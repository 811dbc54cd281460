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
        "Open leases, on KV that other workers are to fetch from this one.",
        {(role,): len(leases)},
        ("role",),
    )
    yield gauge(
        "baton_oldest_lease_age_seconds",
        "Age of the oldest open lease; 0 if there is none.",
        {(role,): leases.oldest_age},
        ("role",),
    )
    yield histogram(
        "baton_kv_transfer_seconds",
        "KV transfer time from the claim to the confirmation, with the wait for blocks that are "
        "yet to be computed.",
        transfers.seconds.by_labels,
        ("connector",),
    )
    yield histogram(
        "baton_kv_transfer_exposed_seconds",
        "Exposed KV transfer time: the part after the last block was computed.",
        transfers.exposed.by_labels,
        ("connector",),
    )
    yield counter(
        "baton_kv_transfer_bytes_total",
        "KV bytes fetched from other workers.",
        {(connector,): n for connector, n in transfers.num_bytes.items()},
        ("connector",),
    )
    yield counter(
        "baton_kv_transfer_blocks_total",
        "KV blocks fetched from other workers.",
        {(connector,): n for connector, n in transfers.num_blocks.items()},
        ("connector",),
    )
    yield counter(
        "baton_kv_transfer_failures_total",
        "Failed KV transfers: lease over, data damaged or late, workers that cannot pair, source "
        "lost, or request cancelled (called_off).",
        {(reason,): transfers.num_failures[reason] for reason in REASONS},
        ("reason",),
    )
