"""gRPC server lifecycle: listen, become ready, drain, stop. Independent of its services."""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.errors import FailedPreconditionError
from baton.rpc.cancellation import run_until
from baton.rpc.tls import Pem, PemFiles
from baton.serving.grpc.access import Access, AccessInterceptor
from baton.serving.grpc.certificates import watched
from baton.serving.grpc.channels import server_options
from baton.serving.grpc.connection_guard import ConnectionGuard, ConnectionLimits
from baton.serving.grpc.connection_room import with_spare
from baton.serving.grpc.interceptors import ErrorInterceptor, InFlightInterceptor, Observe
from baton.serving.grpc.large_messages import LargeMessages
from baton.serving.listening import WILDCARDS, cannot_listen, host_and_port, probe
from baton.serving.settings import ServingSettings
from baton.serving.telemetry.propagation import trace_interceptors

LIVENESS = "liveness"
READINESS = "readiness"
# Seconds in which a drained server sends its last answers.
FLUSH_SECONDS = 0.5
_CLOSING_SECONDS = 5.0
# Seconds after which calls on released connections are cut off, beyond any drain.
_CUT_OFF_SECONDS = 1e6
_LOOK_SECONDS = 0.005

_Servicer = TypeVar("_Servicer")

logger = logging.getLogger(__name__)


class Server:
    """gRPC server. Use: `add` services, `start`, `set_ready(True)`, `run_until_signal`.

    Services of `add_admin` have a port of their own and the same lifetime. Health is answered
    on both.

    Health has three names: "liveness" is SERVING from `start` to `stop`; "readiness" and "" only
    between `set_ready(True)` and the beginning of a drain.
    """

    def __init__(
        self,
        settings: ServingSettings,
        *,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        by_token: Sequence[str] = (),
        health_names: Sequence[str] = (),
        large: LargeMessages | None = None,
        connection_limits: ConnectionLimits | None = None,
        max_message_bytes: int | None = None,
        closing_seconds: float = _CLOSING_SECONDS,
        observe: Observe | None = None,
    ) -> None:
        """Runs `interceptors` inside the server's own, in their order. Services `by_token`
        authenticate callers by a token: over TLS no client is then asked for a certificate, except
        for administration, and all other services of `add` refuse their callers. `health_names`
        have the health of "readiness". `large` parses large messages; None: the event loop does.
        Connections to services of `add` that exceed `connection_limits` are dropped; None: no
        limits. `max_message_bytes` is the limit of these services; None: that of `settings`.
        `closing_seconds`: longest wait for gRPC to close, which normally takes none. `observe`: as
        of `ErrorInterceptor`."""
        self._closing_seconds = closing_seconds
        self._settings = settings
        self._readiness_names = ("", READINESS, *health_names)
        self._by_token = by_token
        self._interceptors = [
            *trace_interceptors(),
            ErrorInterceptor(large, observe),
            *interceptors,
        ]
        self._in_flight = InFlightInterceptor()
        self._health = health.aio.HealthServicer()
        self._serving: set[str] = set()  # as the servicer has it, which cannot be asked
        self._max_message_bytes = max_message_bytes
        self._guard: ConnectionGuard | None = None
        if connection_limits is not None:
            self._guard = ConnectionGuard(connection_limits, settings.server.max_connections)
        self._main = self._main_listener()
        self._files: PemFiles | None = None
        self._services: list[Callable[[_Listener], None]] = []
        self._released: dict[_Listener, asyncio.Task[None]] = {}
        self._admin: _Listener | None = None
        self._drain_callbacks: list[Callable[[], Awaitable[None]]] = []
        self._drain: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Port that the server listens on. Valid after `start`."""
        return self._main.port

    @property
    def endpoint(self) -> str:
        """Advertised address, "host:port". Valid after `start`."""
        return host_and_port(self._settings.advertise_host or self._settings.host, self.port)

    @property
    def admin_endpoint(self) -> str:
        """Advertised address of the admin services, "host:port". Valid after `start`."""
        assert self._admin is not None, "there is no admin service"
        settings, host = self._settings, self._settings.admin_host
        if host is None or host in WILDCARDS:
            host = settings.advertise_host or settings.host
        return host_and_port(host, self._admin.port)

    @property
    def num_dropped_connections(self) -> int:
        """Connections dropped since they exceeded the limits of one."""
        return 0 if self._guard is None else self._guard.num_dropped

    @property
    def num_refused_addresses(self) -> int:
        """Addresses that may not connect now, since their connections were dropped."""
        return 0 if self._guard is None else self._guard.num_refused_addresses

    @property
    def is_draining(self) -> bool:
        return self._drain is not None

    def is_serving(self, name: str) -> bool:
        """Returns whether health reports SERVING for `name`."""
        return name in self._serving

    @property
    def num_calls(self) -> int:
        """Calls in flight, except those of health, reflection and administration."""
        return self._in_flight.num_calls

    @property
    def idle_since(self) -> float | None:
        """Time of the end of the last call, in seconds since 1970; None while one is in flight."""
        return None if self.num_calls else self._in_flight.idle_since

    async def wait_idle(self) -> None:
        """Waits until no call is in flight, of those that `num_calls` counts."""
        await self._in_flight.wait_idle()

    def add(self, register: Callable[[_Servicer, Any], None], servicer: _Servicer) -> None:
        """Adds a service. `register` is its generated `add_..._to_server`. Before `start`."""
        self._services.append(partial(register, servicer))
        self._services[-1](self._main)

    def add_admin(self, register: Callable[[_Servicer, Any], None], servicer: _Servicer) -> None:
        """Adds a service on `admin_port`, apart from all others. No drain waits for its calls,
        since such a call may itself wait for the others to end. Before `start`."""
        if self._admin is None:
            self._admin = self._listener(Access())
        register(servicer, self._admin)

    def on_drain(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Registers `callback`, awaited when a drain begins, to stop taking new work."""
        self._drain_callbacks.append(callback)

    async def start(self) -> int:
        """Listens and returns the port. Raises `FailedPreconditionError` if it cannot listen."""
        settings = self._settings
        await self._set_health(LIVENESS, True)
        await self.set_ready(False)
        self._files = None if settings.tls is None else watched(settings.tls)
        credentials = _credentials(self._files, asks_for_certificates=not self._by_token)
        self._main.bind(settings.host, settings.port, "--port", credentials)
        if self._admin is not None:
            host = settings.admin_host or settings.host
            credentials = _credentials(self._files, asks_for_certificates=True)
            self._admin.bind(host, settings.admin_port, "--admin-port", credentials)
        for listener in self._listeners:
            await listener.grpc.start()
        if self._guard is not None:
            self._guard.start(self.port)
        return self.port

    async def set_ready(self, ready: bool) -> None:
        """Sets readiness: whether new work is accepted. A draining server stays unready."""
        for name in self._readiness_names:
            await self._set_health(name, ready and not self.is_draining)

    def begin_drain(self) -> None:
        """Turns readiness off for good and runs the drain callbacks in the background. Idempotent.
        New calls are still answered: the services themselves refuse new work."""
        if self._drain is None:
            self._drain = asyncio.create_task(self._run_drain_callbacks())

    async def release_connections(self) -> None:
        """Has clients make the next calls of all connections on others: gRPC tells them to
        (GOAWAY). Calls in flight continue. A call that is on its way at this moment is CANCELLED.

        gRPC does so only as a server closes, so another one takes its port and its services. Raises
        `FailedPreconditionError` if the port does not become free in time.
        """
        former, port = self._main, self.port
        self._released[former] = asyncio.create_task(former.grpc.stop(_CUT_OFF_SECONDS))
        successor = self._main_listener()
        for add_to in self._services:
            add_to(successor)
        until = time.monotonic() + self._closing_seconds
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                _check_bindable(self._settings.host, port, "--port")
                break
            except FailedPreconditionError:
                if time.monotonic() > until:
                    raise
        credentials = _credentials(self._files, asks_for_certificates=not self._by_token)
        successor.bind(self._settings.host, port, "--port", credentials)
        await successor.grpc.start()
        self._main = successor

    async def drain(self) -> None:
        """Drains as `begin_drain` and waits until no call is in flight.

        Returns after `drain_timeout_s` at the latest.
        """
        self.begin_drain()
        assert self._drain is not None
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._drain
                await self._in_flight.wait_idle()
        except TimeoutError:
            logger.warning(
                "drain did not end within drain_timeout_s = %g; %d calls are left",
                self._settings.drain_timeout_s,
                self.num_calls,
            )

    async def stop(self, grace: float = FLUSH_SECONDS) -> None:
        """Closes the port and, after `grace` seconds, the calls that are left. Idempotent.

        Returns in time even if gRPC hangs: the process is to end.
        """
        await self._set_health(LIVENESS, False)
        await self.set_ready(False)
        if self._guard is not None:
            self._guard.stop()
        try:
            async with asyncio.timeout(grace + self._closing_seconds):
                await asyncio.gather(*(one.grpc.stop(grace) for one in self._listeners))
                await asyncio.gather(*self._released.values())
        except TimeoutError:
            logger.warning("gRPC did not close its connections in time; continuing without it")

    async def run_until_signal(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains and stops; a second signal stops at once.

        Owns the handlers of both signals while it runs; SIGTERM is ignored after a signal, so that
        one more does not cut what the process does at its end. In the main thread only.
        """
        first, second = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, lambda: (second if first.is_set() else first).set())
        try:
            await first.wait()
            logger.info("draining; a second signal stops at once")
            await run_until(self.drain(), second.wait())
            await self.stop(0.0 if second.is_set() else FLUSH_SECONDS)
        finally:
            for signum in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(signum)
            if first.is_set():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)

    @property
    def _listeners(self) -> "list[_Listener]":
        found = [*self._released, self._main]
        return found if self._admin is None else [*found, self._admin]

    def _main_listener(self) -> "_Listener":
        most = self._settings.server.max_connections
        return self._listener(
            Access(self._by_token),
            self._in_flight,
            max_message_bytes=self._max_message_bytes,
            max_connections=None if self._guard is None else with_spare(most),
        )

    def _listener(
        self,
        access: Access,
        *outermost: grpc.aio.ServerInterceptor,
        max_message_bytes: int | None = None,
        max_connections: int | None = None,
    ) -> "_Listener":
        settings = self._settings
        guards = [] if settings.tls is None else [AccessInterceptor(access)]
        interceptors = [*guards, *outermost, *self._interceptors]
        limits = settings.server
        if max_message_bytes is not None:
            limits = replace(limits, max_message_bytes=max_message_bytes)
        if max_connections is not None:
            limits = replace(limits, max_connections=max_connections)
        options = server_options(limits)
        server = grpc.aio.server(interceptors=interceptors, options=options)
        return _Listener(server, self._health, has_reflection=settings.reflection)

    async def _run_drain_callbacks(self) -> None:
        await self.set_ready(False)
        for callback in self._drain_callbacks:
            try:
                await callback()
            except Exception:
                logger.exception("a drain callback failed; the drain continues")

    async def _set_health(self, name: str, serving: bool) -> None:
        (self._serving.add if serving else self._serving.discard)(name)
        answer = health_pb2.HealthCheckResponse
        await self._health.set(name, answer.SERVING if serving else answer.NOT_SERVING)


class _Listener:
    """gRPC's server behind one port, as a generated `add_..._to_server` sees it: records the names
    of its services, which include health and, if enabled, reflection."""

    def __init__(
        self, server: grpc.aio.Server, servicer: health.aio.HealthServicer, *, has_reflection: bool
    ) -> None:
        self.grpc = server
        self._names = [reflection.SERVICE_NAME]
        self._has_reflection = has_reflection
        self._port: int | None = None
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self)

    @property
    def port(self) -> int:
        assert self._port is not None, "the server has not started"
        return self._port

    def bind(
        self, host: str, port: int, flag: str, credentials: grpc.ServerCredentials | None
    ) -> None:
        """Binds the port, after which no service can be added. Raises `FailedPreconditionError` if
        it cannot; the error names `flag` if the port is in use."""
        if self._has_reflection:
            reflection.enable_server_reflection(self._names, self.grpc)
        # gRPC prints the reason on stderr only, so a socket is tried first.
        _check_bindable(host, port, flag)
        where = host_and_port(host, port)
        try:
            if credentials is None:
                self._port = self.grpc.add_insecure_port(where)
            else:
                self._port = self.grpc.add_secure_port(where, credentials)
        except RuntimeError as error:
            raise FailedPreconditionError(f"cannot listen on {where}") from error

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.ServiceRpcHandler]) -> None:
        self._names.extend(handler.service_name() for handler in handlers)
        self.grpc.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service: str, handlers: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        self.grpc.add_registered_method_handlers(service, handlers)


def _credentials(
    files: PemFiles | None, *, asks_for_certificates: bool
) -> grpc.ServerCredentials | None:
    """Returns credentials that reload changed files for new connections; None without TLS."""
    if files is None:
        return None
    shown = files.current()

    def fetch() -> "grpc.ServerCertificateConfiguration | None":
        nonlocal shown
        before, shown = shown, files.current()
        return None if shown is before else _configuration(shown)

    # None means unchanged, which the types do not know of.
    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown),
        cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch),
        require_client_authentication=asks_for_certificates,
    )


def _configuration(pem: Pem) -> "grpc.ServerCertificateConfiguration":
    assert pem.cert is not None
    assert pem.key is not None
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


def _check_bindable(host: str, port: int, flag: str) -> None:
    """Raises `FailedPreconditionError` with the reason if the address cannot be bound."""
    try:
        probe(host, port)
    except OSError as error:
        raise cannot_listen(host, port, flag, error) from error
