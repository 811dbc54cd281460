"""Verdict of `make gpu` over stages that are real processes and need no GPU."""

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import stages as gpu_stages
from bench.gpu.gpu import Measurements, measure
from bench.gpu.stages import SMOKE_SECONDS, read_benchmark, read_tests, smoke_alone, stages
from bench.gpu.verdict import SECONDS, judge, scaled
from bench.report import Row
from bench.stages import GRACE_SECONDS, Findings, Stage, run_stage
from tests.support.repository import ROOT

PASSES = "def test_it(record_property): record_property('kv_bytes', 4096)"
FAILS = "def test_it(): assert 0\ndef test_also(): assert 0\ndef test_other(): pass"
SKIPS = "import pytest\n@pytest.mark.skip(reason='no redis')\ndef test_it(): pass"
BREAKS = "import nothing_of_this_name"
DIES = "import os\ndef test_it(): assert 0\ndef test_other(): os.abort()"
REPORTS = "from tests.support.lanes import register as pytest_configure"
# Plugins take longer to import than the tests take.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
ROW = Row("copy", 3.0, "GB/s", "device copy", 4.0, 0.75, 0.5)
NVIDIA_SMI = """#!/bin/sh
echo '1755, 97, 650.1, 61, 0x0000000000000004'
echo '1980, 88, 401.0, 60, 0x0000000000000000'
echo '345, 0, 70.0, 40, 0x0000000000000001'
echo '1980, 88, [N/A]'
exec /bin/sleep 60
"""


@pytest.fixture(autouse=True)
def _machine_has_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def run_of_tests(folder: Path, content: str) -> Stage:
    """A run of pytest over one file, with the report of our own tests."""
    report, tests = folder / "tests.jsonl", folder / "tests"
    tests.mkdir()
    (tests / "conftest.py").write_text(REPORTS)
    (tests / "test_it.py").write_text(content)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null")
    environment = {**ENVIRONMENT, "BATON_LANE_REPORT": str(report)}
    return Stage("tests", (*command, str(tests)), 60, partial(read_tests, report), environment)


def benchmark(folder: Path, rows: list[Row], seconds: float = 0.0, **failures: str) -> Stage:
    """A benchmark that compiles a kernel."""
    report = folder / "benchmark.json"
    report.write_text(json.dumps(Measurements(rows, failures, ["engine: all"]).content()))
    compiled = folder / "cache" / "key" / "kernel.cubin"
    compiled.parent.mkdir(parents=True)
    command = ("/bin/sh", "-c", ": >$0; /bin/sleep $1; exit $2", str(compiled), str(seconds))
    return Stage("benchmark", (*command, str(len(failures))), 20, partial(read_benchmark, report))


@pytest.mark.parametrize(
    ("content", "row", "failures", "status", "texts"),
    [
        (PASSES, ROW, {}, 0, ["1 passed, 0 failed", "kv_bytes: 4096", "every stage passed; 0"]),
        (None, Row(**{**asdict(ROW), "aim": 0.8}), {}, 2, ["every stage passed; 1 of 1 aims"]),
        (None, ROW, {"prefill": "no memory"}, 1, ["prefill: no memory", "FAILED: benchmark;"]),
        (FAILS, ROW, {}, 1, ["1 passed, 2 failed", "::test_it and 1 others - assert 0", "FAILED:"]),
        (SKIPS, ROW, {}, 1, ["1 skipped", "note: 1 skipped: no redis", "FAILED: tests;"]),
        (BREAKS, ROW, {}, 1, ["No module named 'nothing_of_this_name'", "FAILED: tests;"]),
        (DIES, ROW, {}, 1, ["died of SIGABRT", "left no report", "::test_it - assert 0"]),
    ],
)  # fmt: skip
def test_gpu_run_names_failed_stages_and_runs_all(
    tmp_path, capsys, content, row, failures, status, texts
):
    first = Stage("tests", ("/bin/true",), 60, Findings)
    if content is not None:
        first = run_of_tests(tmp_path, content)
    assert judge([first, benchmark(tmp_path, [row], **failures)], tmp_path / "results") == status
    printed = capsys.readouterr().out
    for text in texts:
        assert text in printed
    assert printed.splitlines()[-1].startswith("VERDICT ")
    assert "note: engine: all" in printed
    (path,) = (tmp_path / "results").glob("*.json")
    written = json.loads(path.read_text())
    assert written["exit_status"] == status
    assert written["summary"][-1] in printed
    assert [stage["figures"]["num_compiled"] for stage in written["stages"]] == [0, 1]
    assert written["stages"][1]["figures"]["rows"][0]["case"] == "copy"


def test_gpu_run_reports_clocks_while_the_gpu_is_busy(tmp_path, capsys):
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    assert judge([benchmark(tmp_path, [ROW], seconds=0.2)], tmp_path / "results") == 0
    assert "1755 to 1980 MHz, slowed in 50% of samples" in capsys.readouterr().out


@pytest.mark.parametrize("has_xdist", [True, False])
def test_gpu_stages_run_tests_side_by_side_also_without_xdist(monkeypatch, tmp_path, has_xdist):
    monkeypatch.setattr(gpu_stages, "find_spec", lambda name: has_xdist or None)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    commands = {stage.name: stage.command for stage in stages(tmp_path)}
    for name, count in (("smoke", "4"), ("tests", "12")):
        module, *options = commands[name][2:]
        assert module == ("pytest" if has_xdist else "tests.support.shards")
        assert options[: 1 + has_xdist] == ["-n", count][not has_xdist :]
        assert ("--timeout" in options) is has_xdist


def test_shards_run_each_test_once_and_report_together(tmp_path):
    (tmp_path / "conftest.py").write_text(REPORTS)
    content = "import pytest\n@pytest.mark.parametrize('i', range(5))\ndef test_it(i): assert i < 4"
    (tmp_path / "test_it.py").write_text(content)
    report = tmp_path / "tests.jsonl"
    environment = {**ENVIRONMENT, "BATON_LANE_REPORT": str(report)}
    command = (sys.executable, "-m", "tests.support.shards", "3", "-q", "-p", "no:cacheprovider")
    stage = Stage(
        "tests",
        (*command, "-c", "/dev/null", str(tmp_path)),
        60,
        partial(read_tests, report),
        environment,
    )
    result = run_stage(stage, tmp_path / "log")
    assert len(report.read_text().splitlines()) == 3
    assert result.figures["outcomes"] == {"passed": 4, "failed": 1}
    assert [test.rpartition("::")[2] for test in result.figures["reasons"]] == ["test_it[4]"]
    assert result.failures == ("exit status 1", "1 tests failed")


def test_gpu_stages_of_tests_and_benchmark_have_their_time(tmp_path):
    *others, reference = stages(tmp_path)
    assert sum(stage.budget + 2 * GRACE_SECONDS for stage in others) <= SECONDS <= 9 * 60
    assert reference.name == "reference"
    assert smoke_alone(tmp_path).budget + 2 * GRACE_SECONDS <= 150
    assert sum(stage.budget for stage in scaled(others, SECONDS / 2)) == 250


def test_gpu_run_keeps_to_its_seconds_and_notes_stages_left_out(tmp_path, capsys):
    todo = [
        Stage(name, ("/bin/sleep", "60"), budget=20, read=Findings) for name in ("first", "second")
    ]
    assert judge(todo, tmp_path, seconds=2 * GRACE_SECONDS + 1.2, shortest=1) == 1
    printed = capsys.readouterr().out
    assert "not done after 1" in printed
    assert "second      passed in 0 of 20 s" in printed
    assert "note: left out: no time is left" in printed


def test_first_look_runs_engines_first_and_one_by_one(tmp_path):
    stage = smoke_alone(tmp_path)
    assert "-n" not in stage.command
    paths = [part for part in stage.command if part.startswith("tests/gpu/")]
    assert paths[0] == "tests/gpu/test_triton_engine.py"
    assert {"tests/gpu/test_late_gpu.py", "tests/gpu/test_two_processes.py"} < {*paths}
    assert "tests/gpu" not in stage.command  # pytest would collect by folder
    assert stage.budget == SMOKE_SECONDS


def test_gpu_run_ends_in_aims_after_many_failures(tmp_path, capsys):
    content = (
        "import pytest\n@pytest.mark.parametrize('i', range(500))\ndef test_it(i): assert i < 0"
    )
    ceilings = {
        "gpu": "GPU", "torch": "2", "triton": "3", "copy_bytes_per_s": 3e12, "product_flops": 8e14
    }  # fmt: skip
    todo = [
        Stage("ceilings", ("/bin/true",), 20, lambda: Findings(ceilings)),
        run_of_tests(tmp_path, content),
        benchmark(tmp_path, [ROW]),
    ]
    results = tmp_path / "results"
    assert judge(todo, results) == 1
    end = capsys.readouterr().out[-12_000:]
    reason, more = "test_it.py::test_it[0] - assert 0 < 0", "... and 480 more"
    texts = (reason, more, "copy 3.00 TB/s", "reached     copy: 0.75", "VERDICT ")
    assert [text for text in texts if text not in end] == []
    assert sorted(end.index(text) for text in texts) == [end.index(text) for text in texts]
    assert (results / "tests.log").read_text().count("FAILED") == 500
    written = json.loads((results / "gpu.json").read_text())
    assert len(written["stages"][1]["figures"]["reasons"]) == 500
    assert "500 failed" in written["stages"][1]["output"]
    assert written["stages"][2]["output"] == ""


def test_benchmark_keeps_what_other_cases_measured():
    def fail() -> list[Row]:
        raise RuntimeError("no memory")

    def engine() -> Any:
        yield "prefill", fail
        yield "copy", lambda: [ROW]
        raise RuntimeError("no engine")

    def kernels() -> Any:
        yield "another copy", lambda: [ROW]

    noted: list[int] = []
    measured = measure(
        {"engine": engine(), "kernels": kernels()},
        note=lambda so_far: noted.append(len(so_far.rows)),
    )
    assert measured.rows == [ROW, ROW]
    failures = {"prefill": "RuntimeError: no memory", "engine": "RuntimeError: no engine"}
    assert measured.failures == failures
    assert noted == [0, 1, 1, 2, 2]
    late = measure({"kernels": kernels()}, seconds=-1)
    assert late == Measurements(left_out=["kernels: all, for lack of time"])
