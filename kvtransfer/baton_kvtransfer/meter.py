"""Transfer metrics of a claimant: bytes, durations, and failures by reason."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import grpc

from baton.errors import (
    BatonError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    LeaseNotOpenedError,
    NotFoundError,
    UnavailableError,
)
from baton.rpc.errors import error_of, is_loss
from baton.serving.telemetry import buckets
from baton.serving.telemetry.distribution import Distributions
from baton_kvtransfer.lease.handle import TransferReport

Reason = Literal[
    "lease_over", "not_opened", "damaged", "late", "unpaired", "source_lost", "cancelled", "other"
]

REASONS: tuple[Reason, ...] = Reason.__args__  # type: ignore[attr-defined]

_REASONS: dict[type[BaseException], Reason] = {
    LeaseNotOpenedError: "not_opened",
    NotFoundError: "lease_over",
    DataLossError: "damaged",
    DeadlineExceededError: "late",
    FailedPreconditionError: "unpaired",
    UnavailableError: "source_lost",
}


class Transfer:
    """One fetch. `report` is set after all of its blocks are confirmed."""

    report: TransferReport | None = None


class TransferMeter:
    """Transfer counters of one claimant, since its start.

    Attributes:
        seconds: seconds from the request for the blocks to their confirmation, by connector.
        exposed: the part of these seconds after the last block was computed, by connector.
        num_bytes, num_blocks: bytes and blocks fetched and confirmed, by connector.
        num_failures: failed transfers by reason.
    """

    def __init__(self, fallback: str) -> None:
        """`fallback`: connector that all workers have, which is counted from the start."""
        self.seconds = Distributions(buckets.STAGE)
        self.exposed = Distributions(buckets.STAGE)
        self.num_bytes = Counter({fallback: 0})
        self.num_blocks = Counter({fallback: 0})
        self.num_failures: Counter[Reason] = Counter()
        for distributions in (self.seconds, self.exposed):
            distributions.at(fallback)

    @property
    def num_done(self) -> int:
        """Number of confirmed transfers."""
        return sum(sum(one.counts) for one in self.seconds.by_labels.values())

    @contextmanager
    def transfer(self) -> Iterator[Transfer]:
        """Counts the `with` block as one fetch, which has failed if the block raises."""
        began, transfer = time.monotonic(), Transfer()
        try:
            yield transfer
        except BaseException as error:
            self.num_failures[reason_of(error)] += 1
            raise
        if transfer.report is not None:
            self._count(transfer.report, time.monotonic() - began)

    def _count(self, report: TransferReport, seconds: float) -> None:
        connector = report.connector
        self.seconds.at(connector).observe(seconds)
        self.exposed.at(connector).observe(report.exposed_s)
        self.num_bytes[connector] += report.num_bytes
        self.num_blocks[connector] += report.num_blocks


def reason_of(error: BaseException) -> Reason:
    """Returns the reason for which a fetch failed, as a metric label."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, grpc.aio.AioRpcError):
        if is_loss(error):
            return "source_lost"
        error = error_of(error)
    if not isinstance(error, BatonError):
        return "other"
    return next((_REASONS[kind] for kind in type(error).__mro__ if kind in _REASONS), "other")
