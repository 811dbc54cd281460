"""Parent-death signal (PR_SET_PDEATHSIG) for child processes, whatever program they run.

The kernel kills the child when its parent dies, kill -9 included. A fresh interpreter sets the
signal and then executes the program, because Python code between fork and exec can deadlock in a
process with threads.
"""

import os
import sys
from collections.abc import Sequence

# PR_SET_PDEATHSIG is 1. The parent's id shows if the parent has died before the call.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """Returns a command line that runs `command`, in the same process id, until this process dies.

    To the kernel the parent is the thread that starts the child, so start it from a thread that
    does not end first. Linux only; elsewhere returns `command`, which outlives this process.

    Args:
        command: the program's absolute path, then its arguments.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
