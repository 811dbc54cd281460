"""One request gives one trace over all processes, whatever becomes of it."""

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from baton.cli.local_cluster import LocalCluster
from baton.client import Client
from baton.sampling import SamplingParams
from tests.serving.otlp_receiver import Collector, Told, collecting

from .checkpoints import prompt_of
from .wide import HANDOFFS, made_whole

pytestmark = pytest.mark.e2e

PLAIN = SamplingParams(max_tokens=300, ignore_eos=True)
HANDED_OVER = (
    "generate",
    "tokenize",
    "admit",
    "place",
    "prefill.queue",
    "prefill.chunk",
    "kv.transfer",
    "kv.send",
    "decode.queue",
    "decode",
)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def traced_cluster(collector: Collector) -> Iterator[LocalCluster]:
    """Two decode workers, one prefill worker; prompts come in chunks."""
    told = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    flags = {"max_num_batched_tokens": 48, "max_num_seqs": 16, "num_blocks": 512}
    with (
        patch.dict(os.environ, told),
        LocalCluster(num_decode=2, worker_flags=flags, router_flags=HANDOFFS) as running,
    ):
        yield running


@pytest.fixture
def traced(traced_cluster: LocalCluster) -> LocalCluster:
    return made_whole(traced_cluster)


def named(spans: list[Told], name: str) -> list[Told]:
    return [span for span in spans if span.name == name]


def share_told(spans: list[Told]) -> float:
    """How much of the time of the first span the others cover together."""
    root, *others = spans
    covered, until = 0.0, root.start
    for span in others:
        begin, end = max(span.start, until), min(span.end, root.end)
        covered += max(0.0, end - begin)
        until = max(until, end)
    return covered / root.seconds


def check_tree(spans: list[Told]) -> None:
    """One root, and each other span is its child; but what the source of a transfer does, which is
    part of that."""
    root = spans[0]
    assert (root.name, root.service, root.parent_id) == ("generate", "baton-router", "")
    ids = {span.span_id: span for span in spans}
    for span in spans[1:]:
        parent = ids[span.parent_id]
        assert parent.name == ("kv.transfer" if span.name == "kv.send" else "generate")


def test_one_request_is_one_trace_over_three_processes(traced, collector):
    prompt = prompt_of(100, seed=1)
    with Client(traced.address) as client:
        generation = client.generate(prompt, PLAIN, request_id="plain")
        generation.text()
    spans = collector.trace_of("plain", *HANDED_OVER)
    check_tree(spans)
    assert {s.name for s in spans} == set(HANDED_OVER)
    assert {s.service for s in spans} == {"baton-router", "baton-prefill", "baton-decode"}
    assert share_told(spans) >= 0.98
    root = spans[0]
    assert root["gen_ai.operation.name"] == "text_completion"
    assert root["gen_ai.request.model"] == "tiny"
    assert root["gen_ai.request.max_tokens"] == 300
    assert root["gen_ai.usage.input_tokens"] == 100
    assert root["gen_ai.usage.output_tokens"] == 300
    assert root["gen_ai.response.finish_reasons"] == ["length"]
    assert root.event_names == ["first token"]
    assert not any(span.has_failed for span in spans)
