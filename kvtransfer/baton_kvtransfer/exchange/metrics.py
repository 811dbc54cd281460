"""Metrics of an exchange of a worker, collected when scraped."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from baton.serving.telemetry.families import counter, gauge, histogram
from baton_kvtransfer.lease.table import LeaseTable
from baton_kvtransfer.meter import REASONS, TransferMeter
from baton_kvtransfer.transfer_service import KV, TransferService


def exchange_metrics(
    service: TransferService, role: str, leases: LeaseTable, transfers: TransferMeter
) -> Iterable[Metric]:
    """Yields the metric families of a worker's leases on blocks of one content, and of its fetches
    of such blocks from other workers."""
    noun = service.noun
    lease = "lease" if service is KV else f"{service.content}_lease"
    transfer = f"baton_{service.content}_transfer"
    yield gauge(
        f"baton_{lease}s",
        f"Open leases, on {noun} that other workers are to fetch from this one.",
        {(role,): len(leases)},
        ("role",),
    )
    yield gauge(
        f"baton_oldest_{lease}_age_seconds",
        f"Age of the oldest open lease on {noun}; 0 if there is none.",
        {(role,): leases.oldest_age},
        ("role",),
    )
    yield histogram(
        f"{transfer}_seconds",
        f"Time of a transfer of {noun} from the claim to the confirmation, with the wait for "
        "blocks that are yet to be computed.",
        transfers.seconds.by_labels,
        ("connector",),
    )
    yield histogram(
        f"{transfer}_exposed_seconds",
        f"Exposed time of a transfer of {noun}: the part after the last block was computed.",
        transfers.exposed.by_labels,
        ("connector",),
    )
    yield counter(
        f"{transfer}_bytes_total",
        f"Bytes of {noun} fetched from other workers.",
        {(connector,): n for connector, n in transfers.num_bytes.items()},
        ("connector",),
    )
    yield counter(
        f"{transfer}_blocks_total",
        f"Blocks of {noun} fetched from other workers.",
        {(connector,): n for connector, n in transfers.num_blocks.items()},
        ("connector",),
    )
    yield counter(
        f"{transfer}_failures_total",
        f"Failed transfers of {noun}: lease over or not opened, data damaged or late, workers that "
        "cannot pair, source lost, or request cancelled (cancelled).",
        {(reason,): transfers.num_failures[reason] for reason in REASONS},
        ("reason",),
    )
