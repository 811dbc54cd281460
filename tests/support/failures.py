"""Failures of calls, as the errors that Baton's clients see."""

from collections.abc import Awaitable

import grpc
import pytest

from baton.errors import BatonError
from baton.rpc.errors import error_of


async def failure_of(call: Awaitable[object] | grpc.aio.UnaryStreamCall) -> BatonError:
    """Returns the error that `call` raises; a gRPC status is converted to its error type.

    A stream is read until it raises.
    """
    with pytest.raises((BatonError, grpc.RpcError)) as caught:
        await (_drained(call) if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    error = caught.value
    return error_of(error) if isinstance(error, grpc.RpcError) else error


async def _drained(call: grpc.aio.UnaryStreamCall) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def status_of(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    """Returns the gRPC status that `call` raises."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value
