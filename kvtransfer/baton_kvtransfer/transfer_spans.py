"""Trace spans of one transfer, on both of its sides."""

from contextlib import AbstractContextManager

from opentelemetry.trace import Span, SpanKind

from baton.serving.telemetry.stages import stage
from baton_kvtransfer.lease.handle import Handle, TransferReport
from baton_kvtransfer.transfer_service import TransferService


def transfer_span(
    service: TransferService, handle: Handle, claimant: str
) -> AbstractContextManager[Span]:
    """Returns the span `kv.transfer` or `encoder.transfer`: from the claim of a lease to its
    confirmation, which includes the wait for blocks that are still being computed."""
    told = {"baton.worker": claimant, "baton.transfer.source": handle.source_worker}
    return stage(f"{service.content}.transfer", told, kind=SpanKind.CLIENT)


def note_report(span: Span, report: TransferReport, num_held: int) -> None:
    """Sets the attributes of the completed transfer."""
    span.set_attributes(
        {
            "baton.transfer.connector": report.connector,
            "baton.transfer.num_blocks": report.num_blocks,
            "baton.transfer.num_bytes": report.num_bytes,
            "baton.transfer.num_held_blocks": num_held,
            "baton.transfer.exposed_ms": report.exposed_s * 1000,
        }
    )


def sending_span(
    service: TransferService, claimant: str, connector: str
) -> AbstractContextManager[Span]:
    """Returns the source's span `kv.send` or `encoder.send`, a child of the claimant's span."""
    told = {"baton.transfer.claimant": claimant, "baton.transfer.connector": connector}
    return stage(f"{service.content}.send", told, kind=SpanKind.SERVER)
