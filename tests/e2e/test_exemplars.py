"""From a number to the trace of a request that it counts."""

import time
from pathlib import Path

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Client
from baton.sampling import SamplingParams
from tests.support.cluster.named_clusters import Traced
from tests.support.cluster.prometheus import prometheus
from tests.support.cluster.scraped import scrape_all
from tests.support.cluster.wide import name_of

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.nightly]

TTFT = "gen_ai_server_time_to_first_token_seconds"
OF_ROUTER = (
    TTFT,
    "gen_ai_server_request_duration_seconds",
    "gen_ai_server_time_per_output_token_seconds",
)
OF_DECODE = ("baton_kv_transfer_seconds", "baton_kv_transfer_exposed_seconds")


def test_exemplars_link_to_traces_of_their_requests(
    traced: LocalCluster, traced_shape: Traced, tmp_path: Path
) -> None:
    with Client(traced.address) as client:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        generation = client.generate("def traced(it):\n" * 9, params, request_id="exemplary")
        generation.text()
    spans = traced_shape.collector.trace_of("exemplary", "kv.transfer")
    trace_id = spans[0].trace_id
    decode = name_of(traced, generation.accepted.placement.decode_worker)
    scraped = scrape_all(traced)
    for process, names in (("router", OF_ROUTER), (decode, OF_DECODE)):
        for name in names:
            exemplars = scraped[process][name].exemplars
            assert trace_id in {e["trace_id"] for e in exemplars}, name
    (transfer,) = (span for span in spans if span.name == "kv.transfer")
    of_transfers = scraped[decode][OF_DECODE[0]].exemplars
    assert transfer.span_id in {e["span_id"] for e in of_transfers}
    with prometheus(tmp_path, traced.metrics_endpoints["router"]) as watching:
        deadline = time.monotonic() + 30.0
        while not (kept := watching.exemplars(f"{TTFT}_bucket")):
            assert time.monotonic() < deadline, "Prometheus keeps no exemplars"
            time.sleep(0.5)
    found = {e["labels"]["trace_id"] for series in kept for e in series["exemplars"]}
    assert trace_id in found
