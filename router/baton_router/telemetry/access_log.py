"""Access log: a line of JSON for each call of a client, without any text of prompts or answers.

A thread writes the lines, so that a slow disk delays no call; beyond a bound they are dropped.
"""

import json
import logging
import queue
import sys
from collections.abc import Mapping
from logging.handlers import QueueListener, WatchedFileHandler

from baton.cluster.throttled_log import ThrottledLog
from baton.errors import FailedPreconditionError

STDOUT = "-"
# Lines that wait for the disk.
_MAX_WAITING = 10_000

_log = ThrottledLog(logging.getLogger(__name__))


class AccessLog:
    """Access log of one router, from its construction to `close`."""

    def __init__(self, path: str) -> None:
        """Appends to the file at `path`, again to a new one once it was moved away; "-" is standard
        output. Raises `FailedPreconditionError` if it cannot be written."""
        try:
            handler: logging.Handler = (
                logging.StreamHandler(sys.stdout) if path == STDOUT else WatchedFileHandler(path)
            )
        except OSError as error:
            raise FailedPreconditionError(
                f"cannot write --access-log {path}: {error.strerror}; give another file"
            ) from error
        self._handler = handler
        self._queue: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_WAITING)
        self._listener = QueueListener(self._queue, handler)
        self._listener.start()

    def write(self, fields: Mapping[str, object]) -> None:
        """Writes a line, soon."""
        record = logging.makeLogRecord({"msg": json.dumps(fields)})
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            _log.warning("the access log's disk is slow or full: lines are dropped")

    def close(self) -> None:
        """Writes the lines that wait."""
        self._listener.stop()
        self._handler.close()
