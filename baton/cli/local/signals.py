"""Termination signals, handled as Ctrl-C, for commands that have something to stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Makes each termination signal raise `KeyboardInterrupt` in the block. Main thread only.

    SIGINT as well: a shell starts background commands with it ignored.
    """
    before = {signum: signal.signal(signum, _interrupt) for signum in _ENDINGS}
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defers those signals to the end of the block, which must be short.

    Otherwise a child that is just being started could be lost track of. Handlers run in the main
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
