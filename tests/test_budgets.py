"""Budgets of tests, and what a test is charged."""

from typing import Any

import pytest

from tests.support.budgets import Clocks, Meter, Twice, budget_of, slowness
from tests.support.lanes import Run, over_budget
from tests.support.unsteady import MAX_MEASURED, over_budget_again

pytest_plugins = ["pytester"]


def test_test_is_charged_half_its_cpu_time_if_tasks_waited():
    quiet, busy = Clocks(wall=8.0, cpu=1.0, waiting=0.5), Clocks(wall=8.0, cpu=1.0, waiting=4.0)
    assert (quiet.charged, busy.charged) == (8.0, 0.5)


def test_meter_charges_a_test_but_not_for_shared_fixtures(pytester):
    """Only CPU time is spent, which is charged on any machine."""
    pytester.makepyfile(
        """
        import time, pytest

        def spend(seconds):
            until = time.process_time() + seconds
            while time.process_time() < until:
                pass

        @pytest.fixture(scope="session")
        def shared():
            spend(0.15)

        @pytest.fixture
        def own():
            spend(0.15)

        def test_own(shared, own):
            spend(0.15)

        def test_shared(shared):
            pass
        """
    )
    reports = Reports()
    pytester.inline_run("-p", "no:asyncio", plugins=[Meter(), reports])
    own, shared = (report.charged for report in reports.ended)
    assert own > 0.14 > shared


def test_second_time_of_a_test_is_charged_where_it_runs_twice(pytester):
    pytester.makepyfile(
        """
        import time, pytest
        from functools import cache

        @cache
        def compile():
            until = time.process_time() + 0.4
            while time.process_time() < until:
                pass

        @pytest.fixture
        def number():
            yield 1

        def test_compiled(number):
            compile()
            assert number == 1
        """
    )
    reports = Reports()
    pytester.inline_run("-p", "no:asyncio", plugins=[Twice(), Meter(), reports])
    (second,) = reports.ended
    assert second.passed
    assert second.charged < 0.2


def test_slow_machine_charges_less(pytester):
    pytester.makepyfile(
        """
        import time

        def test_slow():
            until = time.process_time() + 0.4
            while time.process_time() < until:
                pass
        """
    )
    reports = Reports()
    pytester.inline_run("-p", "no:asyncio", plugins=[Meter(slowness=100.0), reports])
    (slow,) = reports.ended
    assert 0.0 < slow.charged < 0.2
    assert slowness() >= 1.0


@pytest.mark.parametrize(
    ("marks", "seed", "budget"),
    [
        (["slow"], None, 5.0),
        (["e2e", "slow"], None, 15.0),
        (["e2e", "nightly"], None, None),
        (["random"], 7, None),
    ],
    ids=str,
)
def test_budget_is_of_tests_that_every_commit_repeats(marks, seed, budget):
    assert budget_of({*marks}, seed) == budget


class Reports:
    """Pytest plugin that keeps the last report of each test."""

    def __init__(self) -> None:
        self.ended: list[Any] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "teardown":
            self.ended.append(report)


def slow(test: str, kernels: str = "gpu") -> Run:
    return Run({}, {}, 1.0, kernels=kernels, over_budget=[(7.25, 5.0, test)])


def test_lane_names_tests_that_exceed_their_budget_again():
    asked = []

    def measure(test: str, kernels: str) -> list[Run]:
        asked.append((test, kernels))
        return [slow(test) if test == "a::x" else Run({}, {}, 1.0)]

    text = over_budget_again([slow("a::x"), slow("a::y", "emulator")], measure)
    assert asked == [("a::x", "gpu"), ("a::y", "emulator")]
    assert text == over_budget([slow("a::x")])
    many = [slow(f"a::{i}") for i in range(MAX_MEASURED + 1)]
    assert over_budget_again(many, measure).count(" took ") == len(many)


def test_lane_names_each_test_over_its_budget_and_what_to_do():
    assert over_budget([Run({}, {}, 1.0)]) == ""
    text = over_budget([Run({}, {}, 1.0, over_budget=[(7.25, 5.0, "tests/test_x.py::test_y")])])
    assert text == (
        "tests/test_x.py::test_y took 7.2 s; expected at most 5 s on an idle machine. "
        "Make it quicker, cut it or mark it `nightly`."
    )
