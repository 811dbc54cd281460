"""Lanes of tests, and the workflow files that run them."""

import re

import yaml

from tests.support.lanes import Run, lane_of, summary
from tests.support.repository import ROOT


class Item:
    """A test with markers of these names."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def iter_markers(self):
        return [type("Mark", (), {"name": name}) for name in self._names]


def test_lane_is_the_slowest_that_a_marker_names():
    assert lane_of(Item()) == lane_of(Item("e2e", "interpreted")) == "make test"
    assert lane_of(Item("slow")) == lane_of(Item("e2e", "system")) == "make test-full"
    assert lane_of(Item("slow", "nightly")) == "make nightly"
    assert lane_of(Item("gpu", "slow")) == "make gpu"


def test_summary_adds_up_runs_and_counts_what_is_left_once():
    collected = {"make test": 10, "make test-full": 4}
    runs = [
        Run(collected, {"passed": 7}, 60.0, {"c": 1.0, "b": 2.0}),
        Run({"make test": 2, "make nightly": 3}, {"passed": 2}, 30.0, kernels="interpreter"),
        Run(collected, {"passed": 2, "failed": 1}, 30.0, {"a": 9.0}),
    ]
    text = summary(runs)
    assert text.startswith("12 tests in 2.0 minutes: 1 failed, 11 passed\n")
    assert re.search(r"  9\.0  a\n +2\.0  b\n +1\.0  c\n", text)
    left = dict(re.findall(r"(make \S+) +(\d+) tests", text))
    assert left == {"make test-full": "4", "make nightly": "3", "make gpu": "0"}


def test_workflows_run_targets_and_scripts_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    called = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            steps = "\n".join(step.get("run", "") for step in job["steps"])
            called |= set(re.findall(r"^make ([a-z-]+)", steps, flags=re.MULTILINE))
            for script in re.findall(r"^(\.ci/\w+)", steps, flags=re.MULTILINE):
                assert (ROOT / script).stat().st_mode & 0o100, script
    assert {"nightly", "soak", "bare"} <= called <= targets
