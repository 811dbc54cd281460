import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from baton.serving.telemetry.distribution import Distribution, Distributions
from baton.serving.telemetry.exposition import FRESH_SECONDS, Exposition
from baton.serving.telemetry.families import counter, gauge, histogram
from tests.support.clock import Clock

BOUNDS = (0.1, 1.0, 10.0)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Known:
    """A collector of what it is given."""

    def __init__(self, *families) -> None:
        self.families = families

    def collect(self):
        return self.families


def told(*families, accept: str = OPENMETRICS) -> dict[str, object]:
    """Returns what a monitoring system reads of these families, by name."""
    exposition = Exposition()
    exposition.add(Known(*families))
    body, content_type = exposition.render(accept)
    parse = openmetrics if content_type.startswith(OPENMETRICS.partition(";")[0]) else plain
    return {family.name: family for family in parse(body.decode())}


@given(st.lists(st.floats(0, 100)))
def test_distribution_counts_number_in_every_bucket_above_it(numbers):
    distribution = Distribution(BOUNDS)
    for number in numbers:
        distribution.observe(number)
    family = told(histogram("x_seconds", "X.", distribution))["x_seconds"]
    samples = {s.labels.get("le", s.name): s.value for s in family.samples}
    for bound in (*BOUNDS, math.inf):
        name = "+Inf" if bound == math.inf else str(bound)
        assert samples[name] == sum(number <= bound for number in numbers)
    assert samples["x_seconds_count"] == len(numbers)
    assert samples["x_seconds_sum"] == pytest.approx(sum(numbers))


def test_distribution_makes_exemplar_of_sampled_trace_only():
    distribution = Distribution(BOUNDS)
    for sampler, number in ((ALWAYS_ON, 0.5), (ALWAYS_OFF, 5.0)):
        tracer = TracerProvider(sampler=sampler).get_tracer("test")
        with tracer.start_as_current_span("request") as span:
            distribution.observe(number)
            if sampler is ALWAYS_ON:
                trace_id = trace.format_trace_id(span.get_span_context().trace_id)
    distribution.observe(0.01)
    family = told(histogram("x_seconds", "X.", distribution))["x_seconds"]
    exemplars = {s.labels["le"]: s.exemplar for s in family.samples if s.exemplar}
    assert list(exemplars) == ["1.0"]
    assert exemplars["1.0"].labels["trace_id"] == trace_id
    assert exemplars["1.0"].value == 0.5


def test_distributions_are_made_on_first_use():
    distributions = Distributions(BOUNDS)
    distributions.at("a").observe(0.5)
    distributions.at("b").observe(5.0)
    distributions.at("a").observe(0.05)
    family = told(histogram("x_seconds", "X.", distributions.by_labels, ("kind",)))["x_seconds"]
    counts = {s.labels["kind"]: s.value for s in family.samples if s.name == "x_seconds_count"}
    assert counts == {"a": 2, "b": 1}


def test_exposition_has_values_labels_and_types():
    families = told(
        gauge("now", "So many.", 3),
        counter("all_total", "So many ever.", {("a", "b"): 4, ("a", "c"): 5}, ("x", "y")),
        accept="",
    )
    assert families["now"].type == "gauge"
    assert families["now"].documentation == "So many."
    assert families["all"].type == "counter"
    assert {(s.labels["y"], s.value) for s in families["all"].samples} == {("b", 4), ("c", 5)}
    assert "process_resident_memory_bytes" in families


def test_exposition_is_cached_for_a_moment():
    clock = Clock()
    exposition, known = Exposition(clock), Known(gauge("now", "N.", 1))
    exposition.add(known)
    first = exposition.render()
    known.families = (gauge("now", "N.", 2),)
    assert exposition.render() == first
    assert b"now 2.0" in exposition.render(OPENMETRICS)[0]  # in another format it is new
    clock.now += FRESH_SECONDS
    assert b"now 2.0" in exposition.render()[0]
