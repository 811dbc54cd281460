"""`baton up`: a cluster on this machine until a signal."""

import shlex
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from baton.cli.display import status_display
from baton.cli.local_cluster import LocalCluster
from baton.cli.options import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS
from baton.cli.ports import is_free
from baton.cli.signals import interrupted_by_signals
from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.models import DEFAULT_MODEL, INTRODUCTION
from baton.serving.access import ROUTER_NAME
from baton.serving.optional_dependencies import check_extra

DEFAULT_HTTP_PORT = 8000
_ADMIN_PORT = int(DEFAULT_ADMIN_ADDRESS.rpartition(":")[2])
_CHECK_INTERVAL = 0.2


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


def print_commands(cluster: LocalCluster) -> None:
    """Prints the commands that `run` would start, each as a line for a shell."""
    if cluster.redis is not None:
        print(f"# an embedded Redis at {cluster.redis_url}")
    if names := sorted({name for p in cluster.processes for name in p.environment}):
        print(f"# with {', '.join(names)} in the environment, since it holds a password")
    for process in cluster.processes:
        print(shlex.join(process.command))


def run(cluster: LocalCluster, console: Console) -> None:
    """Starts the cluster, prints how to use it, and stops it at a signal or when a process dies.

    Raises as `LocalCluster.start`, and `UnavailableError` if a process died by itself.
    """
    with interrupted_by_signals():
        try:
            _serve(cluster, console)
        except KeyboardInterrupt:
            console.print("stopping; Ctrl-C again kills")
        finally:
            cluster.stop()


def _serve(cluster: LocalCluster, console: Console) -> None:
    started_at = time.monotonic()
    with status_display(console) as on_status:
        cluster.start(timeout=None, on_status=on_status)
    console.print(_how_to_use(cluster, time.monotonic() - started_at), highlight=False)
    has_redis = cluster.redis is not None
    while True:
        cluster.check()
        if cluster.redis is not None and has_redis and not cluster.redis.is_running:
            has_redis = False
            console.print("Redis died. The workers continue to serve; new ones cannot join.")
        time.sleep(_CHECK_INTERVAL)


def _how_to_use(cluster: LocalCluster, seconds: float) -> str:
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
        f"{_of_http(cluster)}"
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
    return f"{INTRODUCTION}\n" if cluster.model == DEFAULT_MODEL else ""


def _of_http(cluster: LocalCluster) -> str:
    if cluster.process("router").http_port is None:
        return ""
    return f"In a browser: {cluster.http_address}; OpenAI's API: {cluster.http_address}/v1\n"
