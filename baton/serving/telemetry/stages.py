"""Stages of a request, as spans of its trace. They cost nothing outside a sampled trace.

Independent of the exporter.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from baton.errors import InvalidArgumentError
from baton.serving.grpc.errors import status_of

Attributes = Mapping[str, AttributeValue]

_tracer = trace.get_tracer("baton")
_NOT_TRACED: AbstractContextManager[Span] = nullcontext(trace.INVALID_SPAN)
_is_sampled: ContextVar[bool] = ContextVar("baton_is_sampled", default=False)
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


def is_sampled() -> bool:
    """Returns whether the current code runs in a sampled trace."""
    return _is_sampled.get()


@contextmanager
def in_context(context: Context) -> Iterator[None]:
    """Runs the block in the trace of `context`, which came from another process."""
    attached = otel_context.attach(context)
    caller = trace.get_current_span(context).get_span_context()
    sampled = _is_sampled.set(caller.trace_flags.sampled)
    try:
        yield
    finally:
        _is_sampled.reset(sampled)
        otel_context.detach(attached)


def stage(
    name: str,
    attributes: Attributes | None = None,
    links: tuple[Link, ...] = (),
    kind: SpanKind = SpanKind.INTERNAL,
) -> AbstractContextManager[Span]:
    """Opens a span for the block, if the current trace is sampled. The span records what the block
    raises, but never the text of a request. `kind`: CLIENT for a call to another process, SERVER
    for its other side; service maps draw an edge for each such pair of parent and child."""
    return _stage(name, attributes, links, kind) if is_sampled() else _NOT_TRACED


def stage_of_call(name: str) -> AbstractContextManager[Span]:
    """Opens the span of an incoming call, and a trace if the call came without one. Sampling is
    decided here; an unsampled call has no spans below this one."""
    return _stage(name, None, (), SpanKind.SERVER)


def past_stage(
    name: str,
    began: float,
    ended: float,
    attributes: Attributes | None = None,
    error: BaseException | None = None,
    context: Context | None = None,
) -> None:
    """Records a finished span of the current trace, or of `context`. `began` and `ended` are
    moments of `time.monotonic`, which on Linux is the clock of `time.perf_counter`."""
    span = begun_stage(name, began, attributes, context)
    if error is not None:
        failed(span, error)
    span.end(wall_ns(ended))


def begun_stage(
    name: str,
    began: float,
    attributes: Attributes | None = None,
    context: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Span:
    """Starts a span at a moment of `time.monotonic`; the caller ends it at `wall_ns` of a later
    one."""
    return _tracer.start_span(name, context, kind, attributes, start_time=wall_ns(began))


def wall_ns(moment: float) -> int:
    """Returns a moment of `time.monotonic` in nanoseconds since 1970."""
    return time.time_ns() - int((time.monotonic() - moment) * 1e9)


def failed(span: Span, error: BaseException) -> None:
    """Records the error that ended a span. A cancellation is no failure; an invalid request is
    described by the name of its field alone, since the value is the user's."""
    if not span.is_recording():
        return
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        span.set_attribute("error.type", "CANCELLED")
        return
    status = status_of(error)
    description = error.field if isinstance(error, InvalidArgumentError) else status.message
    span.set_attribute("error.type", _CODES[status.code])
    span.set_status(Status(StatusCode.ERROR, description))


@contextmanager
def _stage(
    name: str,
    attributes: Attributes | None,
    links: tuple[Link, ...],
    kind: SpanKind,
) -> Iterator[Span]:
    span = _tracer.start_span(name, kind=kind, attributes=attributes, links=links)
    was_sampled = _is_sampled.get()
    _is_sampled.set(span.is_recording())
    try:
        if not span.is_recording():
            yield span
            return
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield span
    except BaseException as error:
        failed(span, error)
        raise
    finally:
        span.end()
        _is_sampled.set(was_sampled)  # a token would be valid in one task alone
