"""Files that may be replaced at any time, read again once they have been."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from baton.errors import BatonError, FailedPreconditionError

# How often files are looked at, at most.
INTERVAL_SECONDS = 1.0

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Stamp: TypeAlias = "tuple[tuple[int, ...], ...]"


class WatchedFiles(Generic[T]):
    """Parsed content of files that are read again after they have changed. Safe to share between
    threads.

    Of files that are no good, what they said before stays, which is logged once.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        *,
        interval: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` reads them all, and raises a `BatonError` where they are no good; so does this.
        `interval`: seconds between two looks at them, at least."""
        self._paths = paths
        self._read = read
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = _stamp_of(paths)
        self._content = self._read_at(self._stamp)
        self._next_look = clock() + interval

    def current(self) -> T:
        """What they say now, or have said `interval` ago: the very same object as long as that is
        the same."""
        with self._lock:
            now = self._clock()
            if now >= self._next_look:
                self._next_look = now + self._interval
                self._look()
            return self._content

    def _look(self) -> None:
        stamp = _stamp_of(self._paths)
        if stamp == self._stamp:
            return
        self._stamp = stamp  # also if they are no good: perhaps not all of them are there yet
        try:
            content = self._read_at(stamp)
        except BatonError as error:
            logger.warning("%s: what was there before still holds: %s", self._names, error)
            return
        if content != self._content:
            self._content = content
            logger.info("%s: what is new there holds now", self._names)

    def _read_at(self, stamp: _Stamp) -> T:
        content = self._read()
        if _stamp_of(self._paths) != stamp:
            raise FailedPreconditionError("changed while they were read")
        return content

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self._paths))


def _stamp_of(paths: Sequence[Path]) -> _Stamp:
    """Another one whenever a file is another one, or gone."""
    return tuple(map(_stamp_of_one, paths))


def _stamp_of_one(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
