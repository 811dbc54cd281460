"""A real router records; `baton replay` and `baton explain` read it."""

import json
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton import Client, SamplingParams
from baton.cli.local.local_cluster import LocalCluster
from baton.cli.main import app
from tests.support.cluster.second_router import second_router

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_REQUESTS = 12
SECRET = "swordfish"


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


@pytest.fixture(scope="module")
def record(pair_shape: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the record of some requests that share a prefix, on two workers of each role."""
    path = tmp_path_factory.mktemp("records") / "placements.jsonl"
    with (
        second_router(pair_shape, record=str(path)) as router,
        Client(router.address) as client,
    ):
        for i in range(NUM_REQUESTS):
            prompt = f"def {SECRET}(n):\n    return n\n" * 4 + f"# {i}"
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            client.generate(prompt, params, request_id=f"r{i}").text()
        router.kill("router", signal.SIGTERM)
        assert router.router.wait(time.monotonic() + 10.0)
    return path


def test_replay_of_the_recorded_policy_changes_no_decision(record: Path) -> None:
    totals = json.loads(invoke("replay", str(record), "--json").stdout)
    assert (totals["num_decisions"], totals["num_different"]) == (NUM_REQUESTS, 0)
    assert totals["mean_cost_s"] == totals["new_mean_cost_s"] > 0


def test_replay_compares_another_policy(record: Path) -> None:
    arguments = ("replay", str(record), "--policy", "round-robin")
    *rows, totals = map(json.loads, invoke(*arguments, "--json").stdout.splitlines())
    assert len(rows) == totals["num_different"] > 0
    assert totals["new_mean_cost_s"] > totals["mean_cost_s"]
    table = invoke(*arguments).stdout
    assert f"{NUM_REQUESTS} decisions, {len(rows)} differ" in table
    assert rows[0]["request_id"] in table


def test_explain_reads_a_recorded_request(record: Path) -> None:
    arguments = ("explain", "--record", str(record), "--request-id", "r3", "--json")
    explained = json.loads(invoke(*arguments).stdout)
    assert len(explained["placement"]["candidates"]) == 4 + 2
    prefill, decode = (explained["placement"][f"{role}_worker"] for role in ("prefill", "decode"))
    said = f"{prefill} with {decode} cost" if prefill else f"{decode} alone costs"
    assert said in explained["reason"]
    assert invoke("explain", "--record", str(record), "--request-id", "x").exit_code == 1


def test_record_holds_arrivals_and_lengths_but_no_text(record: Path) -> None:
    text = record.read_text()
    assert SECRET not in text
    entries = [json.loads(line) for line in text.splitlines()]
    ended = [entry for entry in entries if "ended" in entry]
    assert [entry["output_tokens"] for entry in ended] == [3] * NUM_REQUESTS
    arrivals = [entry["at"] for entry in entries if "id" in entry]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == NUM_REQUESTS


def test_replay_rejects_bad_record_or_policy_in_one_line(record: Path) -> None:
    for arguments in ((str(record), "--policy", "random"), (__file__,), ("/nothing",)):
        refused = invoke("replay", *arguments)
        assert refused.exit_code == 1
        assert len(refused.stderr.splitlines()) == 1


def test_router_serves_when_the_disk_of_its_record_is_full(pair: LocalCluster) -> None:
    with (
        second_router(pair, record="/dev/full") as router,
        Client(router.address) as client,
    ):
        for _ in range(3):
            assert client.generate("import os", SamplingParams(max_tokens=4)).text()
