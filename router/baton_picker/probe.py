"""Probe of a model server: whether it answers, and its load by its own metrics."""

import http.client
import logging
import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 1.0
_MAX_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Reading:
    """Load of a model server by its metrics.

    Attributes:
        num_waiting: queued requests; None: not reported.
        kv_usage: used part of its KV cache, from 0 to 1; None: not reported.
    """

    num_waiting: float | None = None
    kv_usage: float | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Probe by TCP, or by the metrics at a path.

    Attributes:
        path: path of the metrics; empty: connects and reads nothing.
        waiting_metric, kv_metric: names of the gauges of queued requests and of KV cache usage.
    """

    path: str
    waiting_metric: str
    kv_metric: str

    def read(self, host: str, port: int) -> Reading:
        """Returns the server's load, of which only what it reports is known. Raises `OSError` if
        it does not answer. Blocks for `_TIMEOUT_SECONDS` per operation: for use in a thread."""
        if not self.path:
            with socket.create_connection((host, port), _TIMEOUT_SECONDS):
                return Reading()
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
        try:
            connection.request("GET", self.path)
            response = connection.getresponse()
            text = response.read(_MAX_BYTES) if response.status == 200 else b""
        except http.client.HTTPException as error:
            raise ConnectionError(f"no HTTP answer: {error}") from error
        finally:
            connection.close()
        return self._reading(text.decode(errors="replace"))

    def _reading(self, text: str) -> Reading:
        try:
            waiting = list(_values(text, self.waiting_metric))
            usage = list(_values(text, self.kv_metric))
        except ValueError as error:
            logger.debug("metrics of a model server are not readable: %s", error)
            return Reading()
        return Reading(sum(waiting) if waiting else None, max(usage, default=None))


def _values(text: str, name: str) -> Iterator[float]:
    """Yields the finite values of a gauge. Parses no other line: a server has thousands."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name == name and math.isfinite(sample.value):
                yield sample.value
