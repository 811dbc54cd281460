"""The trace context of a call, from hop to hop, in the headers of the W3C.

On the way in by an interceptor for the server. On the way out by `outgoing`, as the metadata of a
call: a client interceptor would stand between every message of a stream and its reader.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter

from baton.serving.interceptors import Context as CallContext
from baton.serving.interceptors import Continuation, Handler, guarded
from baton.serving.telemetry.stages import in_context, is_sampled
from baton.serving.telemetry.tracing import is_tracing

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Incoming: TypeAlias = "Iterable[tuple[str, str | bytes]]"

_SERVICES = "/baton.v1."


def outgoing() -> Metadata | None:
    """The metadata by which what a call is for is part of the present trace. None where that is not
    sampled: no process but the first one begins a trace, so there is nothing to tell the others."""
    if not is_sampled():
        return None
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return tuple(headers.items())


def incoming(metadata: Incoming) -> Context:
    """The context that a call came with; an empty one where it came without."""
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
    """Has calls of our services run in the trace that their caller is in; other calls pass."""

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
    """What a server needs for traces: nothing where this process makes none."""
    return [TraceInterceptor()] if is_tracing() else []


@asynccontextmanager
async def _in_trace(call: CallContext) -> AsyncIterator[None]:
    with in_context(incoming(call.invocation_metadata() or ())):
        yield
