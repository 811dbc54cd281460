"""One request gives one trace over all processes, whatever becomes of it."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from unittest.mock import patch

import grpc
import httpx
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient, Client
from baton.client.router_messages import generate_request
from baton.errors import InvalidArgumentError, OverloadedError
from baton.sampling import Grammar, GrammarKind, SamplingParams
from baton.v1.inference_pb2_grpc import InferenceStub
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.named_clusters import Traced, tenants_file
from tests.support.cluster.second_router import SecondRouter, second_router
from tests.support.cluster.traces import check_tree, named, share_told
from tests.support.cluster.watch import loads, until_nothing_is_held
from tests.support.cluster.wide import HANDOFFS, name_of
from tests.support.serving.otlp_receiver import Collector, collector_that

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PLAIN = SamplingParams(max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
HANDED_OVER = (
    "generate",
    "tokenize",
    "admit.router",
    "place",
    "admit.decode",
    "decode.call",
    "admit.prefill",
    "prefill.call",
    "prefill.queue",
    "prefill.chunk",
    "kv.transfer",
    "kv.send",
    "decode.queue",
    "decode",
)


@pytest.fixture
def collector(traced_shape: Traced) -> Collector:
    return traced_shape.collector


def logged(cluster: LocalCluster, name: str) -> list[dict[str, str]]:
    """The lines of a process. What libraries and a process that dies say is none."""
    lines = cluster.process(name).log_path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_request_gives_one_trace_over_three_processes(traced, collector):
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


def test_span_attributes_split_their_duration(traced, collector):
    with Client(traced.address) as client:
        client.generate(prompt_of(100, seed=2), PLAIN, request_id="parts").text()
    spans = collector.trace_of("parts", *HANDED_OVER)
    (decode,) = named(spans, "decode")
    parts = {n: decode[f"baton.time.{n}"] for n in ("schedule", "forward", "sample", "stream_wait")}
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(decode.seconds, rel=0.02)
    assert decode["baton.decode.num_tokens"] == 299  # the first one came with the prompt
    assert decode["baton.decode.num_steps"] >= 299
    assert decode["baton.decode.finish_reasons"] == ["length"]
    assert decode.event_names == ["first token"]
    chunks = named(spans, "prefill.chunk")
    ranges = [(c["baton.prefill.begin"], c["baton.prefill.end"]) for c in chunks]
    assert ranges == [(0, 48), (48, 96), (96, 100)]
    for chunk in chunks:
        work = sum(chunk[f"baton.time.{n}"] for n in ("schedule", "forward", "sample"))
        assert work == pytest.approx(chunk.seconds, abs=0.002)
    (transfer,) = named(spans, "kv.transfer")
    assert transfer["baton.transfer.num_blocks"] == 7
    assert transfer["baton.transfer.num_bytes"] > 0
    assert transfer["baton.transfer.connector"] in ("shm", "grpc")
    assert 0 <= transfer["baton.transfer.exposed_ms"] <= transfer.seconds * 1000
    (place,) = named(spans, "place")
    assert place["baton.placement.decode_worker"] == decode["baton.worker"]
    for role in ("prefill", "decode"):
        (admit,) = named(spans, f"admit.{role}")
        assert admit["baton.worker"] == place[f"baton.placement.{role}_worker"]


def test_killed_worker_and_migration_appear_in_one_trace(traced, collector):
    with Client(traced.address) as client:
        generation = client.generate(prompt_of(70, seed=3), PLAIN, request_id="killed")
        chunks = iter(generation)
        for _ in range(5):
            next(chunks)
        lost = generation.accepted.placement.decode_worker
        traced.kill(name_of(traced, lost))
        assert sum(len(chunk.token_ids) for chunk in chunks) > 0
    spans = collector.trace_of("killed", *HANDED_OVER, "recover", "place", "decode")
    assert share_told(spans) >= 0.98
    assert spans[0]["baton.num_migrations"] == 1
    assert spans[0]["baton.num_attempts"] == 2
    first, second = named(spans, "place")
    (link,) = second.links
    assert link.span_id == first.span_id
    assert link["baton.attempt_failure.kind"] == "lost"
    assert link["baton.attempt_failure.worker"] == lost
    died, went_on = named(spans, "decode")
    assert (died["baton.worker"], died["baton.reported_by"]) == (lost, "router")
    assert died.has_failed
    assert died["error.type"] == "UNAVAILABLE"
    assert went_on["baton.worker"] == second["baton.placement.decode_worker"] != lost
    assert went_on.event_names == ["migration", "first token"]
    assert not went_on.has_failed
    (recover,) = named(spans, "recover")
    assert died.end <= recover.end <= second.end
    (line,) = (x for x in logged(traced, "router") if x["message"].startswith("resuming elsewhere"))
    assert (line["request_id"], line["trace_id"]) == ("killed", spans[0].trace_id)


def test_logs_omit_successful_requests_and_all_prompts(traced, collector):
    names = [process.name for process in traced.processes]
    with Client(traced.address) as client:
        client.generate("a secret to warm up", SHORT).text()
        before = {name: len(logged(traced, name)) for name in names}
        client.generate("a secret " * 20, PLAIN, request_id="unheard").text()
    collector.trace_of("unheard", *HANDED_OVER)
    assert {name: len(logged(traced, name)) for name in names} == before
    for name in names:
        assert "secret" not in traced.process(name).log_path.read_text()


def test_grpc_trace_context_is_continued(traced, collector):
    trace_id, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    for request_id, flags in (("not asked", "00"), ("asked", "01")):
        message = generate_request(prompt_of(20, seed=4), SHORT, "", request_id, 0)
        metadata = [("traceparent", f"00-{trace_id}-{caller}-{flags}")]
        with grpc.insecure_channel(traced.address) as channel:
            list(InferenceStub(channel).Generate(message, metadata=metadata))
    spans = collector.trace_of("asked", *HANDED_OVER)
    assert {span.trace_id for span in spans} == {trace_id}
    assert [span.name for span in spans if span.parent_id == caller] == ["generate"]
    # The caller that began it decides for all: the other one was over before this one began.
    assert "not asked" not in {span.get("baton.request.id") for span in collector.spans}


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_http_trace_context_is_continued(traced, collector, num_prompts):
    trace_id, caller = f"0af7651916cd43dd8448eb211c80319{num_prompts}", "b7ad6b7169203331"
    asked = {"prompt": ["def main("] * num_prompts, "max_tokens": 8, "ignore_eos": True}
    headers = {"traceparent": f"00-{trace_id}-{caller}-01"}
    url = f"{traced.http_address}/v1/completions"
    answer_id = httpx.post(url, json=asked, headers=headers, timeout=30).headers["x-request-id"]
    for request_id in [answer_id] if num_prompts == 1 else [f"{answer_id}-0", f"{answer_id}-1"]:
        spans = collector.trace_of(request_id, *HANDED_OVER)
        assert {span.trace_id for span in spans} == {trace_id}
        parents = {span.parent_id for span in spans if span.name == "generate"}
        assert parents == {caller}


def test_http_request_is_one_trace_probes_and_scrapes_none(traced, collector):
    begun = len(collector.spans)
    asked = {"prompt": "def main(", "max_tokens": 8, "ignore_eos": True}
    for page in ("/health", "/metrics", "/v1/models", "/"):
        httpx.get(traced.http_address + page, timeout=30).raise_for_status()
    answer = httpx.post(f"{traced.http_address}/v1/completions", json=asked, timeout=30)
    check_tree(collector.trace_of(answer.headers["x-request-id"], *HANDED_OVER))
    assert [span.name for span in collector.spans[begun:] if not span.parent_id] == ["generate"]


def test_error_spans_omit_the_prompt(traced, collector):
    bad = SamplingParams(max_tokens=8, grammar=Grammar(GrammarKind.REGEX, "(secret"))
    with Client(traced.address) as client:
        with pytest.raises(InvalidArgumentError):
            client.generate("secret", bad, request_id="wrong").text()
        client.generate("a secret", SHORT, request_id="right").text()
    (root, *_) = collector.trace_of("wrong", "admit.decode")
    assert root.has_failed
    assert (root["error.type"], root.reason) == ("INVALID_ARGUMENT", "sampling.grammar")
    collector.trace_of("right", *HANDED_OVER)
    assert "secret" not in str(collector.spans)


# A worker that computes prompts itself, with room for little.


@pytest.fixture(scope="module")
def alone_router(
    traced_shape: Traced, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecondRouter]:
    """A tenant that may have ten tokens at once; content in traces."""
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "quotas").write_text("poor tokens_per_second=1\n")
    told = {
        **traced_shape.environment,
        "OTEL_SERVICE_NAME": "ours",
        "BATON_CAPTURE_CONTENT": "true",
    }
    flags = {
        "admission": "none",
        "tenants_file": tenants_file(folder, {"little": "poor"}),
        "allow_anonymous": True,
        "quotas": folder / "quotas",
    }
    with patch.dict(os.environ, told), second_router(traced_shape.cluster, **flags) as running:
        yield running


@pytest.fixture
def alone(traced: LocalCluster, alone_router: SecondRouter) -> SecondRouter:
    return alone_router


def test_decode_only_request_traces_its_prefill_chunks(alone, collector):
    with Client(alone.address) as client:
        text = client.generate("def main():", PLAIN, request_id="alone").text()
    expected = ("tokenize", "admit.router", "place", "admit.decode", "decode.call")
    expected = (*expected, "prefill.queue", "prefill.chunk", "decode")
    spans = collector.trace_of("alone", *expected)
    check_tree(spans)
    assert {s.name for s in spans} == {"generate", *expected}
    assert {s.service for s in spans} == {"ours", "baton-decode"}
    assert share_told(spans) >= 0.98
    root, (decode,) = spans[0], named(spans, "decode")
    assert decode["baton.decode.num_tokens"] == 300
    (asked,) = json.loads(root["gen_ai.input.messages"])
    assert (asked["role"], asked["parts"][0]["content"]) == ("user", "def main():")
    (answered,) = json.loads(root["gen_ai.output.messages"])
    assert (answered["role"], answered["parts"][0]["content"]) == ("assistant", text)
    assert answered["finish_reason"] == "length"


def test_decode_span_records_preemptions(alone, collector):
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.9, seed=5, n=3)

    def num_preemptions() -> int:
        return sum(load.num_preemptions for load in loads(alone).values())

    before = num_preemptions()
    with Client(alone.address) as client:
        client.generate(prompt_of(100, seed=5), params, request_id="several").completions()
    spans = collector.trace_of("several", "prefill.chunk", "decode")
    assert share_told(spans) >= 0.98
    root, (decode,) = spans[0], named(spans, "decode")
    assert root["gen_ai.request.choice.count"] == 3
    assert root["gen_ai.usage.output_tokens"] == 600
    assert root["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert decode["baton.decode.num_tokens"] == 600
    assert decode["baton.decode.finish_reasons"] == ["length"] * 3
    preemptions = [e for e in decode.events if e.name == "preemption"]
    assert len(preemptions) == num_preemptions() - before > 0
    assert {e["baton.preemption.mode"] for e in preemptions} == {"recompute"}


def test_rejected_request_traces_the_reason(alone, collector):
    with Client(alone.address, token="little", timeout=5.0) as client:
        client.generate(prompt_of(20, seed=6), SHORT, request_id="taken").text()
        with pytest.raises(OverloadedError):
            client.generate(prompt_of(20, seed=6), SHORT, request_id="refused").text()
    spans = collector.trace_of("refused", "admit.router")
    root, (admit,) = spans[0], named(spans, "admit.router")
    assert {span.name for span in spans} == {"generate", "tokenize", "admit.router"}
    for span in (root, admit):
        assert span.has_failed
        assert (span["error.type"], span.reason) == (
            "RESOURCE_EXHAUSTED",
            "tenant 'poor' is over its rate",
        )
    assert root["baton.tenant"] == "poor"


# The collector of spans delays no request.


async def test_router_serves_and_ends_while_its_collector_hangs(cluster):
    with collector_that("hangs") as endpoint:
        told = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint,
            "OTEL_BSP_MAX_QUEUE_SIZE": "64",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "16",
        }
        with patch.dict(os.environ, told), second_router(cluster, **HANDOFFS) as hung:
            async with AsyncClient(hung.address) as client:
                prompts = [prompt_of(40, seed=i) for i in range(40)]
                crowd = (client.generate(prompt, SHORT).token_ids() for prompt in prompts)
                answers = await asyncio.gather(*crowd)
            assert [len(token_ids) for token_ids in answers] == [8] * 40
            assert "Queue full" in hung.router.log_path.read_text()
            await until_nothing_is_held(hung)
            hung.kill("router", signal.SIGTERM)
            assert hung.router.wait(time.monotonic() + 30.0)
            assert hung.router.failure().split(";")[0] == "ended with code 0"
