"""The life of one gRPC server: listen, be ready, drain, stop. Knows nothing of what it serves."""

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.errors import FailedPreconditionError
from baton.serving.channels import server_options
from baton.serving.interceptors import ErrorInterceptor, InFlightInterceptor
from baton.serving.listening import cannot_listen, host_and_port
from baton.serving.settings import ServingSettings
from baton.serving.telemetry.propagation import trace_interceptors
from baton.tls import Pem, PemFiles, Tls

LIVENESS = "liveness"
READINESS = "readiness"
# The last answers of a drained server are still on their way out.
FLUSH_SECONDS = 0.5
# After which gRPC, which closes at once, is not waited for any more.
_CLOSING_SECONDS = 5.0

_Servicer = TypeVar("_Servicer")

logger = logging.getLogger(__name__)


class Server:
    """One server. Use: `add` services, `start`, `set_ready(True)`, `run_until_signal`.

    Health has three names: "liveness" is SERVING from `start` to `stop`; "readiness" and "" only
    between `set_ready(True)` and the beginning of a drain.
    """

    def __init__(
        self,
        settings: ServingSettings,
        *,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        uncounted: Sequence[str] = (),
    ) -> None:
        """`interceptors` run inside the server's own, in their order. No drain waits for calls of
        the services named `uncounted`, such as "baton.v1.Admin"."""
        self._settings = settings
        self._in_flight = InFlightInterceptor(uncounted)
        self._grpc = grpc.aio.server(
            interceptors=[
                self._in_flight,
                *trace_interceptors(),
                ErrorInterceptor(),
                *interceptors,
            ],
            options=server_options(settings.max_message_bytes),
        )
        self._health = health.aio.HealthServicer()
        self._services = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._drain_callbacks: list[Callable[[], Awaitable[None]]] = []
        self._draining = False
        self._port: int | None = None

    @property
    def port(self) -> int:
        """Where it listens. Valid after `start`."""
        assert self._port is not None, "the server has not started"
        return self._port

    @property
    def endpoint(self) -> str:
        """Where others reach it, "host:port". Valid after `start`."""
        return host_and_port(self._settings.advertise_host or self._settings.host, self.port)

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def num_calls(self) -> int:
        """Calls in flight, those of health, reflection and uncounted services not among them."""
        return self._in_flight.num_calls

    async def wait_idle(self) -> None:
        """Returns once no call is in flight, of those that `num_calls` counts."""
        await self._in_flight.wait_idle()

    def add(self, register: Callable[[_Servicer, Any], None], servicer: _Servicer) -> None:
        """Serves a service. `register` is its generated `add_..._to_server`. Before `start`."""
        register(servicer, _NamingServer(self._grpc, self._services))

    def on_drain(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Has `callback` awaited when a drain begins; it is where a room stops taking new work."""
        self._drain_callbacks.append(callback)

    async def start(self) -> int:
        """Listens and returns the port. Raises `FailedPreconditionError` where it cannot listen."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        if self._settings.reflection:
            reflection.enable_server_reflection(self._services, self._grpc)
        await self._set_health(LIVENESS, True)
        await self.set_ready(False)
        self._port = self._bind()
        await self._grpc.start()
        return self._port

    async def set_ready(self, ready: bool) -> None:
        """Says whether new work is welcome. A draining server stays unready."""
        for name in ("", READINESS):
            await self._set_health(name, ready and not self._draining)

    async def drain(self) -> None:
        """Turns readiness off, runs the drain callbacks and waits until no call is in flight.

        Returns after `drain_timeout_s` at the latest. New calls are still answered: the services
        themselves refuse new work.
        """
        self._draining = True
        await self.set_ready(False)
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._run_drain_callbacks()
                await self._in_flight.wait_idle()
        except TimeoutError:
            logger.warning(
                "drain did not end within drain_timeout_s = %g; %d calls are left",
                self._settings.drain_timeout_s,
                self.num_calls,
            )

    async def stop(self, grace: float = FLUSH_SECONDS) -> None:
        """Closes the port and, after `grace` seconds, the calls that are left. Idempotent.

        Returns in time whatever gRPC does: the process is to end.
        """
        await self._set_health(LIVENESS, False)
        await self.set_ready(False)
        try:
            async with asyncio.timeout(grace + _CLOSING_SECONDS):
                await self._grpc.stop(grace)
        except TimeoutError:
            logger.warning("gRPC did not close its connections in time; going on without it")

    async def run_until_signal(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains and stops; a second signal stops at once.

        Owns the handlers of both signals while it runs. In the main thread only.
        """
        first, second = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, lambda: (second if first.is_set() else first).set())
        try:
            await first.wait()
            logger.info("draining; a second signal stops at once")
            await _until_either(self.drain(), second.wait())
            await self.stop(0.0 if second.is_set() else FLUSH_SECONDS)
        finally:
            for signum in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(signum)

    async def _run_drain_callbacks(self) -> None:
        for callback in self._drain_callbacks:
            try:
                await callback()
            except Exception:
                logger.exception("a drain callback failed; the drain goes on")

    async def _set_health(self, name: str, serving: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        await self._health.set(name, answer.SERVING if serving else answer.NOT_SERVING)

    def _bind(self) -> int:
        host, port = self._settings.host, self._settings.port
        # gRPC tells the reason only to stderr, so the socket is asked first.
        _check_bindable(host, port)
        try:
            if self._settings.tls is None:
                return self._grpc.add_insecure_port(host_and_port(host, port))
            credentials = server_credentials(self._settings.tls)
            return self._grpc.add_secure_port(host_and_port(host, port), credentials)
        except RuntimeError as error:
            where = host_and_port(host, port)
            raise FailedPreconditionError(f"cannot listen on {where}") from error


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Asks every client for a certificate. Files that have changed are taken with the next
    connection."""
    files = PemFiles(tls)
    shown = files.current()

    def fetch() -> "grpc.ServerCertificateConfiguration | None":
        nonlocal shown
        before, shown = shown, files.current()
        return None if shown is before else _configuration(shown)

    # None says that nothing has changed, which the types do not know of.
    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown),
        cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch),
        require_client_authentication=True,
    )


def _configuration(pem: Pem) -> "grpc.ServerCertificateConfiguration":
    assert pem.cert is not None
    assert pem.key is not None
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


class _NamingServer:
    """What a generated `add_..._to_server` sees of a server: notes the names of the services."""

    def __init__(self, server: grpc.aio.Server, names: list[str]) -> None:
        self._server = server
        self._names = names

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.ServiceRpcHandler]) -> None:
        self._names.extend(handler.service_name() for handler in handlers)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service: str, handlers: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        self._server.add_registered_method_handlers(service, handlers)


async def _until_either(*steps: Awaitable[object]) -> None:
    """Returns when the first one is done, the others cancelled."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _check_bindable(host: str, port: int) -> None:
    """Raises `FailedPreconditionError` with the reason why this address cannot be listened on."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise cannot_listen(host, port, "--port", error) from error
