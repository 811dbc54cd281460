"""All metrics of one process as text, in the format that the asker understands."""

import time
from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from baton.serving.deadline import Clock

# Who asks again within so many seconds is told the same, so that asking often costs no more.
FRESH_SECONDS = 0.1


class Collector(Protocol):
    """Source of metrics. Called in the event loop's thread, and must be quick."""

    def collect(self) -> Iterable[Metric]: ...


class Exposition:
    """The metrics of one process, those of the process itself among them.

    They are read when somebody asks, from what the process knows anyway. All methods belong to the
    event loop's thread.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._registry = CollectorRegistry()
        self._rendered: dict[str, tuple[float, bytes]] = {}  # when, and what, by content type
        ProcessCollector(registry=self._registry)

    def add(self, collector: Collector) -> None:
        """Has it asked from now on."""
        self._registry.register(collector)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The text and its content type. `accept`: the asker's header of that name; OpenMetrics,
        which alone has exemplars, is for those who name it."""
        encode, content_type = choose_encoder(accept)
        now = self._clock()
        known = self._rendered.get(content_type)
        if known is not None and now - known[0] < FRESH_SECONDS:
            return known[1], content_type
        body = encode(self._registry)
        self._rendered = {content_type: (now, body)}
        return body, content_type
