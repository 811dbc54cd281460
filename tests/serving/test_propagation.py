"""A call runs in the trace that its caller is in, and what it calls does too."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import trace

from baton.serving.logs import JsonFormatter, name_request
from baton.serving.telemetry.propagation import outgoing
from baton.serving.telemetry.stages import is_sampled, stage
from baton.v1 import inference_pb2 as pb
from tests.support.serving.fakes import chunk, serving

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (f"00-{TRACE}-{CALLER}-{flags}" for flags in ("01", "00"))


@pytest.fixture
def _tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")


async def seen(request: pb.GenerateRequest, _context: Any) -> AsyncIterator[pb.GenerateResponse]:
    """Yields what the call would say to the next one, message for message."""
    for _ in range(2):
        yield chunk(json.dumps([dict(outgoing() or ()), is_sampled()]))


async def told(running: Any, **call: Any) -> list[Any]:
    stream = running.inference.Generate(pb.GenerateRequest(), **call)
    return [json.loads(response.tokens.text) async for response in stream]


@pytest.mark.usefixtures("_tracing")
@pytest.mark.parametrize(("header", "is_seen"), [(SAMPLED, True), (UNSAMPLED, False)])
async def test_trace_of_caller_continues_through_nested_calls(header, is_seen):
    async with serving(seen) as running:
        metadata = (("traceparent", header), ("tracestate", "vendor=1"))
        passed_on = {"traceparent": header, "tracestate": "vendor=1"} if is_seen else {}
        assert await told(running, metadata=metadata) == [[passed_on, is_seen]] * 2
        assert await told(running) == [[{}, False]] * 2


@pytest.mark.usefixtures("_tracing")
@pytest.mark.parametrize(
    "header", ["", "00-0-0-0", "ff-" + SAMPLED, "00-" + "0" * 32 + SAMPLED[35:]]
)
async def test_trace_context_is_dropped_when_invalid(header):
    async with serving(seen) as running:
        assert await told(running, metadata=(("traceparent", header),)) == [[{}, False]] * 2


async def test_trace_context_is_ignored_when_tracing_is_off():
    async with serving(seen) as running:
        assert await told(running, metadata=(("traceparent", SAMPLED),)) == [[{}, False]] * 2


@pytest.mark.usefixtures("_tracing")
async def test_health_watch_works_with_tracing():
    async with serving(seen) as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        request = health_pb2.HealthCheckRequest(service="readiness")
        watch = stub.Watch(request, metadata=(("traceparent", SAMPLED),))
        answers = [(await watch.read()).status]
        await running.server.set_ready(True)
        answers.append((await watch.read()).status)
        watch.cancel()
    states = health_pb2.HealthCheckResponse
    assert answers == [states.NOT_SERVING, states.SERVING]


@pytest.mark.usefixtures("_tracing")
async def test_handler_error_is_logged_with_request_and_trace(caplog):
    lines = []

    async def fail(request: pb.GenerateRequest, _context: Any) -> AsyncIterator[Any]:
        name_request(request.request_id)
        raise RuntimeError("a bug")
        yield

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonFormatter("router").format(record)))

    logger, handler = logging.getLogger("baton.serving"), Lines()
    logger.addHandler(handler)
    try:
        async with serving(fail) as running:
            call = running.inference.Generate(
                pb.GenerateRequest(request_id="r-1"), metadata=(("traceparent", SAMPLED),)
            )
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
    finally:
        logger.removeHandler(handler)
    (line,) = lines
    assert (line["request_id"], line["trace_id"], line["level"]) == ("r-1", TRACE, "ERROR")


def test_stage_makes_no_span_outside_trace():
    with stage("tokenize") as span:
        assert span is trace.INVALID_SPAN
