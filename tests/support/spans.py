"""Spans of a test, kept in memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.serving.telemetry import stages


@contextmanager
def kept_spans() -> Iterator[InMemorySpanExporter]:
    """Keeps the spans of the block. OpenTelemetry has one provider of tracers for a process, which
    is set once; so Baton's tracer is replaced."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(stages, "_tracer", provider.get_tracer("baton"))
        yield exporter
    provider.shutdown()
