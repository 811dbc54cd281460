"""Traces are made where the standard variables say so, and their collector delays no request."""

import os
import subprocess
import sys
import time

import pytest

from baton.serving.telemetry.tracing import FLUSH_SECONDS, exporter_wanted
from tests.support.serving.otlp_receiver import collecting, collector_that

NUM_SPANS = 20_000  # were they all kept, memory would grow three times as much as it may
# Were it waited for, each batch of 512 spans would take the ten seconds after which it is given up.
SECONDS = 60.0


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317"}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4317"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317"}, ""),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, ""),
        ({"OTEL_SERVICE_NAME": "ours"}, ""),
    ],
)
def test_tracing_is_off_until_variable_enables_it(monkeypatch, variables, wanted):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert exporter_wanted() == wanted


def make_spans(number: int, **variables: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """A process that makes so many, and how many seconds it took."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")} | variables
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.serving.span_maker", str(number)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=SECONDS,
    )
    return done, time.monotonic() - began


@pytest.mark.parametrize(
    "how",
    [
        "is full",
        pytest.param("hangs", marks=pytest.mark.slow),
        *(
            pytest.param(how, marks=pytest.mark.nightly)
            for how in ("says nothing", "is not there", "has no address", "listens")
        ),
    ],
)
def test_tracing_never_waits_for_collector_and_bounds_memory(how):
    with collector_that(how) as endpoint:
        done, _ = make_spans(NUM_SPANS, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 32 * 2**20
    # What goes wrong is said, and not for every span.
    assert len(done.stderr.splitlines()) < 40
    assert bool(done.stderr) == (how != "listens") or "dropping" in done.stderr


def test_process_exit_flushes_last_spans_within_bound():
    with collecting() as collector:
        make_spans(100, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint)
        assert len(collector.spans) == 200
        (service,) = {span.service for span in collector.spans}
        assert service == "baton-router"
    with collector_that("says nothing") as endpoint:
        done, seconds = make_spans(100, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    assert "the last spans are lost" in done.stderr
    assert seconds < 2 * FLUSH_SECONDS + 20.0  # and imports


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
    ],
)
def test_process_serves_when_exporter_is_unsupported(variables):
    done, _ = make_spans(1, **variables)
    assert done.returncode == 0
    assert "no traces" in done.stderr


def test_tracing_samples_one_percent_when_configured():
    with collecting() as collector:
        sampled = {
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": ".01",
        }
        make_spans(3000, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, **sampled)
    names = [span.name for span in collector.spans]
    assert names.count("generate") == names.count("place")
    assert 5 <= names.count("generate") <= 80
