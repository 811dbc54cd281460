"""`baton up`: a cluster on this machine until a signal."""

import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

from rich.console import Console

from baton.cli.listener import holder
from baton.cli.local.display import status_display
from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.ports import HOST, is_free
from baton.cli.local.signals import interrupted_by_signals
from baton.cli.local.status import OnStatus, Status
from baton.cli.options.common import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS
from baton.errors import BatonError, FailedPreconditionError, InvalidArgumentError
from baton.models import DEFAULT_MODEL, INTRODUCTION, named
from baton.serving.grpc.access import ROUTER_NAME
from baton.serving.listening import WILDCARDS
from baton.serving.optional_dependencies import check_extra
from baton.version import version

DEFAULT_HTTP_PORT = 8000
_ADMIN_PORT = int(DEFAULT_ADMIN_ADDRESS.rpartition(":")[2])
_CHECK_INTERVAL = 0.2


def models_of(argument: str | None, options: Sequence[str] | None) -> str:
    """Returns the models, with commas between: those of the command line, else of the environment,
    else the default one. `options`: of --model; None: it is not given."""
    given = [*([argument] if argument else []), *(options or [])]
    return ",".join(given) or os.environ.get("BATON_MODEL") or DEFAULT_MODEL


def parse_flags(settings: Sequence[str], option: str) -> dict[str, object]:
    """Returns the settings in "KEY=VALUE" of this option, with true and false as booleans."""
    flags: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (key and equals):
            raise InvalidArgumentError(option, f"is {setting!r}; must be KEY=VALUE")
        flags[key.lstrip("-").replace("-", "_")] = {"true": True, "false": False}.get(value, value)
    return flags


def http_port_of(requested: int | None) -> int | None:
    """Returns the router's HTTP port. `requested` None: `DEFAULT_HTTP_PORT`, or any free port (0)
    if that is taken; None, with a message on stderr, if the extra is not installed: no HTTP.

    Raises `FailedPreconditionError` if it is asked for and not installed.
    """
    try:
        check_extra("http", "--http-port" if requested is not None else "no HTTP: it")
    except FailedPreconditionError as error:
        if requested is not None:
            raise
        print(f"baton: {error}", file=sys.stderr)
        return None
    if requested is not None:
        return requested
    return DEFAULT_HTTP_PORT if is_free(DEFAULT_HTTP_PORT) else 0


def admin_port_of(requested: int | None) -> int:
    """Returns the router's admin port. `requested` None: the one that commands connect to, or any
    free one (0) if that is taken."""
    if requested is not None:
        return requested
    return _ADMIN_PORT if is_free(_ADMIN_PORT) else 0


def listens_here(host: str) -> bool:
    """Returns whether a server on `host` takes a port of the loopback interface."""
    return host in (HOST, "localhost", *WILDCARDS)


def check_ports(ports: Mapping[str, int | None]) -> None:
    """Raises `FailedPreconditionError` for a port that is taken, with its holder. `ports`: by the
    flag that chooses another; None and 0: any."""
    for flag, port in ports.items():
        if port and not is_free(port):
            raise FailedPreconditionError(
                f"port {port} on {HOST} is taken: {holder(HOST, port)} holds it; choose another "
                f"with {flag}"
            )


def print_commands(cluster: LocalCluster) -> None:
    """Prints the commands that `run` would start, as lines for a shell: all can be pasted at once,
    and run until `kill $(jobs -p)`. Raises `FailedPreconditionError`: no Redis to start."""
    if cluster.redis is not None:
        print(f"# an embedded Redis at {cluster.redis_url}")
        print(f"{shlex.join(cluster.redis.command)} &")
    if names := sorted({name for p in cluster.processes for name in p.environment}):
        print(f"# with {', '.join(names)} in the environment, since it holds a password")
    for process in cluster.processes:
        print(f"{shlex.join(process.command)} &")


class Report(Protocol):
    """Output of `run`: what becomes of the cluster."""

    def starting(self, cluster: LocalCluster) -> AbstractContextManager[OnStatus]:
        """Returns a context manager for the start, with a callback for the statuses."""

    def ready(self, cluster: LocalCluster, seconds: float) -> None: ...

    def redis_died(self) -> None: ...

    def stopping(self) -> None: ...

    def stopped(self, error: BatonError | None) -> None:
        """`error`: the reason; None: a signal."""


class Text:
    """Report for people."""

    def __init__(self, console: Console, *, may_move_http: bool = False) -> None:
        """`may_move_http`: another HTTP port than the default one was not asked for."""
        self._console = console
        self._may_move_http = may_move_http

    def starting(self, cluster: LocalCluster) -> AbstractContextManager[OnStatus]:  # noqa: ARG002
        return status_display(self._console)

    def ready(self, cluster: LocalCluster, seconds: float) -> None:
        said = _how_to_use(cluster, seconds, may_move_http=self._may_move_http)
        self._console.print(said, highlight=False)

    def redis_died(self) -> None:
        self._console.print("Redis died. The workers continue to serve; new ones cannot join.")

    def stopping(self) -> None:
        self._console.print("stopping; Ctrl-C again kills")

    def stopped(self, error: BatonError | None) -> None:
        """Prints nothing: the command prints its error."""


class JsonLines:
    """Report for scripts: an event as JSON in each line of stdout."""

    @contextmanager
    def starting(self, cluster: LocalCluster) -> Iterator[OnStatus]:
        names = [process.name for process in cluster.processes]
        self._print("starting", model=cluster.model, processes=names, version=version())
        last: dict[str, Status] = {}

        def on_status(statuses: list[Status]) -> None:
            for status in statuses:
                is_as = replace(status, seconds_left=None)
                if last.get(status.name) != is_as:
                    last[status.name] = is_as
                    self._print("status", **dataclasses.asdict(status))

        yield on_status

    def ready(self, cluster: LocalCluster, seconds: float) -> None:
        has_http = cluster.process("router").http_port is not None
        self._print(
            "ready",
            seconds=round(seconds, 3),
            address=cluster.address,
            admin_address=cluster.admin_address,
            http_url=cluster.http_address if has_http else None,
            metrics=cluster.metrics_endpoints,
            model=cluster.model,
        )

    def redis_died(self) -> None:
        self._print("redis_died")

    def stopping(self) -> None:
        self._print("stopping")

    def stopped(self, error: BatonError | None) -> None:
        reason = "signal" if error is None else "error"
        self._print("stopped", reason=reason, error=None if error is None else str(error))

    def _print(self, event: str, **fields: object) -> None:
        print(json.dumps({"event": event, **fields}), flush=True)


def run(cluster: LocalCluster, report: Report) -> None:
    """Starts the cluster, reports it, and stops it at a signal or when a process dies.

    Raises as `LocalCluster.start`, and `UnavailableError` if a process died by itself.
    """
    failure: BatonError | None = None
    with interrupted_by_signals():
        try:
            _serve(cluster, report)
        except KeyboardInterrupt:
            report.stopping()
        except BatonError as error:
            failure = error
            raise
        finally:
            cluster.stop()
            report.stopped(failure)


def _serve(cluster: LocalCluster, report: Report) -> None:
    started_at = time.monotonic()
    with report.starting(cluster) as on_status:
        cluster.start(timeout=None, on_status=on_status)
    report.ready(cluster, time.monotonic() - started_at)
    has_redis = cluster.redis is not None
    while True:
        cluster.check()
        if cluster.redis is not None and has_redis and not cluster.redis.is_running:
            has_redis = False
            report.redis_died()
        time.sleep(_CHECK_INTERVAL)


def _how_to_use(cluster: LocalCluster, seconds: float, *, may_move_http: bool) -> str:
    address = cluster.address
    metrics = ", ".join(f"{e} ({name})" for name, e in cluster.metrics_endpoints.items())
    option = "" if address == DEFAULT_ADDRESS else f" --address {address}"
    admin = cluster.admin_address
    admin_option = "" if admin == DEFAULT_ADMIN_ADDRESS else f" --admin {admin}"
    return (
        f"ready after {seconds:.1f} s at {address}. In another terminal:\n"
        f"{_of_tls(cluster)}"
        f'  baton generate{option} "def __enter__(self):"\n'
        f"  baton chat{option}\n"
        f"  baton top{admin_option}\n"
        f"{_of_http(cluster, may_move=may_move_http)}"
        f"{_of_model(cluster)}"
        f"Metrics are at /metrics of {metrics}.\n"
        "Ctrl-C stops the cluster."
    )


def _of_tls(cluster: LocalCluster) -> str:
    """Returns the variables for all commands printed: an administrator's certificate fits all."""
    if cluster.tls is None:
        return ""
    shown = cluster.tls.to_router("admin")
    files = {"CA": shown.ca, "CERT": shown.cert, "KEY": shown.key, "SERVER_NAME": ROUTER_NAME}
    variables = " ".join(f"BATON_TLS_{of}={shlex.quote(str(value))}" for of, value in files.items())
    return f"  export {variables}\n"


def _of_model(cluster: LocalCluster) -> str:
    names = [named(model)[0] for model in cluster.model.split(",")]
    if len(names) > 1:
        return f"Requests choose a model of {', '.join(names)}; without one {names[0]} answers.\n"
    return f"{INTRODUCTION}\n" if cluster.model == DEFAULT_MODEL else ""


def _of_http(cluster: LocalCluster, *, may_move: bool) -> str:
    port = cluster.process("router").http_port
    if port is None:
        return ""
    url = cluster.http_address
    used = f"In a browser: {url}; OpenAI's API: {url}/v1; Anthropic's: {url}"
    if may_move and port != DEFAULT_HTTP_PORT:
        used += f" (port {DEFAULT_HTTP_PORT} is taken by {holder(HOST, DEFAULT_HTTP_PORT)})"
    return f"{used}\n"
