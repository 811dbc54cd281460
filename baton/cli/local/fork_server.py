"""Fork server: processes start fast, as forks of one that has imported their modules.

Importing torch and transformers takes seconds of a core, loading a small model a fraction of one.
So a process imports them once, and every worker of this machine is a fork of it, with a command
line, an environment and a log of its own. Routers, without torch, are forks of another one.

    server = ForkServer.shared(modules())
    child = server.start("baton", ["decode-worker", "--port", "7001"], os.environ, log)
    child.wait(10.0)

Messages over the sockets: a request with the descriptors of a socket for its answers and of the
child's log; over that socket "pid N", with a pidfd, and at last "exit CODE"; or "failed REASON" if
the child could not be forked.
"""

import atexit
import contextlib
import ctypes
import errno
import gc
import importlib
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, ClassVar, NoReturn

from setproctitle import setproctitle

# Variables that imports do not read; workers read them later, from their own environment.
_RUNTIME = ("BATON_", "PYTEST_", "OTEL_BSP_", "OTEL_EXPORTER_", "OTEL_SERVICE_", "OTEL_TRACES_")
_MAX_REQUEST = 1 << 20
_MAX_ANSWER = 1024
_PR_SET_PDEATHSIG = 1
# Seconds after which a thread that waits looks whether another has taken the message.
_LOOKS_AGAIN_AFTER = 0.1


class ForkedProcess:
    """Child of the fork server, with the methods of `subprocess.Popen` that are used. For any
    thread: one may wait while others ask.

    Attributes:
        returncode: as in `subprocess`, negative for a signal; None while it runs. `os.EX_OSERR` if
            it could not be forked; its log then has the reason.
    """

    def __init__(self, line: socket.socket, log: int) -> None:
        """`line`: for the server's messages. `log`: descriptor of its log. Closes both."""
        self.returncode: int | None = None
        line.setblocking(False)
        self._line = line
        self._log = log
        self._pid = 0
        self._descriptor = -1
        self._lock = threading.Lock()  # of all of these

    @property
    def pid(self) -> int:
        """Process id; waits for the imports before the first child. 0 if it never ran."""
        while not self._pid and self.returncode is None:
            self._receive(_LOOKS_AGAIN_AFTER)
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
            left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._receive(min(left, _LOOKS_AGAIN_AFTER)) and not left:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Signals this process and no later one of its id. If it is not forked yet, since the
        server still imports, a signal that would end it cancels it."""
        self.poll()
        with self._lock:
            if self.returncode is not None:
                return
            if self._pid:
                with contextlib.suppress(ProcessLookupError):
                    self._send(signum)
            elif signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
                self._end(-signum)

    def _send(self, signum: int) -> None:
        if self._descriptor >= 0:
            signal.pidfd_send_signal(self._descriptor, signum)
        else:  # this process had no descriptor left for it
            os.kill(self._pid, signum)

    def _receive(self, timeout: float) -> bool:
        """Takes one message, waiting up to `timeout` seconds; returns whether there was one."""
        if timeout:
            self._await(timeout)
        with self._lock:
            if self.returncode is not None:  # another thread has taken the last message
                return True
            try:
                message, descriptors, _, _ = socket.recv_fds(self._line, _MAX_ANSWER, 1)
            except BlockingIOError:
                return False
            except ConnectionError:
                message, descriptors = b"", []
            self._read(message, descriptors)
        return True

    def _await(self, timeout: float) -> None:
        """Waits until there may be a message."""
        with self._lock:
            if self.returncode is not None:
                return
            line = self._line.fileno()
        watch = select.poll()
        watch.register(line, select.POLLIN)
        watch.poll(1000 * timeout)

    def _read(self, message: bytes, descriptors: list[int]) -> None:
        kind, _, value = message.decode().partition(" ")
        if kind == "pid":
            self._pid, self._descriptor = int(value), next(iter(descriptors), -1)
        elif kind == "exit":
            self._end(int(value))
        elif self._pid:
            # A server that is gone has taken its children with it: the kernel kills them.
            self._end(-signal.SIGKILL)
        else:
            self._fail(value or "the fork server has ended or has no file descriptor left")

    def _fail(self, reason: str) -> None:
        advice = "raise `ulimit -n` and `ulimit -u`, or start fewer processes"
        os.write(self._log, f"baton: cannot fork this process: {reason}; {advice}\n".encode())
        self._end(os.EX_OSERR)

    def _end(self, returncode: int) -> None:
        self.returncode = returncode
        self._line.close()
        os.close(self._log)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ForkServer:
    """Process that forks others. It ends with this one, and its children with it."""

    _shared: ClassVar[dict[object, "ForkServer"]] = {}  # by modules and environment
    _lock = threading.Lock()

    def __init__(self, preload: Sequence[str]) -> None:
        """Starts it. `preload`: modules to import, if it can."""
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
    def shared(cls, preload: Sequence[str]) -> "ForkServer | None":
        """Returns this process's server with these modules and the environment variables that
        imports read. Returns None if the platform is not Linux."""
        if sys.platform != "linux":
            return None
        read = {name: v for name, v in os.environ.items() if not name.startswith(_RUNTIME)}
        key = (tuple(preload), frozenset(read.items()))
        with cls._lock:
            server = cls._shared.get(key)
            if server is None or not server.is_running:
                cls._shared[key] = server = cls(preload)
                atexit.register(server.close)
            return server

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def start(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> ForkedProcess:
        """Runs `python -m module` in a process group of its own, with its output in `log`. Returns
        at once, though the first child has to wait for the imports."""
        request = {"module": module, "arguments": arguments, "environment": environment}
        with contextlib.ExitStack() as on_failure:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                on_failure.callback(ours.close)
                own_log = os.dup(log.fileno())  # before the request: no child without a handle
                on_failure.callback(os.close, own_log)
                descriptors = [theirs.fileno(), log.fileno()]
                socket.send_fds(self._line, [json.dumps(request).encode()], descriptors)
            on_failure.pop_all()
        return ForkedProcess(ours, own_log)

    def close(self) -> None:
        """Kills the server and all its children."""
        self._popen.kill()
        self._popen.wait()
        self._line.close()


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

    def run(self) -> NoReturn:
        """Runs the command, and ends this process without the interpreter's own end, at which
        libraries that were imported before the fork report all their objects as leaked."""
        code = _exit_code_of(self.module)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code_of(module: str) -> int:
    """Runs `python -m module`; prints the error that ends it, and returns its exit code."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # as the interpreter would
        traceback.print_exc()
        return 1
    return 0


class _Children:
    """Server's side: forks and reaps children. Independent of what they run."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._server = os.getpid()
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
                message, descriptors, _, _ = socket.recv_fds(self._requests, _MAX_REQUEST, 2)
                if not message:
                    self._end()
                    return None
                if (job := self._start(message, descriptors)) is not None:
                    return job

    def _start(self, message: bytes, descriptors: list[int]) -> _Job | None:
        """Forks a child unless the client has cancelled it. Returns its command in the child.

        A start that fails is reported to the client, and affects no other child.
        """
        if not descriptors:  # the kernel had none left to give, and has closed the line
            return None
        line, *logs = descriptors
        answers = socket.socket(fileno=line)
        try:
            if _is_closed(answers):
                raise ConnectionError("cancelled by the client")
            if not logs:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            job = _Job(**json.loads(message), log=logs[0])
            pid = self._fork(answers)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            with answers, contextlib.suppress(OSError):
                answers.send(f"failed {reason}".encode())
        else:
            if pid == 0:
                self._become_child(answers)
                return job
        for log in logs:
            os.close(log)
        return None

    def _fork(self, line: socket.socket) -> int:
        """Returns the child's process id in the server, 0 in the child. Raises `OSError`, and
        leaves no child."""
        pid = os.fork()
        if pid == 0:
            return 0
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._running[descriptor] = pid, line
        self._poll.register(descriptor, select.POLLIN)
        with contextlib.suppress(OSError):
            socket.send_fds(line, [f"pid {pid}".encode()], [descriptor])
        return pid

    def _become_child(self, line: socket.socket) -> None:
        """Has this process end with the server, and closes the server's files in it."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._server:
            os._exit(1)
        self._requests.close()
        line.close()
        for descriptor, (_, other) in self._running.items():
            os.close(descriptor)
            other.close()

    def _reap(self, descriptor: int) -> None:
        pid, line = self._running.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with line, contextlib.suppress(OSError):
            line.send(f"exit {os.waitstatus_to_exitcode(status)}".encode())

    def _end(self) -> None:
        for descriptor, (pid, _) in list(self._running.items()):
            os.kill(pid, signal.SIGKILL)
            self._reap(descriptor)


def _is_closed(line: socket.socket) -> bool:
    """Returns whether the client has closed its end."""
    watch = select.poll()
    watch.register(line, 0)
    return bool(watch.poll(0))


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
        job.run()


if __name__ == "__main__":
    _main()
