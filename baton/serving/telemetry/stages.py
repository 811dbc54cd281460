"""Stages of a request, as spans of the trace that it is in. Free where it is in none.

Knows nothing of how spans are delivered.
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
from baton.serving.errors import status_of

Attributes = Mapping[str, AttributeValue]

_tracer = trace.get_tracer("baton")
_NOT_TRACED: AbstractContextManager[Span] = nullcontext(trace.INVALID_SPAN)
_is_sampled: ContextVar[bool] = ContextVar("baton_is_sampled", default=False)
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


def is_sampled() -> bool:
    """Whether what runs now is in a trace that somebody will see."""
    return _is_sampled.get()


@contextmanager
def in_context(context: Context) -> Iterator[None]:
    """What the block does is part of the trace of a context that has come in from elsewhere."""
    attached = otel_context.attach(context)
    caller = trace.get_current_span(context).get_span_context()
    sampled = _is_sampled.set(caller.trace_flags.sampled)
    try:
        yield
    finally:
        _is_sampled.reset(sampled)
        otel_context.detach(attached)


def stage(
    name: str, attributes: Attributes | None = None, links: tuple[Link, ...] = ()
) -> AbstractContextManager[Span]:
    """A span for the length of the block, if the present trace is sampled. What the block raises is
    told by it; never the text of a request."""
    return _stage(name, attributes, links) if is_sampled() else _NOT_TRACED


def stage_of_call(name: str) -> AbstractContextManager[Span]:
    """The same of a call that has come in, which begins a trace where it came without one. Whether
    it is sampled is decided here, and told by the span; if it is not, nothing below it is."""
    return _stage(name, None, (), SpanKind.SERVER)


def past_stage(
    name: str,
    began: float,
    ended: float,
    attributes: Attributes | None = None,
    error: BaseException | None = None,
    context: Context | None = None,
) -> None:
    """A span that is over, of the present trace or that of `context`. The moments are those of
    `time.monotonic`, which on Linux is the clock of `time.perf_counter`."""
    span = begun_stage(name, began, attributes, context)
    if error is not None:
        failed(span, error)
    span.end(wall_ns(ended))


def begun_stage(
    name: str, began: float, attributes: Attributes | None = None, context: Context | None = None
) -> Span:
    """A span that began at a moment of `time.monotonic`, and that its caller ends at `wall_ns` of
    another one."""
    return _tracer.start_span(name, context, attributes=attributes, start_time=wall_ns(began))


def wall_ns(moment: float) -> int:
    """A moment of `time.monotonic`, in nanoseconds since 1970."""
    return time.time_ns() - int((time.monotonic() - moment) * 1e9)


def failed(span: Span, error: BaseException) -> None:
    """Has a span tell what ended it. Whoever cancels has no failure, and what is wrong with a
    request is told by the name of the field alone: its value is the user's."""
    if not span.is_recording():
        return
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        span.set_attribute("error.type", "CANCELLED")
        return
    status = status_of(error)
    told = error.field if isinstance(error, InvalidArgumentError) else status.message
    span.set_attribute("error.type", _CODES[status.code])
    span.set_status(Status(StatusCode.ERROR, told))


@contextmanager
def _stage(
    name: str,
    attributes: Attributes | None,
    links: tuple[Link, ...],
    kind: SpanKind = SpanKind.INTERNAL,
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
        _is_sampled.set(was_sampled)  # a token would be of use to one task alone
