"""Trace exporter of a process, as the standard `OTEL_*` variables configure it.

Off unless one of them names an exporter or an endpoint. What is sampled, how spans are batched and
which headers go with them the SDK reads from its variables itself. Spans wait in a queue that is
bounded; beyond, they are dropped: nothing that serves ever waits for whoever collects them.

Knows nothing of what spans tell.
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

# The last spans of a process may take so many seconds to be delivered; then they are given up.
FLUSH_SECONDS = 2.0

_EXPORTER = "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

logger = logging.getLogger(__name__)


def exporter_wanted() -> str:
    """ "otlp", "console" or whatever else is asked for; empty: no spans are to be made."""
    if _variable("OTEL_SDK_DISABLED").lower() == "true":
        return ""
    wanted = _variable(_EXPORTER)
    if wanted:
        return "" if wanted == "none" else wanted
    return "otlp" if any(map(_variable, _ENDPOINTS)) else ""


def is_tracing() -> bool:
    """Whether spans are made in this process."""
    return exporter_wanted() != ""


@contextmanager
def tracing(role: str) -> Iterator[None]:
    """The process makes spans and delivers them, if it was told to, for the length of the block.

    To be entered once, in the process itself and not in one that it is forked from: the thread that
    delivers and the connection to the collector do not survive a fork.
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
    """None where there is none to be had, of which it warns: that is no reason not to serve."""
    # Loaded where spans are made only: it takes a tenth of a second and some megabytes.
    if wanted == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if wanted not in ("", "otlp"):
        logger.warning("%s is %r; it may be otlp, console or none: no traces", _EXPORTER, wanted)
    if wanted != "otlp":
        return None
    protocol = next(filter(None, map(_variable, _PROTOCOLS)), "grpc")
    if protocol != "grpc":
        logger.warning("%s is %r; traces go by grpc only: no traces", _PROTOCOLS[1], protocol)
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
    """Delivers what is left, and gives up what nobody takes in time."""
    closing = threading.Thread(target=provider.shutdown, name="traces", daemon=True)
    closing.start()
    closing.join(FLUSH_SECONDS)
    if closing.is_alive():
        logger.warning("the collector took too long: the last spans are lost")
        exporter.shutdown()  # ends the call that is in flight
        closing.join(FLUSH_SECONDS)


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()
