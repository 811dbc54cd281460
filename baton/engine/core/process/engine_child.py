"""Child process for an engine, forked before this process has threads, and its end.

A fork has all modules imported, which takes seconds, and shares their memory. It is made before the
server and the event loop exist, since Python code between a fork and its end can deadlock on locks
that other threads held.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field

from setproctitle import setproctitle

from baton.engine.core.cpu_time import cpu_seconds_of
from baton.engine.core.process import child

_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class EngineChild:
    """Child process that waits for the order to load an engine.

    Attributes:
        control: socket for control messages.
        pidfd: descriptor that is readable once it has ended.
        exit_code: negative for a signal; None until `reap` after the end.
    """

    pid: int
    control: socket.socket
    pidfd: int
    exit_code: int | None = field(default=None, init=False)

    def kill(self) -> None:
        """Ends it at once, and no later process of its id."""
        if self.exit_code is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    @property
    def cpu_seconds(self) -> float:
        """CPU time that it has used, of all its threads; 0 once it is gone."""
        return cpu_seconds_of(f"/proc/{self.pid}") or 0.0

    def reap(self) -> None:
        """Waits for its end and sets `exit_code`."""
        if self.exit_code is None:
            _, status = os.waitpid(self.pid, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)

    @property
    def end(self) -> str:
        """Its end in words, after `reap`."""
        code = self.exit_code
        assert code is not None, "a process that has not been waited for"
        if code >= 0:
            return f"its process {self.pid} ended with code {code}"
        name = signal.Signals(-code).name
        cause = ", perhaps since memory is short" if code == -signal.SIGKILL else ""
        return f"its process {self.pid} was killed by {name}{cause}"

    def close(self) -> None:
        """Closes its descriptors, of which the socket ends a process that still runs."""
        self.control.close()
        os.close(self.pidfd)


def fork_engine() -> EngineChild:
    """Forks a child for an engine and returns in the parent alone. The child dies with the thread
    that calls this, and ignores the signals by which a terminal or a service manager ends a group
    of processes: its parent drains, and then stops it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_engine(parent, theirs)
    theirs.close()
    return EngineChild(pid, ours, os.pidfd_open(pid))


def _become_engine(parent: int, control: socket.socket) -> None:
    """Runs the child and ends this process, without what the parent has registered for its end."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            # Handlers, and not SIG_IGN, which programs that the engine starts would inherit.
            for signum in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, lambda _signum, _frame: None)
            setproctitle(f"baton engine of {parent}")
            gc.freeze()  # a collection would traverse all that was imported, and copy its pages
            code = child.run(control)
    except BaseException:  # as the interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
