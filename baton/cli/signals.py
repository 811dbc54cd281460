"""The signals that ask for the end: as Ctrl-C, for commands that have something to stop."""

import signal
import threading
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
        _restore(before)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Inside, those signals wait for the end of the block, which must be short.

    A child that is just being started would otherwise be known to nobody. Handlers run in the main
    thread alone, so elsewhere there is nothing to defer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    before = {
        signum: signal.signal(signum, lambda number, _: pending.append(number))
        for signum in _ENDINGS
    }
    try:
        yield
    finally:
        _restore(before)
        for signum in pending:
            signal.raise_signal(signum)


def _restore(handlers: "dict[signal.Signals, signal._HANDLER]") -> None:
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
