"""A file that may be replaced at any time, read again once it has been."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from baton.errors import BatonError
from baton.serving.deadline import Clock

T = TypeVar("T")

# How often a file is looked at, at most.
INTERVAL_SECONDS = 1.0

logger = logging.getLogger(__name__)

_Stamp = tuple[int, ...]


class WatchedFile(Generic[T]):
    """What a file says. One that cannot be read stays as it was, which is logged once."""

    def __init__(
        self, path: Path, read: Callable[[Path], T], clock: Clock = time.monotonic
    ) -> None:
        """`read` raises a `BatonError` for a file that is no good; so does this."""
        self._path = path
        self._read = read
        self._clock = clock
        # Taken before the content, so that what is written meanwhile is read as well.
        self._stamp = _stamp_of(path)
        self._content = read(path)
        self._next_look = clock() + INTERVAL_SECONDS

    def current(self) -> T:
        """What it says now, or has said a second ago: the very same object until it changes."""
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + INTERVAL_SECONDS
            stamp = _stamp_of(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._take()
        return self._content

    def _take(self) -> None:
        try:
            self._content = self._read(self._path)
        except BatonError as error:
            logger.error("what %s said before still holds: %s", self._path, error)
            return
        logger.info("%s has changed, and what it says now holds", self._path)


def _stamp_of(path: Path) -> _Stamp:
    """Another one whenever the file is another one, or gone."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
