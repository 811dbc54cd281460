"""HTTP server beside gRPC in the same event loop: listen, serve, graceful shutdown."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from baton.rpc.tls import Tls
from baton.serving.listening import cannot_listen
from baton_router.apis.edge.connection import Connection
from baton_router.apis.edge.listener import Listener
from baton_router.apis.edge.middleware import InFlight
from baton_router.apis.edge.settings import ConnectionLimits
from baton_router.apis.edge.tls import server_context

logger = logging.getLogger(__name__)

# Seconds, longer than clients keep idle connections, so that none sends into one that is being
# closed.
_KEEP_ALIVE_SECONDS = 75
_LIMITS = ConnectionLimits()


class _Uvicorn(uvicorn.Server):
    """uvicorn server that leaves signals to the process, and whose TLS handshakes are bounded."""

    def __init__(
        self, config: uvicorn.Config, limits: ConnectionLimits, context: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self._limits = limits
        self._context = context

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
        return Connection(
            config=self.config, server_state=self.server_state, app_state={}, limits=self._limits
        )


class HttpServer:
    """HTTP server. Use: `start`, then `wait_idle` to drain, then `stop`."""

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
        listening = _listen(self._host, port)
        port = listening.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))
        logger.info("OpenAI's API is at %s://%s:%d/v1", self._scheme, self._host, port)
        return port

    async def wait_idle(self) -> None:
        """Returns once no request is in flight."""
        await self._app.wait_idle()

    async def stop(self) -> None:
        """Closes the port, and after one second the remaining requests. Idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise cannot_listen(host, port, "--http-port", error) from error
