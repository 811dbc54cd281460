"""Histograms of frequent values: counted as they occur, rendered when scraped.

An observation costs a binary search in a tuple and two additions. Only the event loop's thread may
use them, so there is no lock. Independent of the exposition format.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry import trace


@dataclass(frozen=True, slots=True)
class Exemplar:
    """Observation whose trace is kept.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 of them.
        moment: Unix seconds.
    """

    trace_id: str
    span_id: str
    value: float
    moment: float


class Distribution:
    """Histogram of observations.

    Attributes:
        bounds: upper bounds, ascending and inclusive.
        counts: one for each bound, then one for values above all of them.
        total: the sum of all observations.
        exemplars: the latest observation of each count that was part of a sampled trace.
    """

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.exemplars: list[Exemplar | None] = [None] * len(self.counts)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts an observation, as part of the current span."""
        place = bisect_left(self.bounds, value)
        self.counts[place] += 1
        self.total += value
        span = trace.get_current_span().get_span_context()
        if span.trace_flags.sampled:
            trace_id, span_id = f"{span.trace_id:032x}", f"{span.span_id:016x}"
            self.exemplars[place] = Exemplar(trace_id, span_id, value, time.time())


class Distributions:
    """Distributions by label values, each created on first use.

    Callers must keep the combinations of values few.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self.by_labels: dict[tuple[str, ...], Distribution] = {}

    def at(self, *values: str) -> Distribution:
        """Returns the distribution of these label values."""
        found = self.by_labels.get(values)
        if found is None:
            found = self.by_labels[values] = Distribution(self._bounds)
        return found
