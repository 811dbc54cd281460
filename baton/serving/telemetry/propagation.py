"""Trace context propagation from hop to hop, in the headers of the W3C.

A server interceptor takes it in; `outgoing` passes it on as metadata of a call, since a client
interceptor would stand between every message of a stream and its reader.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter

from baton.serving.grpc.interceptors import Context as CallContext
from baton.serving.grpc.interceptors import Continuation, Handler, guarded
from baton.serving.telemetry.stages import in_context, is_sampled
from baton.serving.telemetry.tracing import is_tracing

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Incoming: TypeAlias = "Iterable[tuple[str, str | bytes]]"

_SERVICES = "/baton.v1."


def outgoing() -> Metadata | None:
    """Returns the metadata that makes a call part of the current trace. None if that is not
    sampled: only the first process begins a trace, so the others need no metadata."""
    if not is_sampled():
        return None
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return tuple(headers.items())


def incoming(metadata: Incoming) -> Context:
    """Returns the context that a call came with; an empty one if it came without."""
    return propagate.extract(metadata, Context(), _METADATA)


class _MetadataGetter(Getter[Incoming]):
    def get(self, carrier: Incoming, key: str) -> list[str] | None:
        found = [v for k, v in carrier if k == key and isinstance(v, str)]
        return found or None

    def keys(self, carrier: Incoming) -> list[str]:
        return [key for key, _ in carrier]


_METADATA = _MetadataGetter()
_HEADERS = propagate.get_global_textmap().fields


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Server interceptor that runs calls of Baton's services in their caller's trace."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_SERVICES):
            return handler
        metadata = handler_call_details.invocation_metadata or ()
        if not any(key in _HEADERS for key, _ in metadata):
            return handler
        return guarded(handler, _in_trace)


def trace_interceptors() -> list[TraceInterceptor]:
    """Returns the trace interceptors of a server; none if this process makes no spans."""
    return [TraceInterceptor()] if is_tracing() else []


@asynccontextmanager
async def _in_trace(call: CallContext) -> AsyncIterator[None]:
    with in_context(incoming(call.invocation_metadata() or ())):
        yield
