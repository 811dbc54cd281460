"""Trace exporter of a process, as the standard `OTEL_*` variables configure it.

Off unless one of them names an exporter or an endpoint. The SDK itself reads the variables for
sampling, batching and headers. Spans wait in a bounded queue and are dropped when it is full:
serving never waits for the collector.

Independent of what spans contain.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import uuid4

from opentelemetry import trace

from baton.version import version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

# Seconds in which a process may export its last spans; then they are dropped.
FLUSH_SECONDS = 2.0

_EXPORTER = "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

logger = logging.getLogger(__name__)


def exporter_wanted() -> str:
    """Returns "otlp", "console" or another exporter that is asked for; empty: make no spans."""
    if _variable("OTEL_SDK_DISABLED").lower() == "true":
        return ""
    wanted = _variable(_EXPORTER)
    if wanted:
        return "" if wanted == "none" else wanted
    return "otlp" if any(map(_variable, _ENDPOINTS)) else ""


def is_tracing() -> bool:
    """Returns whether this process makes spans."""
    return exporter_wanted() != ""


@contextmanager
def tracing(role: str) -> Iterator[None]:
    """Makes and exports spans for the length of the block, if the environment asks for it.

    Enter it once, in the process itself and not before a fork: the exporter's thread and its
    connection to the collector do not survive one.
    """
    exporter = _exporter(exporter_wanted())
    if exporter is None:
        yield
        return
    provider = _provider(role, exporter)
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        _close(provider, exporter)


def _exporter(wanted: str) -> "SpanExporter | None":
    """Returns the exporter; None, with a warning, if it cannot be had: serving continues."""
    # Imported only to make spans: it takes a tenth of a second and some megabytes.
    if wanted == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if wanted not in ("", "otlp"):
        logger.warning("%s is %r; it may be otlp, console or none: no traces", _EXPORTER, wanted)
    if wanted != "otlp":
        return None
    protocol = next(filter(None, map(_variable, _PROTOCOLS)), "grpc")
    if protocol != "grpc":
        logger.warning("%s is %r; only grpc is supported: no traces", _PROTOCOLS[1], protocol)
        return None
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    try:
        return OTLPSpanExporter()
    except (ValueError, OSError) as error:
        logger.warning("traces cannot be exported: %s", error)
        return None


def _provider(role: str, exporter: "SpanExporter") -> "TracerProvider":
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = {
        "service.name": f"baton-{role}",
        "service.namespace": "baton",
        "service.version": version(),
        "service.instance.id": uuid4().hex,
        "baton.role": role,
    }
    resource = Resource.create(own).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _close(provider: "TracerProvider", exporter: "SpanExporter") -> None:
    """Exports the last spans, and drops those that the collector does not take in time."""
    closing = threading.Thread(target=provider.shutdown, name="traces", daemon=True)
    closing.start()
    closing.join(FLUSH_SECONDS)
    if closing.is_alive():
        logger.warning("the collector took too long: the last spans are lost")
        exporter.shutdown()  # ends the call that is in flight
        closing.join(FLUSH_SECONDS)


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()
