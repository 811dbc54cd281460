"""HTTP/1.1 connections of the router: strict parsing, header timeout, header size and connection
limits.

llhttp rejects what two servers may read differently: a body of two lengths, folded headers, line
feeds alone. Here it is rejected with 400, as are the few such requests that llhttp accepts, and
the connection is closed. uvicorn has no limit of a head's size, no timeout for the head of a first
request and no limit of connections. Here a head arrives in time, or the connection is closed. At
the limit, one that waits for its client is closed for a new one (`connection_room`); if none waits,
the new one gets 503 with retry-after.
"""

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from baton.fairness.client_address import holder_of
from baton_router.apis.edge.caller import AUTH_CONTEXT
from baton_router.apis.edge.connection_room import ConnectionRoom
from baton_router.apis.edge.errors import Failure
from baton_router.apis.edge.middleware import ID_HEADERS
from baton_router.apis.edge.settings import ConnectionLimits
from baton_router.apis.edge.tls import auth_context

# Seconds for which a refused connection stays open for reading.
_LINGER_SECONDS = 1.0

_NO_ROOM = Failure(
    503,
    "this router has as many connections as it takes; try again",
    "server_error",
    "unavailable",
    headers={"retry-after": "1"},
)


_EVICTED = Failure(
    503,
    "this router has as many connections as it takes, the most of them of this client's address; "
    "this one gave way while its body arrived. Try again over fewer",
    "server_error",
    "unavailable",
    headers={"retry-after": "1"},
)


class _RefusedHeadError(Exception):
    """Head that is refused with `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Connection(HttpToolsProtocol):
    """HTTP connection. Its requests' state has the identity in the client certificate.

    Pipelined requests are not served: the connection closes after the answer to the first, and the
    client sends the others again.
    """

    def __init__(
        self,
        *args: Any,
        limits: ConnectionLimits,
        room: ConnectionRoom,
        is_kept: Callable[[], bool] = lambda: True,
        **kwargs: Any,
    ) -> None:
        """Takes `room` while it is open. `is_kept`: asked at each request, whether the connection
        stays open after the answer, which else has `Connection: close`."""
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._room = room
        self._is_kept = is_kept
        self.holder = ""
        self._head_timer: asyncio.TimerHandle | None = None
        self.last_active_at = self.loop.time()
        self._is_refused = False
        self._has_head = False
        self._num_head_bytes = 0  # parsed so far
        self._num_unfinished_bytes = 0  # received since the head began, parsed or not

    @property
    def is_busy(self) -> bool:
        """True while a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_waiting(self) -> bool:
        """True while the client is to send something: a request, or the rest of a body."""
        return not self.is_busy or self._has_head

    @property
    def may_be_reused(self) -> bool:
        """True if the client may send a request, now or after the answer under way."""
        is_ending = self.is_busy and not self.cycle.keep_alive
        return not (is_ending or self._is_refused or self.transport.is_closing())

    @property
    def seconds_idle(self) -> float:
        """Seconds since the connection was made, received a part of a head or ended an answer; 0 if
        busy."""
        return 0.0 if self.is_busy else self.loop.time() - self.last_active_at

    def keep_no_longer(self) -> None:
        """Closes after the answer under way, which has `Connection: close`.

        An answer that has begun without that header leaves the client free to send another request.
        """
        if self.is_busy and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def close_when_idle(self) -> None:
        """Closes at once, or after the answer under way."""
        if self.is_busy:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accepts the connection, or refuses it at the limit."""
        peer = transport.get_extra_info("peername")
        self.holder = holder_of(peer[0]) if isinstance(peer, tuple) else ""
        has_room = self._room.enter(self)
        super().connection_made(transport)
        secured = transport.get_extra_info("ssl_object")
        if secured is not None:
            self.app_state = {**self.app_state, AUTH_CONTEXT: auth_context(secured)}
        if has_room:
            self._time_head()
        else:
            self._refuse(_NO_ROOM)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._room.leave(self)
        super().connection_lost(exc)

    def evict(self) -> None:
        """Closes at once, for another connection."""
        if self.is_busy:
            self._refuse(_EVICTED)
            self.transport.close()
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._has_head:  # a body may drip
            self.last_active_at = self.loop.time()
        if not self._is_refused:
            self._read(data)

    def on_message_begin(self) -> None:
        if self.is_busy:
            raise _RefusedHeadError(_invalid("a request came before the answer to the last one"))
        self._has_head = False
        self._num_head_bytes = self._num_unfinished_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        if not self._has_head:  # what follows a body is no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        problem = _ambiguity(self.parser.get_http_version(), self.headers)
        if self.parser.get_method() == b"CONNECT":
            problem = "its method is CONNECT; this is no proxy"
        if problem is not None:
            raise _RefusedHeadError(_invalid(problem))
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self.cycle.keep_alive &= self._is_kept()
            self._has_head = True

    def on_message_complete(self) -> None:
        if self._has_head:
            super().on_message_complete()
            self._has_head = False  # data that follows is of the next head

    def on_response_complete(self) -> None:
        self.last_active_at = self.loop.time()
        super().on_response_complete()

    def _read(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        began_in_head = not self._has_head
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(_failure_of(error))
        if self._is_refused:
            return
        if began_in_head and not self._has_head:
            self._num_unfinished_bytes += len(data)
            if self._num_unfinished_bytes > self._limits.max_header_bytes:
                self._refuse(self._too_large())
                return
        if self.is_busy:
            self._stop_timer()
        else:
            self._time_head()

    def _decline(self, data: bytes) -> None:
        """Reads a request that offers another protocol as if it did not, since the parser stops
        before its body. `data`: what follows its head."""
        lines = [b"%s %s HTTP/1.1\r\n" % (self.parser.get_method(), self.url)]
        for name, value in self.headers:
            if name == b"connection":
                options = (option.strip() for option in value.split(b","))
                value = b", ".join(option for option in options if option.lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(b"%s: %s\r\n" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self._read(b"".join([*lines, b"\r\n", data]))

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._limits.max_header_bytes:
            raise _RefusedHeadError(self._too_large())

    def _too_large(self) -> Failure:
        text = f"the headers have more than {self._limits.max_header_bytes} bytes"
        return Failure(431, text, "invalid_request_error", "headers_too_large")

    def _time_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.is_busy:
            text = f"the headers did not come within {self._limits.head_timeout_s:g} s"
            self._refuse(Failure(408, text, "invalid_request_error", "headers_timeout"))

    def _refuse(self, failure: Failure) -> None:
        """Answers with `failure` if no answer has begun, and closes the connection. A request that
        is whole is answered first."""
        self._is_refused = True
        self._stop_timer()
        if self.is_busy and not self.cycle.more_body:
            self.cycle.keep_alive = False
            return
        if not (self._has_head and self.cycle.response_started):
            self.transport.write(_bytes_of(failure))
        if self.is_busy:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # A client that is still writing would find the connection reset before it reads the answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def _failure_of(error: httptools.HttpParserError) -> Failure:
    """Returns the answer to a request that cannot be parsed, or that a parser callback refused."""
    cause = error.__context__
    if isinstance(cause, _RefusedHeadError):
        return cause.failure
    return _invalid(str(error) if cause is None else "its path cannot be read")


def _invalid(problem: str) -> Failure:
    return Failure(
        400, f"the request is not valid HTTP: {problem}", "invalid_request_error", "invalid_http"
    )


def _ambiguity(version: str, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Returns why a proxy might read a head differently that llhttp accepts; None: it might not."""
    if version not in ("1.0", "1.1"):
        return f"its version is {version}; 1.0 and 1.1 are served"
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (version, codings) != ("1.1", [b"chunked"]):
        return "its transfer coding is not chunked, or its version is 1.0"
    num_hosts = sum(name == b"host" for name, _ in headers)
    if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
        return f"it has {num_hosts} host headers; 1 is needed"
    return None


def _bytes_of(failure: Failure) -> bytes:
    content = json.dumps(failure.body).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        "connection": "close",
        **dict.fromkeys(ID_HEADERS, secrets.token_hex(8)),
        **failure.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[failure.status] + lines.encode() + b"\r\n" + content
