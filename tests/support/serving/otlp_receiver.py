"""A collector of traces: OpenTelemetry's own service, on a real socket."""

import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class ReceivedSpan:
    """A span or an event or a link, as it was received. Moments are in seconds since 1970."""

    name: str
    service: str = ""
    version: str = ""
    trace_id: str = ""
    span_id: str = ""
    parent_id: str = ""
    kind: str = ""
    start: float = 0.0
    end: float = 0.0
    has_failed: bool = False
    reason: str = ""
    attributes: tuple[tuple[str, Any], ...] = ()
    events: tuple["ReceivedSpan", ...] = ()
    links: tuple["ReceivedSpan", ...] = ()

    def __getitem__(self, key: str) -> Any:
        return dict(self.attributes)[key]

    def get(self, key: str) -> Any:
        return dict(self.attributes).get(key)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def event_names(self) -> list[str]:
        return [event.name for event in self.events]


class Collector(pb_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request: Any, _context: Any) -> pb.ExportTraceServiceResponse:  # noqa: N802
        for of_process in request.resource_spans:
            told = dict(_attributes(of_process.resource.attributes))
            who = told["service.name"], told.get("service.version", "")
            for of_scope in of_process.scope_spans:
                self.spans += [_received_span(span, *who) for span in of_scope.spans]
        return pb.ExportTraceServiceResponse()

    def trace_of(
        self, request_id: str, *expected: str, is_whole: bool = False, within: float = 10.0
    ) -> list[ReceivedSpan]:
        """The spans of a request in order, once all those `expected` by name are there; a name that
        is given twice, two of them. `is_whole`: and the parents of all of them, which end later and
        may come later; those of a killed process never do."""
        deadline = time.monotonic() + within
        while True:
            spans = list(self.spans)
            mine = [s for s in spans if s.get("baton.request.id") == request_id]
            roots = [s for s in mine if s.name == "generate"]
            found = [s for s in spans if roots and s.trace_id == roots[0].trace_id]
            missing = list((Counter(expected) - Counter(s.name for s in found)).elements())
            if is_whole:
                ids = {s.span_id for s in found}
                orphans = [s for s in found if s not in roots and s.parent_id not in ids]
                missing += [f"parent of {s.name}" for s in orphans]
            if roots and not missing:
                return sorted(found, key=lambda s: s.start)
            assert time.monotonic() < deadline, f"{missing} of {request_id} are missing: {found}"
            time.sleep(0.02)


@contextmanager
def collecting(collector: Collector | None = None) -> Iterator[Collector]:
    """A collector that listens for the length of the block."""
    collector = collector or Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


class FullCollector(Collector):
    """Takes nothing, and says so."""

    def Export(self, _request: Any, context: Any) -> Any:  # noqa: N802
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


class DeafCollector(Collector):
    """Collector that never answers while an exporter waits."""

    def Export(self, _request: Any, context: Any) -> Any:  # noqa: N802
        while context.is_active():
            time.sleep(0.01)


@contextmanager
def silence() -> Iterator[str]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def collector_that(how: str) -> Iterator[str]:
    if how == "says nothing":
        with silence() as endpoint:
            yield endpoint
    elif how == "is not there":
        with silence() as endpoint:
            pass
        yield endpoint
    elif how == "has no address":
        yield "http://absent.invalid:4317"
    else:
        kinds = {"is full": FullCollector, "hangs": DeafCollector, "listens": Collector}
        with collecting(kinds[how]()) as running:
            yield running.endpoint


def _received_span(span: Any, service: str, version: str) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        service=service,
        version=version,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        has_failed=span.status.code == 2,
        reason=span.status.message,
        attributes=_attributes(span.attributes),
        events=tuple(
            ReceivedSpan(e.name, start=e.time_unix_nano / 1e9, attributes=_attributes(e.attributes))
            for e in span.events
        ),
        links=tuple(
            ReceivedSpan("link", span_id=x.span_id.hex(), attributes=_attributes(x.attributes))
            for x in span.links
        ),
    )


def _attributes(pairs: "list[KeyValue]") -> tuple[tuple[str, Any], ...]:
    return tuple((pair.key, _value(pair.value)) for pair in pairs)


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)
