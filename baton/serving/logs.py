"""Log lines on stderr, for people or as JSON, each with the request it belongs to.

Whoever logs keeps prompt text out; nothing here adds any.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["human", "json"]

_request_id: ContextVar[str] = ContextVar("baton_request_id", default="")


@contextmanager
def request_logged_as(request_id: str) -> Iterator[None]:
    """Lines logged inside, by this task or one it starts, carry the request's id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def configure_logging(level: str, format: LogFormat, role: str) -> None:  # noqa: A002
    """Sends all logging of this process to stderr. `role` names the process in each line.

    Replaces what was configured before.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(role) if format == "json" else HumanFormatter(role))
    logging.basicConfig(level=level, handlers=[handler], force=True)


class HumanFormatter(logging.Formatter):
    """`12:00:00.123 INFO router [request] module: message`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        request = f" [{_request_id.get()}]" if _request_id.get() else ""
        return (
            f"{moment}.{int(record.msecs):03d} {record.levelname} {self._role}{request} "
            f"{record.name}: {record.message}"
        )


class JsonFormatter(logging.Formatter):
    """One object a line: time (RFC 3339), level, role, logger, message, request_id, exception."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if _request_id.get():
            line["request_id"] = _request_id.get()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
