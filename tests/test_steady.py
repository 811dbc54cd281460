"""Rounds of tests beside busy processes: what they print."""

import psutil

from tests.support.steady import Failures, busy_processes

REPORT = """<testsuites><testsuite>
<testcase classname="tests.e2e.test_a" name="test_x[1]">
<failure message="{reason}"/></testcase>
<testcase classname="tests.e2e.test_a" name="test_y"/>
</testsuite></testsuites>"""


def test_failures_count_tests_and_name_the_last_reason(tmp_path):
    failures, report = Failures(), tmp_path / "report.xml"
    assert str(failures) == "   no test failed"
    for reason in ("AssertionError: early", "AssertionError: late"):
        report.write_text(REPORT.format(reason=reason))
        failures.read(report)
    assert str(failures) == "   2 tests.e2e.test_a::test_x[1]\n     AssertionError: late"


def test_busy_processes_end_with_their_block():
    before = psutil.Process().children()
    with busy_processes(2):
        busy = [child for child in psutil.Process().children() if child not in before]
        assert len(busy) == 2
    assert not any(child.is_running() for child in busy)
