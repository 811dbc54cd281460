"""SIGTERM handler for a process that has not begun to serve. Standard library only.

The kernel has no default action for process 1 of a container, so that SIGTERM would be lost until
a server has its own handler, which drains (`baton.serving.server`).
"""

import itertools
import json
import os
import signal
import sys
from datetime import UTC, datetime
from types import FrameType


def end_at_sigterm() -> None:
    """Ends this process at SIGTERM, with one log line, until another handler is set.

    The exit is that of an unhandled SIGTERM; of process 1, code 143.
    """
    signal.signal(signal.SIGTERM, _end)


def _end(signum: int, _frame: FrameType | None) -> None:
    # Not through logging or sys.stderr: the signal may have interrupted a call of theirs.
    os.write(2, _line("ended by SIGTERM before it served").encode())
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)  # only process 1 is still there


def _line(message: str) -> str:
    """Returns a log line. The settings may not have been read, so their sources are looked at."""
    role = next(iter(sys.argv[1:]), "baton")
    is_json = os.environ.get("BATON_LOG_FORMAT") == "json" or "json" in _values("--log-format")
    if not is_json:
        return f"baton {role}: {message}\n"
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": "INFO",
        "role": role,
        "logger": __name__,
        "message": message,
    }
    return json.dumps(line) + "\n"


def _values(flag: str) -> list[str]:
    """Returns the command line's values of a flag, as `--flag value` or `--flag=value`."""
    arguments = sys.argv[1:]
    apart = [b for a, b in itertools.pairwise(arguments) if a == flag]
    return apart + [a.partition("=")[2] for a in arguments if a.startswith(f"{flag}=")]
