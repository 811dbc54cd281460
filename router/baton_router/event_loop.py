"""Event loop of the router: uvloop, woken once for all gRPC operations that have completed.

A thread of gRPC writes a byte to a socket for each completed operation. Its reader in the loop
handles all completed operations, but reads one byte, so that it runs as often as there were
operations, mostly for nothing. Here it reads all bytes at once.

For a process with one event loop: gRPC has one socket for all of them. Where a loop was closed with
calls in flight, the reader fails at their completion, and leaves the operations that completed with
it to a next byte, which this loop has read.
"""

import socket
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVarTuple

import uvloop

_MAX_WAKE_UPS = 256  # more are read the next time; so few need no large object

_Arguments = TypeVarTuple("_Arguments")


class EventLoop(uvloop.Loop):
    """Event loop of uvloop for a process that serves gRPC."""

    def add_reader(
        self, fd: Any, callback: Callable[[*_Arguments], Any], *args: *_Arguments
    ) -> None:
        """Calls back when `fd` can be read, as `asyncio.loop.add_reader`."""
        if _is_of_grpc(callback):
            assert isinstance(fd, socket.socket), "gRPC's reader of wake-ups"
            fd.__class__ = _WakeUps  # gRPC keeps this object and reads it by its `recv`
        super().add_reader(fd, callback, *args)


class _WakeUps(socket.socket):
    """Socket of gRPC's wake-ups. No completion is missed: it is queued before its byte is sent, and
    the queue is emptied after this read."""

    __slots__ = ()

    def recv(self, _bufsize: int, flags: int = 0) -> bytes:
        """Returns all bytes that are there, however few were asked for."""
        return super().recv(_MAX_WAKE_UPS, flags)


def _is_of_grpc(callback: Callable[..., Any]) -> bool:
    function = callback.func if isinstance(callback, partial) else callback
    # Named, not imported: it is private. Under another name it would only run more often.
    return type(getattr(function, "__self__", None)).__name__ == "PollerCompletionQueue"
