"""HTTP/1.1 connections of the router: header timeout, header size and connection limits.

uvicorn has no timeout for the head of a first request and no limit of connections. Here a head
arrives in time, or the connection is closed. At the limit, the connection idle for longest is
closed for a new one; if all are busy, the new one gets 503 with retry-after.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from baton_router.http.caller import AUTH_CONTEXT
from baton_router.http.errors import Failure
from baton_router.http.tls import auth_context

_NO_ROOM = Failure(
    503,
    "this router has as many connections as it takes; try again",
    "server_error",
    "unavailable",
    headers={"retry-after": "1"},
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Connection limits of one HTTP server.

    Attributes:
        max_connections: maximum open connections.
        max_header_bytes: maximum bytes of a request's first line and headers.
        head_seconds: timeout for these, from the connection's or the head's first byte on.
    """

    max_connections: int = 1024
    max_header_bytes: int = 16 * 1024
    head_seconds: float = 20.0


class Connection(H11Protocol):
    """HTTP connection. Its requests' state has the identity in the client certificate."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._last_data_at = self.loop.time()

    @property
    def is_busy(self) -> bool:
        """True while a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts the connection, or refuses it at the limit."""
        has_room = len(self.connections) < self._limits.max_connections or self._make_room()
        super().connection_made(transport)
        secured = transport.get_extra_info("ssl_object")
        if secured is not None:
            self.app_state = {**self.app_state, AUTH_CONTEXT: auth_context(secured)}
        if has_room:
            self._time_head()
        else:
            self.connections.discard(self)  # so that no other one evicts it
            self._refuse(_NO_ROOM)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._last_data_at = self.loop.time()
        super().data_received(data)
        if self.is_busy:
            self._stop_timer()
        else:
            self._time_head()

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP with 400, and a head that is too large with 431."""
        buffered, _ = self.conn.trailing_data
        if len(buffered) > self._limits.max_header_bytes:
            most = self._limits.max_header_bytes
            text = f"the headers have more than {most} bytes"
            self._refuse(Failure(431, text, "invalid_request_error", "headers_too_large"))
        else:
            self._refuse(Failure(400, msg, "invalid_request_error", "invalid_http"))

    def _make_room(self) -> bool:
        """Closes the connection that is idle for longest; returns False if all are busy."""
        idle = [c for c in self.connections if isinstance(c, Connection) and not c.is_busy]
        if not idle:
            return False
        oldest = min(idle, key=lambda connection: connection._last_data_at)
        oldest.transport.abort()
        self.connections.discard(oldest)
        return True

    def _time_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.is_busy:
            text = f"the headers did not come within {self._limits.head_seconds:g} s"
            self._refuse(Failure(408, text, "invalid_request_error", "headers_timeout"))

    def _refuse(self, failure: Failure) -> None:
        """Sends `failure` without a request, and closes the connection."""
        self._stop_timer()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer is being sent
            return
        content = json.dumps(failure.body).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(content))),
            ("connection", "close"),
            *failure.headers.items(),
        ]
        response = h11.Response(status_code=failure.status, headers=headers)
        for event in (response, h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
