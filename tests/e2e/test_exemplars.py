"""From a number to the trace of a request that it counts."""

import os
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from baton.cli.local_cluster import LocalCluster
from baton.client import Client
from baton.sampling import SamplingParams
from tests.support.cluster.prometheus import prometheus
from tests.support.cluster.scraped import scrape_all
from tests.support.cluster.wide import HANDOFFS
from tests.support.serving.otlp_receiver import collecting

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TTFT = "gen_ai_server_time_to_first_token_seconds"
OF_ROUTER = (
    TTFT,
    "gen_ai_server_request_duration_seconds",
    "gen_ai_server_time_per_output_token_seconds",
)
OF_DECODE = ("baton_kv_transfer_seconds", "baton_kv_transfer_exposed_seconds")


def test_exemplars_lead_to_the_traces_of_their_requests(tmp_path: Path) -> None:
    with collecting() as collector:
        told = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with patch.dict(os.environ, told), LocalCluster(router_flags=HANDOFFS) as cluster:
            with Client(cluster.address) as client:
                params = SamplingParams(max_tokens=8, ignore_eos=True)
                client.generate("def traced(it):\n" * 9, params, request_id="one").text()
            spans = collector.trace_of("one", "kv.transfer")
            trace_id = spans[0].trace_id
            scraped = scrape_all(cluster)
            for process, names in (("router", OF_ROUTER), ("decode-0", OF_DECODE)):
                for name in names:
                    exemplars = scraped[process][name].exemplars
                    assert {e["trace_id"] for e in exemplars} == {trace_id}, name
            (exemplar,) = scraped["decode-0"][OF_DECODE[0]].exemplars
            (transfer,) = (span for span in spans if span.name == "kv.transfer")
            assert exemplar["span_id"] == transfer.span_id
            with prometheus(tmp_path, cluster.metrics_endpoints["router"]) as watching:
                deadline = time.monotonic() + 30.0
                while not (kept := watching.exemplars(f"{TTFT}_bucket")):
                    assert time.monotonic() < deadline, "Prometheus keeps no exemplars"
                    time.sleep(0.5)
            found = {e["labels"]["trace_id"] for series in kept for e in series["exemplars"]}
            assert found == {trace_id}
