"""Rounds of tests beside busy processes: what they print."""

import json

import psutil

from tests.support.steady import Failures, busy_processes


def test_failures_count_tests_and_name_the_last_reason(tmp_path):
    failures, file = Failures(), tmp_path / "report.failures"
    assert str(failures) == "   no test failed"
    for reason in ("AssertionError: early", "AssertionError: late"):
        file.write_text(json.dumps(["tests/e2e/test_a.py::test_x[1]", reason]) + "\n")
        failures.read(file)
    assert str(failures) == "   2 tests/e2e/test_a.py::test_x[1]\n     AssertionError: late"


def test_busy_processes_end_with_their_block():
    before = psutil.Process().children()
    with busy_processes(2):
        busy = [child for child in psutil.Process().children() if child not in before]
        assert len(busy) == 2
    assert not any(child.is_running() for child in busy)
