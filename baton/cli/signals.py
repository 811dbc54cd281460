"""SIGTERM and SIGHUP as Ctrl-C, for commands that have something to stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Inside, each signal that asks for the end raises `KeyboardInterrupt`. Main thread only.

    SIGINT as well: a shell starts background commands with it ignored.
    """
    before = {signum: signal.signal(signum, _interrupt) for signum in _ENDINGS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
