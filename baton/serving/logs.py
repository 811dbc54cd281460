"""Log lines on stderr, human-readable or JSON, each with its request id and trace id.

Callers keep prompt text out of log messages; nothing here adds any.
"""

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

from opentelemetry import trace

LogFormat = Literal["human", "json"]

_request_id: ContextVar[str] = ContextVar("baton_request_id", default="")
_trace_id: ContextVar[str] = ContextVar("baton_trace_id", default="")


def name_request(request_id: str) -> None:
    """Adds the request id, and the trace id if sampled, to all later lines of this task and of
    tasks that it starts. A task that serves one call has nothing else to log."""
    _request_id.set(request_id)
    _trace_id.set(_present_trace())


def configure_logging(level: str, format: LogFormat, role: str) -> None:  # noqa: A002
    """Sends all logging of this process to stderr. `role` names the process in each line.

    Replaces what was configured before.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(role) if format == "json" else HumanFormatter(role))
    logging.basicConfig(level=level, handlers=[handler], force=True)


class HumanFormatter(logging.Formatter):
    """Human-readable lines: `12:00:00.123 INFO router [request trace] module: message`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        about = " ".join(filter(None, (_request_id.get(), _present_trace() or _trace_id.get())))
        about = f" [{about}]" if about else ""
        return (
            f"{moment}.{int(record.msecs):03d} {record.levelname} {self._role}{about} "
            f"{record.name}: {record.message}"
        )


class JsonFormatter(logging.Formatter):
    """JSON lines with time (RFC 3339), level, role, logger, message, request_id, trace_id,
    exception."""

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
        trace_id = _present_trace() or _trace_id.get()
        if trace_id:
            line["trace_id"] = trace_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _present_trace() -> str:
    """Returns the id of the current trace, in hex; empty outside a trace."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""
