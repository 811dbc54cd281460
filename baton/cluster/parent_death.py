"""Child processes that do not outlive their parent, however it dies. Knows nothing of what they do.

The kernel kills the child when its parent dies, kill -9 included. It is asked from a fresh
interpreter that then becomes the wanted program, because code of ours between fork and exec can
deadlock in a process with threads.
"""

import os
import sys
from collections.abc import Sequence

# PR_SET_PDEATHSIG is 1; a parent already gone is noticed by its id.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """The command line that runs `command`, under the same process id, until this process dies.

    The kernel counts the thread that starts the child as the parent, so start it from one that
    lives on. Linux; elsewhere `command` itself, which nothing ends but a signal.

    Args:
        command: the program as an absolute path, then its arguments.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
