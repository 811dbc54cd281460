"""Fork server: workers start fast, as forks of one process that has imported their modules.

Importing torch and transformers takes seconds of a core, loading a small model a fraction of one.
So a process imports them once, and every worker of this machine is a fork of it, with a command
line, an environment and a log of its own.

    server = ForkServer.shared()
    child = server.start("baton", ["decode-worker", "--port", "7001"], os.environ, log)
    child.wait(10.0)

Messages over the sockets: a request with the descriptors of the child's log and of a socket for
its answers; over that socket the process id, with a pidfd, and at last the exit code.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import IO

from setproctitle import setproctitle

# Variables that imports do not read; workers read them later, from their own environment.
_RUNTIME = ("BATON_", "PYTEST_", "OTEL_BSP_", "OTEL_EXPORTER_", "OTEL_SERVICE_", "OTEL_TRACES_")
_MAX_REQUEST = 1 << 20
_MAX_ANSWER = 64
_PR_SET_PDEATHSIG = 1


class ForkedProcess:
    """Child of the fork server, with the methods of `subprocess.Popen` that are used.

    Attributes:
        returncode: as in `subprocess`, negative for a signal; None while it runs.
    """

    def __init__(self, line: socket.socket) -> None:
        self.returncode: int | None = None
        self._line = line
        self._pid = 0
        self._descriptor = -1

    @property
    def pid(self) -> int:
        """Process id; waits for the imports before the first child. 0 if it never ran."""
        while not self._pid and self.returncode is None:
            self._receive(None)
        return self._pid

    def poll(self) -> int | None:
        """Updates and returns `returncode`."""
        while self.returncode is None and self._receive(0.0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it ends, up to `timeout` seconds. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._receive(left):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Signals this process and no later one of its id. If it is not forked yet, since the
        server still imports, a signal that would end it cancels it."""
        self.poll()
        if self._pid and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signum)
        elif self.returncode is None and signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            self._end(-signum)

    def _receive(self, timeout: float | None) -> bool:
        """Takes one message, waiting up to `timeout` seconds; returns whether there was one."""
        if not select.select([self._line], [], [], timeout)[0]:
            return False
        try:
            message, descriptors, _, _ = socket.recv_fds(self._line, _MAX_ANSWER, 1)
        except ConnectionError:
            message, descriptors = b"", []
        if descriptors:
            self._pid, self._descriptor = int(message), descriptors[0]
        else:
            # A server that is gone has taken its children with it: the kernel kills them.
            self._end(int(message) if message else -signal.SIGKILL)
        return True

    def _end(self, returncode: int) -> None:
        self.returncode = returncode
        self._line.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ForkServer:
    """Process that forks workers. It ends with this one, and its children with it."""

    _shared: "ForkServer | None" = None
    _lock = threading.Lock()

    def __init__(self, preload: Sequence[str] | None = None) -> None:
        """Starts it. `preload`: modules to import, if it can; None: those of workers' roles."""
        if preload is None:
            preload = [point.module for point in entry_points(group="baton.roles")]
        self._environment = _import_environment()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), *preload]
            self._popen = subprocess.Popen(  # noqa: S603 - a command line of our own
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    @classmethod
    def shared(cls) -> "ForkServer | None":
        """Returns the server of this process, a new one if environment variables that imports read
        have changed. Returns None if the platform is not Linux."""
        if sys.platform != "linux":
            return None
        with cls._lock:
            last = cls._shared
            if last is None or not last.is_running or last._environment != _import_environment():
                cls._shared = cls()
                atexit.register(cls._shared.close)
            return cls._shared

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def start(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> ForkedProcess:
        """Runs `python -m module` in a process group of its own, with its output in `log`. Returns
        at once, though the first child has to wait for the imports."""
        request = {"module": module, "arguments": arguments, "environment": environment}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = [log.fileno(), theirs.fileno()]
            socket.send_fds(self._line, [json.dumps(request).encode()], descriptors)
        return ForkedProcess(ours)

    def close(self) -> None:
        """Kills the server and all its children."""
        self._popen.kill()
        self._popen.wait()
        self._line.close()


def _import_environment() -> dict[str, str]:
    return {name: v for name, v in os.environ.items() if not name.startswith(_RUNTIME)}


@dataclass(frozen=True, slots=True)
class _Job:
    """Command of a child: `python -m module arguments`."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    log: int

    def become(self) -> None:
        """Gives this process the group, output, title and environment of the command."""
        os.setpgid(0, 0)
        os.dup2(self.log, 1)
        os.dup2(self.log, 2)
        os.close(self.log)
        sys.argv = [self.module, *self.arguments]
        setproctitle(" ".join([sys.executable, "-P", "-m", *sys.argv]))
        os.environ.clear()
        os.environ.update(self.environment)


class _Children:
    """Server's side: forks and reaps children. Independent of what they run."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._running: dict[int, tuple[int, socket.socket]] = {}  # by descriptor of the process
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)

    def serve(self) -> _Job | None:
        """Forks and reaps until the client is gone. Returns in each child too, with the command
        that it is to run."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._running:
                    self._reap(descriptor)
                    continue
                job, line = self._next_request()
                if line is None:
                    self._end()
                    return None
                if job is not None and self._fork(line) == 0:
                    return job
                if job is not None:
                    os.close(job.log)

    def _next_request(self) -> tuple[_Job | None, socket.socket | None]:
        """Returns a job and the socket for its answers. No socket: the client is gone; no job: the
        client has cancelled it."""
        message, descriptors, _, _ = socket.recv_fds(self._requests, _MAX_REQUEST, 2)
        if not message:
            return None, None
        log, line = descriptors[0], socket.socket(fileno=descriptors[1])
        watch = select.poll()
        watch.register(line, 0)
        if watch.poll(0):  # the client has closed it
            line.close()
            os.close(log)
            return None, line
        return _Job(**json.loads(message), log=log), line

    def _fork(self, line: socket.socket) -> int:
        """Returns the child's process id in the server, 0 in the child."""
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            self._requests.close()
            line.close()
            for descriptor, (_, other) in self._running.items():
                os.close(descriptor)
                other.close()
            return 0
        descriptor = os.pidfd_open(pid)
        self._running[descriptor] = pid, line
        self._poll.register(descriptor, select.POLLIN)
        with contextlib.suppress(OSError):
            socket.send_fds(line, [str(pid).encode()], [descriptor])
        return pid

    def _reap(self, descriptor: int) -> None:
        pid, line = self._running.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with line, contextlib.suppress(OSError):
            line.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _end(self) -> None:
        for descriptor, (pid, _) in list(self._running.items()):
            os.kill(pid, signal.SIGKILL)
            self._reap(descriptor)


def _main() -> None:
    descriptor, *preload = sys.argv[1:]
    setproctitle(f"{sys.executable} -m {__spec__.name}")
    for name in preload:
        with contextlib.suppress(ImportError):  # a worker reports it better, in its own log
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # pages that are never collected are never copied
    with socket.socket(fileno=int(descriptor)) as requests:
        job = _Children(requests).serve()
    if job is not None:
        job.become()
        runpy.run_module(job.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
