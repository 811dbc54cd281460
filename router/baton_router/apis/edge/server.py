"""HTTP server beside gRPC in the same event loop: listen, serve, graceful shutdown."""

import asyncio
import logging
import math
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from baton.rpc.tls import Tls
from baton.serving.listening import host_and_port, listen
from baton_router.apis.edge.connection import Connection
from baton_router.apis.edge.connection_room import ConnectionRoom
from baton_router.apis.edge.listener import Listener
from baton_router.apis.edge.middleware import InFlight
from baton_router.apis.edge.settings import ConnectionLimits
from baton_router.apis.edge.tls import server_context

logger = logging.getLogger(__name__)

# Seconds, longer than clients keep idle connections, so that none sends into one that is being
# closed.
_KEEP_ALIVE_SECONDS = 75
# Seconds without a request after which a client is taken not to be sending one just now.
_QUIET_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_BACKLOG = 1024
_LIMITS = ConnectionLimits()


class _Uvicorn(uvicorn.Server):
    """uvicorn server that leaves signals to the process, and whose TLS handshakes are bounded."""

    def __init__(
        self, config: uvicorn.Config, limits: ConnectionLimits, context: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self._limits = limits
        self._context = context
        self._room = ConnectionRoom(limits.max_connections)
        self._keeps_connections = True
        self._last_opened_at = -math.inf

    @property
    def open_connections(self) -> list[Connection]:
        return [c for c in self.server_state.connections if isinstance(c, Connection)]

    @property
    def is_quiet(self) -> bool:
        """True if no client may send a request on a connection, nor was opening any recently."""
        is_kept = any(connection.may_be_reused for connection in self.open_connections)
        return not is_kept and time.monotonic() - self._last_opened_at >= _QUIET_SECONDS

    def close_idle_connections(self) -> None:
        """Closes the connections whose clients sent nothing recently."""
        for connection in self.open_connections:
            if connection.may_be_reused and connection.seconds_idle >= _QUIET_SECONDS:
                connection.close_when_idle()

    def keep_no_longer(self) -> None:
        """Has each connection close after its next answer, those of the future too."""
        self._keeps_connections = False
        for connection in self.open_connections:
            connection.keep_no_longer()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None, "the caller listens"
        listeners = [
            Listener(
                listening,
                self._new_connection,
                self._context,
                self._limits.head_timeout_s,
                self._limits.max_connections,
            )
            for listening in sockets
        ]
        self.servers = listeners  # type: ignore[assignment]
        self.started = True

    def _new_connection(self) -> Connection:
        self._last_opened_at = time.monotonic()
        return Connection(
            config=self.config,
            server_state=self.server_state,
            app_state={},
            limits=self._limits,
            room=self._room,
            # Not now: an accepted connection is not among those that are open yet.
            is_kept=lambda: self._keeps_connections,
        )


class HttpServer:
    """HTTP server. Use: `start`; to drain, `begin_drain`, `release_connections` and `wait_idle`;
    then `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        tls: Tls | None = None,
        limits: ConnectionLimits = _LIMITS,
        *,
        asks_for_certificates: bool = False,
    ) -> None:
        """Serves without TLS if `tls` is None. `asks_for_certificates`: rejects connections of
        clients that show none."""
        self._host = host
        self._scheme = "http" if tls is None else "https"
        self._app = InFlight(app)
        self._task: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            self._app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        config.load()
        context = None
        if tls is not None:
            context = server_context(tls, asks_for_certificates=asks_for_certificates)
        self._server = _Uvicorn(config, limits, context)

    async def start(self, port: int) -> int:
        """Listens and returns the port, any free one for 0. Raises `FailedPreconditionError` if it
        cannot listen."""
        listening = listen(self._host, port, "--http-port", _BACKLOG)
        port = listening.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))
        address = host_and_port(self._host, port)
        logger.info("OpenAI's API is at %s://%s/v1", self._scheme, address)
        return port

    async def begin_drain(self) -> None:
        """Has each answer that begins from now on close its connection, by `Connection: close`."""
        self._server.keep_no_longer()

    async def release_connections(self, timeout: float) -> None:
        """Closes the connections that clients keep, after `begin_drain`.

        An idle connection that is closed loses the request that its client is just sending. So
        those that were quiet for a second are closed, and others after one more answer. Returns
        once no connection is kept and for a second none was opened, as by a load balancer that does
        not know yet; or after `timeout` seconds: those that are left then close after the answer
        under way.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self._server.is_quiet:
                    self._server.close_idle_connections()
                    await asyncio.sleep(_LOOK_SECONDS)
        for connection in self._server.open_connections:
            connection.close_when_idle()

    async def wait_idle(self) -> None:
        """Returns once no request is in flight."""
        await self._app.wait_idle()

    async def stop(self) -> None:
        """Closes the port, and after one second the remaining requests. Idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
