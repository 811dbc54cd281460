"""Processes for engines of tests, forked from one that has the modules imported and no threads.

A test's own process has threads, so that a fork of it could deadlock. `python -m` this module is
the process that forks; its forks become children of the tests' process, which waits for them as an
engine's parent does.
"""

import ctypes
import gc
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from baton.engine.core.process import child
from baton.engine.core.process.engine_child import EngineChild
from baton.engine.executor.models import preload  # noqa: F401
from tests.support.engine import host_ipc

_BY_DESCRIPTOR, _BY_HANDLE = b"by descriptor", b"by handle"
_PR_SET_CHILD_SUBREAPER = 36


class Zygote:
    """Process that forks engines for this one."""

    def __init__(self, requests: socket.socket, sharing: bytes = _BY_DESCRIPTOR) -> None:
        self._requests = requests
        self._sharing = sharing

    @property
    def by_handle(self) -> "Zygote":
        """This process as one that forks engines which share their pools as on a GPU."""
        return Zygote(self._requests, _BY_HANDLE)

    def fork(self) -> EngineChild:
        """Returns a child that waits for the order to load an engine."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._requests, [self._sharing], [theirs.fileno()])
        pid = int(self._requests.recv(64))
        self._requests.recv(64)  # the process between has ended: the child is this process's
        return EngineChild(pid, ours, os.pidfd_open(pid))


@contextmanager
def zygote() -> Iterator[Zygote]:
    """Runs a process that forks engines."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    try:
        with ours:
            yield Zygote(ours)
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _serve(requests: socket.socket) -> None:
    gc.collect()
    gc.freeze()  # pages that are never collected are never copied
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 64, 1)
        if not message:
            return
        between = os.fork()
        if between == 0:  # ends at once, so that its child is the tests'
            if message == _BY_HANDLE:
                host_ipc.install()
            _fork_engine(requests, socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])
        os.waitpid(between, 0)
        requests.send(b"ended")


def _fork_engine(requests: socket.socket, control: socket.socket) -> None:
    code = 1
    try:
        pid = os.fork()
        if pid:
            requests.send(str(pid).encode())
        else:
            requests.close()
            code = child.run(control)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
