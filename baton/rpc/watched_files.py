"""Watched files: reloaded after they have been replaced."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from baton.errors import BatonError, FailedPreconditionError

# Seconds between two checks of the files, at least.
INTERVAL_SECONDS = 1.0

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Stamp: TypeAlias = "tuple[tuple[int, ...], ...]"


class WatchedFiles(Generic[T]):
    """Parsed content of files that are reloaded after they have changed. Thread-safe.

    If changed files are invalid, the previous content stays valid, and one warning is logged.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        *,
        interval: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes `read`, which parses all files, and raises a `BatonError` if they are invalid; so
        does this. `interval`: seconds between two checks, at least."""
        self._paths = paths
        self._read = read
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = _stamp_of(paths)
        self._content = self._read_at(self._stamp)
        self._next_poll = clock() + interval

    def current(self) -> T:
        """Returns the content, at most `interval` seconds old: the very same object until the
        content changes."""
        with self._lock:
            now = self._clock()
            if now >= self._next_poll:
                self._next_poll = now + self._interval
                self._poll()
            return self._content

    def _poll(self) -> None:
        stamp = _stamp_of(self._paths)
        if stamp == self._stamp:
            return
        self._stamp = stamp  # also if they are invalid: perhaps not all of them are there yet
        try:
            content = self._read_at(stamp)
        except BatonError as error:
            logger.warning("%s: reload failed; earlier content is kept: %s", self._names, error)
            return
        if content != self._content:
            self._content = content
            logger.info("%s: reloaded", self._names)

    def _read_at(self, stamp: _Stamp) -> T:
        content = self._read()
        if _stamp_of(self._paths) != stamp:
            raise FailedPreconditionError("changed while they were read")
        return content

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self._paths))


def _stamp_of(paths: Sequence[Path]) -> _Stamp:
    """Returns a stamp that changes whenever a file is replaced, changed or deleted."""
    return tuple(map(_stamp_of_one, paths))


def _stamp_of_one(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
