"""Metrics of a running cluster, against the requests that it was given."""

import asyncio
import json
import socket
import urllib.request
from contextlib import ExitStack

import psutil
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from baton.errors import InvalidArgumentError
from baton.sampling import SamplingParams
from baton.serving.telemetry.scrape_server import MAX_CONNECTIONS
from tests.support.cluster.scraped import documented_metrics, scrape_all, total

pytestmark = pytest.mark.e2e

DURATION = "gen_ai_server_request_duration_seconds"
TTFT = "gen_ai_server_time_to_first_token_seconds"
PER_TOKEN = "gen_ai_server_time_per_output_token_seconds"


async def generated(client: AsyncClient, prompt: str, num_tokens: int = 8) -> str:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return await client.generate(prompt, params).text()


async def test_metrics_count_a_request_in_every_process(
    cluster: LocalCluster, client: AsyncClient
) -> None:
    before = scrape_all(cluster)
    prompt = "def counted(once):\n    return once + 1\n\n" * 6
    await generated(client, prompt)
    await generated(client, prompt + "class Twice")
    with pytest.raises(InvalidArgumentError):
        await generated(client, prompt, num_tokens=100_000)
    await asyncio.sleep(0.2)  # what was told a moment ago is told again
    after = scrape_all(cluster)

    def grown(name: str, sample: str = "", **labels: str) -> float:
        return total(after, name, sample, **labels) - total(before, name, sample, **labels)

    assert grown(DURATION, f"{DURATION}_count", gen_ai_operation_name="text_completion") == 3
    assert grown(DURATION, f"{DURATION}_count", error_type="INVALID_ARGUMENT") == 1
    assert grown(TTFT, f"{TTFT}_count", gen_ai_request_model="tiny") == 2
    assert grown(PER_TOKEN, f"{PER_TOKEN}_count") == 2
    assert grown(TTFT, f"{TTFT}_sum") < grown(DURATION, f"{DURATION}_sum")
    assert grown("baton_output_tokens_total") == 16
    assert grown("baton_admission_seconds", "baton_admission_seconds_count") == 2
    assert grown("baton_prefill_queue_seconds", "baton_prefill_queue_seconds_count") == 2
    assert grown("baton_placements_total", path="handoff") == 2
    num_prompt = grown("baton_prompt_tokens_total")
    assert grown("baton_prefix_lookup_tokens_total", role="prefill") == num_prompt
    hits = grown("baton_prefix_hit_tokens_total", source="prefill_local")
    computed = grown("baton_step_tokens_total", role="prefill", kind="prompt")
    assert hits > 0
    assert hits + computed >= num_prompt - 1
    assert grown("baton_prefix_hit_tokens_total", source="decode_local") > 0
    assert grown("baton_steps_total", role="decode") > 0
    assert grown("baton_kv_transfer_bytes_total") > 0
    assert grown("baton_kv_transfer_seconds", "baton_kv_transfer_seconds_count") == 2
    assert grown("baton_redis_round_trips_total", outcome="answered") > 0
    for role in ("prefill", "decode"):
        assert total(after, "baton_kv_blocks", role=role, state="cached") > 0
        assert total(after, "baton_worker_ready", role=role) == 1


async def test_metrics_tell_chat_from_text_completion(
    cluster: LocalCluster, client: AsyncClient
) -> None:
    chats = {"gen_ai_operation_name": "chat"}
    before = scrape_all(cluster)
    await client.generate([{"role": "user", "content": "hello"}]).text()
    await asyncio.sleep(0.2)
    after = scrape_all(cluster)
    for name in (DURATION, TTFT):
        count = f"{name}_count"
        assert total(after, name, count, **chats) - total(before, name, count, **chats) == 1


@pytest.mark.nightly
async def test_metrics_clients_that_never_read_stay_bounded(
    cluster: LocalCluster, client: AsyncClient
) -> None:
    expected = await generated(client, "import os", 32)
    endpoints = cluster.metrics_endpoints
    processes = {name: psutil.Process(cluster.process(name).pid) for name in endpoints}
    descriptors = {name: process.num_fds() for name, process in processes.items()}
    with ExitStack() as lazy:
        for endpoint in endpoints.values():
            host, _, port = endpoint.rpartition(":")
            for number in range(100):
                one = lazy.enter_context(socket.create_connection((host, int(port)), timeout=10))
                if number % 2:
                    one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        answers = await asyncio.gather(*(generated(client, "import os", 32) for _ in range(8)))
        assert set(answers) == {expected}
        assert set(scrape_all(cluster)) == set(endpoints)
        for name, process in processes.items():
            # One more for a connection that is being let go.
            assert process.num_fds() <= descriptors[name] + MAX_CONNECTIONS + 9, name


def test_service_discovery_lists_all_metrics_endpoints(cluster: LocalCluster) -> None:
    endpoints = cluster.metrics_endpoints
    with urllib.request.urlopen(f"http://{endpoints['router']}/targets", timeout=10) as response:
        assert response.headers["Content-Type"] == "application/json"
        groups = json.load(response)
    told = {group["targets"][0]: group["labels"] for group in groups}
    assert {place: labels["__meta_baton_role"] for place, labels in told.items()} == {
        endpoints["router"]: "router",
        endpoints["prefill-0"]: "prefill",
        endpoints["decode-0"]: "decode",
    }
    assert told[endpoints["decode-0"]]["__meta_baton_worker"] == "decode-0"


async def test_metrics_are_exactly_the_documented_ones(
    cluster: LocalCluster, client: AsyncClient
) -> None:
    await generated(client, "def documented(it):\n    pass\n" * 8)
    await asyncio.sleep(0.2)
    rows = documented_metrics().items()
    assert {name: row for name, row in rows if row[0] != "picker"} == _served(cluster)


def _served(cluster: LocalCluster) -> dict[str, tuple[str, str, set[str], str]]:
    """As `documented_metrics`, from the processes themselves."""
    served: dict[str, tuple[str, str, set[str], str]] = {}
    for process, families in scrape_all(cluster).items():
        for name, family in families.items():
            place = "router" if process == "router" else "worker"
            labels = {key for _, at in family.samples for key, _ in at} - {"le"}
            if name in served:
                known, _, others, _ = served[name]
                place = known if known == place else "both"
                labels |= others
            served[name] = place, family.kind, labels, family.text
    return served
