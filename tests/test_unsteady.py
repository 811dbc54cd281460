"""Unsteady tests: which failed lanes are green after repetitions."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.lanes import Run, read
from tests.support.repository import ROOT
from tests.support.unsteady import NUM_REPEATS, exit_status

PASSED = Run({"make test": 9}, {"passed": 9}, 1.0)


def failed(*tests: str, num_broken: int = 0) -> Run:
    return Run({}, {"failed": len(tests)}, 1.0, failed=[*tests], num_broken=num_broken)


class Alone:
    """Repetitions of one test, with these results."""

    def __init__(self, *results: bool) -> None:
        self._results: Iterator[bool] = iter(results)
        self.asked: list[tuple[str, str]] = []

    def __call__(self, test: str, kernels: str) -> bool:
        self.asked.append((test, kernels))
        return next(self._results)


def test_lane_is_green_when_its_failed_test_passes_again(capsys):
    alone, test = Alone(*[True] * NUM_REPEATS), "tests/e2e/test_a.py::test_b"
    assert exit_status([PASSED, failed(test)], 1, alone) == 0
    assert alone.asked == [(test, "gpu")] * NUM_REPEATS
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"UNSTEADY {test}: ")
    assert f"\n{line}\n" in (ROOT / "docs" / "testing.md").read_text(), "which shows it"


def test_lane_is_red_when_its_failed_test_fails_again(capsys):
    assert exit_status([failed("a::x"), PASSED], 1, Alone(True, True, False)) == 1
    assert "UNSTEADY" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("runs", "status"),
    [
        pytest.param([failed("a::x", "a::y")], 1, id="two-tests"),
        pytest.param([failed("a::x"), failed("b::y")], 1, id="two-runs"),
        pytest.param([failed("a::x"), PASSED], 1 | 5, id="no-test-ran"),
        pytest.param([failed("a::x")], 1 | 2, id="interrupt"),
        pytest.param([failed("a::x")], 1 | 139, id="crash-of-pytest"),
        pytest.param([failed("a::x", num_broken=1)], 1, id="crash-or-bad-file"),
        pytest.param([PASSED], 1, id="failure-without-a-name"),
    ],
)
def test_lane_is_red_without_repetition_after_all_else(runs, status):
    assert exit_status(runs, status, Alone()) == status


def test_lane_without_failure_is_green():
    assert exit_status([PASSED], 0, Alone()) == 0


def test_report_counts_crashes_and_uncollected_files(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "from tests.support.lanes import register as pytest_configure\n"
    )
    (tmp_path / "test_bad.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "test_crash.py").write_text("import os\ndef test_crash(): os._exit(1)\n")
    report = tmp_path / "report"
    environment = {**os.environ, "BATON_LANE_REPORT": str(report), "PYTHONPATH": str(ROOT)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins take a second to import
    environment.pop("PYTEST_XDIST_WORKER", None)
    for arguments in (["test_bad.py"], ["-p", "xdist", "-n", "1", "test_crash.py"]):
        subprocess.run(
            [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            timeout=60,
        )
    bad, crash = read(report)
    assert (bad.num_broken, bad.failed) == (1, ["test_bad.py"])
    assert (crash.num_broken, crash.failed) == (1, ["test_crash.py::test_crash"])
