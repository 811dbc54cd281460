"""gRPC interceptors around every call: errors become statuses, and calls in flight are counted.

Every handler is wrapped as a coroutine that writes its responses, so that a generator is closed in
its own task as soon as its call ends. Independent of what a call does.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    nullcontext,
)
from typing import Any, TypeAlias

import grpc
from grpc_status import rpc_status

from baton.serving.grpc.errors import status_of
from baton.serving.grpc.large_messages import LargeMessages, Unparsed
from baton.serving.grpc.malformed import Malformed, tolerant

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
# Generic for the type checker alone.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]]
Guard = Callable[[Context], AbstractAsyncContextManager[None]]
Observe = Callable[[Context, str], AbstractContextManager[None]]
"""Function that returns the context in which a call of a method runs."""

logger = logging.getLogger(__name__)

_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def guarded(handler: Handler, guard: Guard) -> Handler:
    """Returns the handler with each of its calls run inside `guard(context)`."""
    behavior = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )

    async def answer(request: Any, context: Context) -> Any:
        async with guard(context):
            return await _run(behavior, request, context)

    make = _MAKERS[handler.request_streaming, handler.response_streaming]
    return make(answer, handler.request_deserializer, handler.response_serializer)


async def _run(behavior: Any, request: Any, context: Context) -> Any:
    """Runs a coroutine, an async generator, or a coroutine that writes by itself."""
    result = behavior(request, context)
    if inspect.isawaitable(result):
        result = await result
    if not isinstance(result, AsyncGenerator):
        return result
    async with aclosing(result) as responses:
        async for response in responses:
            await context.write(response)
    return None


def _unobserved(_context: Context, _method: str) -> AbstractContextManager[None]:
    return nullcontext()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Server interceptor that ends a failed call with the status of `baton.serving.grpc.errors`.

    A request that cannot be parsed is INVALID_ARGUMENT and does not reach the handler. Cancellation
    and the exception of `context.abort` pass untouched. INTERNAL is logged with its traceback; the
    text of an unexpected exception appears in that log only.
    """

    def __init__(
        self, large: LargeMessages | None = None, observe: "Observe | None" = None
    ) -> None:
        """Parses messages in the event loop if `large` is None. Calls run inside `observe`, if
        given, which sees the exceptions that they end with."""
        self._large = large
        self._observe = observe or _unobserved

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        return guarded(
            _parsing(handler, self._large),
            lambda context: _mapping_errors(context, method, self._observe),
        )


def _parsing(handler: Handler, large: LargeMessages | None) -> Handler:
    """Returns the handler with `tolerant` parsing; unchanged if it takes a stream of requests."""
    if handler.request_streaming or handler.request_deserializer is None:
        return handler
    behavior: Any = handler.unary_unary or handler.unary_stream

    def check_and_run(request: Any, context: Context) -> Any:
        if isinstance(request, Malformed):
            raise request.error
        return behavior(request, context)

    async def parse_and_run(request: Any, context: Context, large: LargeMessages) -> Any:
        result = check_and_run(await large.parse(request, context), context)
        return await result if inspect.isawaitable(result) else result

    def run(request: Any, context: Context) -> Any:
        if large is not None and isinstance(request, Unparsed):
            return parse_and_run(request, context, large)
        return check_and_run(request, context)

    make = _MAKERS[False, handler.response_streaming]
    deserialize = handler.request_deserializer
    wrapped = tolerant(deserialize) if large is None else large.deferring(deserialize)
    return make(run, wrapped, handler.response_serializer)


@asynccontextmanager
async def _mapping_errors(context: Context, method: str, observe: "Observe") -> AsyncIterator[None]:
    try:
        with observe(context, method):
            yield
    except grpc.aio.AbortError:
        raise
    except NotImplementedError:
        # Raised by the generated base class of a servicer.
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not offered here")
    except Exception as error:
        status = status_of(error)
        # One with a reason in its details is no bug, and was logged where it arose.
        if status.code == grpc.StatusCode.INTERNAL.value[0] and not status.details:
            logger.error("%s failed", method, exc_info=error)
        await context.abort_with_status(rpc_status.to_status(status))


class InFlightInterceptor(grpc.aio.ServerInterceptor):
    """Counter of calls in flight, except those of gRPC's own services, health and reflection."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.idle_since = time.time()
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Waits until no call is in flight."""
        await self._idle.wait()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc."):
            return handler
        return guarded(handler, self._counting)

    @asynccontextmanager
    async def _counting(self, _: Context) -> AsyncIterator[None]:
        self.num_calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_calls -= 1
            if self.num_calls == 0:
                self.idle_since = time.time()
                self._idle.set()
