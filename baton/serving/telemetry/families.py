"""Metric families of prometheus_client, made of plain numbers."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.samples import Exemplar as Sampled
from prometheus_client.utils import floatToGoString

from baton.serving.telemetry.distribution import Distribution, Exemplar

Labels = tuple[str, ...]
Values = float | Mapping[Labels, float]
"""One number; or, with labels, a number for each combination of their values."""


def gauge(name: str, text: str, values: Values, labels: Sequence[str] = ()) -> GaugeMetricFamily:
    """Returns a gauge: a current value, which may grow and shrink."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for at, value in _by_labels(values).items():
        family.add_metric(at, value)
    return family


def counter(
    name: str, text: str, values: Values, labels: Sequence[str] = ()
) -> CounterMetricFamily:
    """Returns a counter of events since the start. `name` ends in `_total`."""
    assert name.endswith("_total"), name
    family = CounterMetricFamily(name, text, labels=labels)
    for at, value in _by_labels(values).items():
        family.add_metric(at, value)
    return family


def histogram(
    name: str,
    text: str,
    distributions: Distribution | Mapping[Labels, Distribution],
    labels: Sequence[str] = (),
) -> HistogramMetricFamily:
    """Returns a histogram of values observed since the start."""
    family = HistogramMetricFamily(name, text, labels=labels)
    several = {(): distributions} if isinstance(distributions, Distribution) else distributions
    for at, one in several.items():
        family.add_metric(at, _buckets(one), sum_value=one.total)
    return family


def _by_labels(values: Values) -> Mapping[Labels, float]:
    return values if isinstance(values, Mapping) else {(): values}


def _buckets(one: Distribution) -> list[tuple[str, float] | tuple[str, float, Sampled]]:
    """Returns cumulative buckets, with their exemplars."""
    buckets: list[tuple[str, float] | tuple[str, float, Sampled]] = []
    bounds = [*map(floatToGoString, one.bounds), "+Inf"]
    for bound, count, exemplar in zip(bounds, accumulate(one.counts), one.exemplars, strict=True):
        if exemplar is None:
            buckets.append((bound, count))
        else:
            buckets.append((bound, count, _sampled(exemplar)))
    return buckets


def _sampled(exemplar: Exemplar) -> Sampled:
    labels = {"trace_id": exemplar.trace_id, "span_id": exemplar.span_id}
    return Sampled(labels, exemplar.value, exemplar.moment)
