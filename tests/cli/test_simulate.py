"""`baton simulate`, on a workload made here."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from baton.cli.main import app

SMALL = ("--prefill", 1, "--decode", 1)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "made.jsonl"
    rows = [
        {
            "timestamp": 40 * i,
            "input_length": 1200,
            "output_length": 20,
            "hash_ids": [0, 1 + i % 3, 100 + i],
        }
        for i in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def simulate(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_simulate_prints_an_object_per_policy_and_rate(trace):
    code, out, _ = simulate(
        "--trace", trace, "--prefill", 2, "--decode", 1, "--rate", 1, "--rate", 50,
        "--policy", "baton", "--policy", "round-robin", "--json",
    )  # fmt: skip
    assert code == 0
    found = [json.loads(line) for line in out.splitlines()]
    cases = ["baton", "round-robin", "colocated, baton"]
    assert [(o["rate"], o["case"]) for o in found] == [(r, c) for r in (1.0, 50.0) for c in cases]
    for outcome in found:
        assert outcome["num_requests"] == 30
        assert outcome["ttft"] == sorted(outcome["ttft"])
        assert 0 <= outcome["goodput"] <= outcome["offered"]
    by_case = {(o["case"], o["rate"]): o for o in found}
    assert by_case["baton", 1.0]["hit_rate"] > by_case["round-robin", 1.0]["hit_rate"]
    assert by_case["baton", 50.0]["ttft"][1] > by_case["baton", 1.0]["ttft"][1]


def test_simulate_rejects_late_requests_only_with_deadlines(trace):
    late = ("--trace", trace, "--prefill", 1, "--decode", 1, "--rate", 200, "--slo-ttft", 150)
    for options, is_refused in (((), False), (("--deadlines",), True)):
        code, out, _ = simulate(*late, *options, "--admission", "predicted", "--json")
        assert code == 0
        first, _colocated = map(json.loads, out.splitlines())
        assert (first["num_refused"] > 0) == is_refused


def test_simulate_report_is_one_self_contained_file(trace, tmp_path):
    path = tmp_path / "out.html"
    code, out, err = simulate("--trace", trace, "--prefill", 1, "--decode", 1, "--report", path)
    assert code == 0, err
    assert "goodput" in out
    text = path.read_text()
    body = text[text.index("<body>") : text.index("</html>")]
    page = ET.fromstring(body)  # every element is closed
    charts = list(page.iter("figure"))
    assert len(charts) == 4
    for chart in charts:
        for line in chart.iter("polyline"):
            places = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
            assert all(0 <= x <= 560 and 0 <= y <= 320 for x, y in places)
    for outside in ("http", "src=", "url(", "@import", "<script", "<link"):
        assert outside not in text


def test_simulate_reads_azure_traces_with_given_block_size(tmp_path):
    path = tmp_path / "made.csv"
    rows = [f"2023-11-16 18:17:{i:02}.9799600,{100 + i},5\n" for i in range(10)]
    path.write_text(AZURE + "".join(rows))
    code, out, _ = simulate("--trace", path, *SMALL, "--block-size", 16, "--json", "--limit", 7)
    assert code == 0
    for line in out.splitlines():
        outcome = json.loads(line)
        assert (outcome["num_requests"], outcome["hit_rate"]) == (7, 0.0)


def test_simulate_serves_images_with_encode_workers(tmp_path):
    path = tmp_path / "made.csv"
    rows = [f"2024-10-15 00:00:{i:02}.0,{i % 3},{3000 + i},5\n" for i in range(10)]
    path.write_text("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n" + "".join(rows))
    options = ("--trace", path, "--prefill", 1, "--decode", 1, "--image-tokens", 1300)
    for machine in ("h200-8b", "h100-qwen-vl-7b"):
        code, out, err = simulate(*options, "--encode", 1, "--latency-model", machine, "--json")
        assert code == 0, err
        first, _colocated = map(json.loads, out.splitlines())
        assert first["num_refused"] == (6 if machine == "h200-8b" else 0)
    code, out, _ = simulate(*options, "--encode", 1)
    assert "1 encode, 1 prefill and 1 decode workers" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--policy", "best"], "--policy: is 'best'; must be one of baton"),
        (["--admission", "early"], "--admission: is 'early'; must be one of none, naive"),
        (["--rate", "0"], "--rate: is 0; must be above 0"),
        (["--slo-ttft", "-1"], "--slo-ttft: is -1 ms; must be above 0"),
        (["--slo-itl", "0"], "--slo-itl: is 0 ms; must be above 0"),
        (["--latency-model", "h300"], "--latency-model: is 'h300'; must be h200-8b"),
        (["--block-size", "1024", "--cache-blocks", "1"], "--block-size: is 1024; a pool of 512"),
        (["--trace", "nowhere.jsonl"], "--trace: "),
        (["--trace", "trace.txt"], "--trace: trace.txt: a trace ends in .jsonl or .csv"),
    ],
)
def test_simulate_names_an_invalid_option(trace, arguments, problem):
    code, out, err = simulate("--trace", trace, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"baton: {problem}")


def test_simulate_names_a_bad_row_of_the_trace(trace):
    with trace.open("a") as file:
        file.write('{"timestamp": 1}\n')
    code, _, err = simulate("--trace", trace)
    assert code == 1
    assert "made.jsonl, line 31, field input_length: missing" in err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no json", "line 1: no row of a benchmark"),
        ('{"case": "step: 4 decodes behind 9", "value": 1.5}', "has no case of served step"),
    ],
)
def test_simulate_names_an_invalid_latency_model_file(trace, tmp_path, text, problem):
    path = tmp_path / "model.json"
    path.write_text(text + "\n")
    code, _, err = simulate("--trace", trace, "--latency-model", path)
    assert code == 1
    assert problem in err
