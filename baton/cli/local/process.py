"""Child process of a local cluster: its command line, log, start and end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic_settings import SettingsError

from baton.cli.local.fork_server import ForkedProcess, ForkServer
from baton.cli.local.ports import HOST
from baton.cli.local.signals import signals_deferred
from baton.cli.local.tls_folder import TlsFolder
from baton.cluster.parent_death import dying_with_parent
from baton.cluster.redis.address import has_secret
from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.serving.listening import WILDCARDS, host_and_port, without_brackets
from baton.settings.loading import parse
from baton.worker.roles import modules, settings_class

Role = Literal["router", "encode", "prefill", "decode"]
Flags = Mapping[str, object]
"""Settings by field name: `{"num_blocks": 64, "prefix_caching": False}`. None: unset."""

_COMMANDS: dict[Role, str] = {
    "router": "router",
    "encode": "encode-worker",
    "prefill": "prefill-worker",
    "decode": "decode-worker",
}
# What a router imports before it is ready: the latter renders chat templates.
_ROUTER_MODULES = ("baton_router.process", "transformers.utils.chat_template_utils")
_PORTS = ("port", "admin_port", "metrics_port", "http_port")
_TAIL_LINES = 15
_TAIL_BYTES = 65536

# Addresses and certificates, which a server's command line sets: it listens on loopback, and its
# certificate is not the one with which the user's commands connect.
_NOT_INHERITED = {
    "BATON_ADVERTISE_HOST",
    "BATON_ADMIN_HOST",
    "BATON_HTTP_PORT",
    "BATON_TLS_CA",
    "BATON_TLS_CERT",
    "BATON_TLS_KEY",
}


class Process:
    """Router or worker process on this machine. Killed when this process dies, for whatever reason.

    It is forked from a process that has imported its modules, where that is possible.

    Attributes:
        name: such as "router", "prefill-0", "decode-1".
        port: port that it listens on; changed only while it is not running.
        metrics_port: port of its metrics; likewise. None: any.
        admin_port: port of its admin service; likewise. 0: any.
        http_port: port of a router's HTTP beside gRPC; likewise. None: no HTTP.
        tls: files with which an administrator connects to it; None: plaintext.
        was_signalled: `signal` has ended it, so its end is no failure.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        port: int,
        flags: Flags,
        *,
        admin_port: int = 0,
        metrics_port: int | None = None,
        http_port: int | None = None,
        tls: TlsFolder | None = None,
    ) -> None:
        self.name = name
        self.role = role
        self.port = port
        self.admin_port = admin_port
        self.metrics_port = metrics_port
        self.http_port = http_port
        self.was_signalled = False
        own = {} if tls is None else tls.own("router" if role == "router" else "worker")
        self.tls = None
        if tls is not None:
            self.tls = tls.to_router("admin") if role == "router" else tls.to_worker()
        self._flags = flags = {**own, **flags}
        url = flags.get("redis_url")
        self._secrets: Flags = {"redis_url": url} if has_secret(str(url)) else {}
        self._log_path: Path | None = None
        self._log_start = 0  # bytes that earlier starts have written
        self._popen: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def log_path(self) -> Path:
        """Log file. Valid once it was started."""
        assert self._log_path is not None, f"{self.name} was not started"
        return self._log_path

    @property
    def endpoint(self) -> str:
        """Address on this machine: "host:port"."""
        return host_and_port(self._host, self.port)

    @property
    def admin_endpoint(self) -> str:
        """Address of its admin service on this machine: "host:port"."""
        default = HOST if self.role == "router" else self._host
        return host_and_port(_reached_at(self._flags.get("admin_host"), default), self.admin_port)

    @property
    def metrics_endpoint(self) -> str | None:
        """Address of its metrics on this machine: "host:port"; None if it serves none."""
        port = self._flags.get("metrics_port", self.metrics_port)
        is_served = port and self._flags.get("metrics", True)
        return host_and_port(self._host, int(str(port))) if is_served else None

    @property
    def http_address(self) -> str:
        """HTTP address on this machine: "http://host:port", https with TLS."""
        scheme = "http" if self.tls is None else "https"
        assert self.http_port is not None, "there is no HTTP"
        return f"{scheme}://{host_and_port(self._host, self.http_port)}"

    @property
    def _host(self) -> str:
        return _reached_at(self._flags.get("host"), HOST)

    @property
    def worker_id(self) -> str:
        """Name of a worker in the cluster."""
        return str(self._flags.get("worker_id") or f"{self.role}-{self.endpoint}")

    @property
    def command(self) -> list[str]:
        """Command line. -P: no module of the working directory is imported."""
        return [sys.executable, "-P", "-m", "baton", *self._arguments]

    @property
    def _arguments(self) -> list[str]:
        own = {
            "host": HOST,
            "port": self.port,
            "admin_port": self.admin_port,
            "metrics_port": self.metrics_port,
            "http_port": self.http_port,
        }
        flags = {name: v for name, v in {**own, **self._flags}.items() if name not in self._secrets}
        return [_COMMANDS[self.role], *_flags(flags)]

    @property
    def environment(self) -> dict[str, str]:
        """Variables for secrets, since every user of the machine can read the command line."""
        return {f"BATON_{name.upper()}": str(value) for name, value in self._secrets.items()}

    @property
    def pid(self) -> int:
        """Process id. Valid once it was started."""
        assert self._popen is not None, f"{self.name} was not started"
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def has_failed(self) -> bool:
        """True if it has ended without having been signalled."""
        return self._popen is not None and not self.is_running and not self.was_signalled

    @property
    def lost_port(self) -> int | None:
        """Own port that another process listens on, if it ended for that reason."""
        error = self._last_error() if self.has_failed else ""
        ports = (getattr(self, name) for name in _PORTS)
        return next((port for port in ports if f"port {port} on " in error), None)

    def move(self, lost: int, port: int) -> None:
        """Replaces one of its ports, `lost`, by `port`. Valid while it is not running."""
        for name in _PORTS:
            if getattr(self, name) == lost:
                setattr(self, name, port)

    def check_settings(self) -> None:
        """Raises `InvalidArgumentError` for settings that a worker would refuse when it starts."""
        assert self.role != "router", "it reads other settings"
        try:
            settings = parse(settings_class(), self._arguments[1:], self.name, _NOT_INHERITED)
        except SettingsError as error:
            raise InvalidArgumentError("worker settings", str(error)) from None
        settings.engine_config()

    def preload(self) -> None:
        """Has what it will be forked from import its modules. Returns at once."""
        with signals_deferred():
            self._server()

    def _server(self) -> ForkServer | None:
        return ForkServer.shared(_ROUTER_MODULES if self.role == "router" else modules())

    def start(self, log_dir: Path) -> None:
        """Starts it, again if it had ended; appends to its log in `log_dir`, made if needed.

        Call it from a thread that lasts.
        """
        assert not self.is_running, f"{self.name} is running"
        self.was_signalled = False
        self._log_path = log_dir / f"{self.name}.log"
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            self._log_path.touch()
        except OSError as error:
            raise FailedPreconditionError(
                f"cannot write logs to {log_dir}: {error.strerror}; give another --log-dir"
            ) from error
        inherited = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        environment = {**inherited, **self.environment}
        with self._log_path.open("ab") as log, signals_deferred():
            self._log_start = log.tell()
            if (server := self._server()) is not None:
                self._popen = server.start("baton", self._arguments, environment, log)
                return
            self._popen = subprocess.Popen(  # noqa: S603 - a command line of our own
                dying_with_parent(self.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,  # Ctrl-C is for this process, which stops all in order
            )

    def signal(self, signum: int) -> None:
        """Sends a signal; after SIGKILL it has ended. Does nothing if it is not running."""
        if self._popen is None or not self.is_running:
            return
        if signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            self.was_signalled = True
        self._popen.send_signal(signum)
        if signum == signal.SIGKILL:
            self._popen.wait()

    def wait(self, deadline: float) -> bool:
        """Waits until it ends, or `time.monotonic()` is `deadline`; returns whether it ended."""
        try:
            if self._popen is not None:
                self._popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def failure(self) -> str:
        """Returns how it ended: its last error, the error that a traceback in its log ends with, or
        its exit code and the end of its log."""
        assert self._popen is not None
        code = self._popen.returncode
        assert code is not None, f"{self.name} is running"
        if code > 0 and (error := self.unexpected_error()):
            return f"failed unexpectedly: {error}; its log is {self.log_path}"
        if code > 0 and (error := self._last_error()):
            return f"failed: {error}"
        end = (
            f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        tail = self.log_tail()
        return f"{end}; " + (f"its log ends:\n{tail}" if tail else "its log is empty")

    def unexpected_error(self) -> str:
        """Returns the last line of the last traceback in its log, "Type: text"; empty if there is
        none."""
        lines = self._log_end()
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent")]
        after = lines[starts[-1] + 1 :] if starts else []
        return next((line for line in after if line and not line[0].isspace()), "")

    def log_tail(self) -> str:
        """Returns the last lines of its log since it was started."""
        return "\n".join(self._log_end()[-_TAIL_LINES:])

    def _last_error(self) -> str:
        """Returns the sentence that its command has printed last; empty if there is none."""
        sentence = re.compile(
            rf"(?:{self.role}|(?:\S+ -m )?baton(?: {_COMMANDS[self.role]})?): (.+)"
        )
        found = [match[1] for line in self._log_end() if (match := sentence.fullmatch(line))]
        return found[-1] if found else ""

    def _log_end(self) -> list[str]:
        try:
            written = self.log_path.read_bytes()[self._log_start :]
        except OSError:
            return []
        return written[-_TAIL_BYTES:].decode(errors="replace").strip().splitlines()


def _reached_at(host: object, default: str) -> str:
    """Returns the host at which this machine reaches a process that listens on `host`."""
    name = without_brackets(str(host or default))
    return HOST if name in WILDCARDS else name


def _flags(flags: Flags) -> list[str]:
    line: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            line += [f"--{flag}", str(value)]
    return line
