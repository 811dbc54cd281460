"""Throttled log: warns of a kind of fault at most once a minute, whatever its number."""

import logging
import time
from collections.abc import Callable

_SECONDS = 60.0


class ThrottledLog:
    """Throttled log of one component, so that a client that writes to Redis cannot fill the log.

    Args:
        logger: logger of the component.
        seconds: least seconds between two warnings of one kind.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        seconds: float = _SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._seconds = seconds
        self._clock = clock
        self._next: dict[str, float] = {}
        self._num_withheld: dict[str, int] = {}

    def warning(self, message: str, *args: object, kind: str | None = None) -> None:
        """Logs a warning, or counts it for the next one of its kind. Kinds are few; None: `message`
        is the kind."""
        now, kind = self._clock(), message if kind is None else kind
        if now < self._next.get(kind, now):
            self._num_withheld[kind] = self._num_withheld.get(kind, 0) + 1
            return
        self._next[kind] = now + self._seconds
        withheld = self._num_withheld.pop(kind, 0)
        suffix = f" (and {withheld} more like this)" if withheld else ""
        self._logger.warning(message + "%s", *args, suffix)
