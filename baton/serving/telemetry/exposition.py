"""Metrics exposition of one process, in the text format that the scraper accepts."""

import time
from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from baton.serving.deadline import Clock

# Scrapes within so many seconds get the same text, so that frequent ones cost no more.
FRESH_SECONDS = 0.1


class Collector(Protocol):
    """Source of metrics. Called in the event loop's thread, and must be quick."""

    def collect(self) -> Iterable[Metric]: ...


class Exposition:
    """Metrics registry of one process, including those of the process itself.

    Collectors are read when scraped, from counters that exist anyway. All methods belong to the
    event loop's thread.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._registry = CollectorRegistry()
        self._rendered: dict[str, tuple[float, bytes]] = {}  # time and text, by content type
        ProcessCollector(registry=self._registry)

    def add(self, collector: Collector) -> None:
        """Registers a collector, read at each scrape from now on."""
        self._registry.register(collector)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Returns the text and its content type. `accept`: the scraper's Accept header;
        OpenMetrics, the only format with exemplars, is for scrapers that name it."""
        encode, content_type = choose_encoder(accept)
        now = self._clock()
        known = self._rendered.get(content_type)
        if known is not None and now - known[0] < FRESH_SECONDS:
            return known[1], content_type
        body = encode(self._registry)
        self._rendered = {content_type: (now, body)}
        return body, content_type
