"""Lanes of tests: which command runs a test, and a report over the runs of one lane.

A lane is several runs of pytest (on all cores, in the interpreter, three tests at a time, one by
one). As a plugin, this module appends one line of JSON about each run to the file that
BATON_LANE_REPORT names; with BATON_LANE_TWICE each test runs twice, and the line is about its
second time. As a program, it prints what these runs say together:

    python -m tests.support.lanes FILE
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.budgets import Meter, Twice, slowness

NUM_SLOWEST = 20
_CRASHED = "???"  # phase of the test in which a process of xdist ended
EMULATOR = "tests.support.ptx.plugin"
OTHER_LANES = {
    "make test-full": "slower ones, and those that need packages of the system (it names them)",
    "make nightly": "image builds, browsers, other languages, all families, long simulations",
    "make gpu": "those that need a GPU",
}


def lane_of(item: pytest.Item) -> str:
    """Returns the command that runs a test, by its markers."""
    marks = {mark.name for mark in item.iter_markers()}
    if "gpu" in marks:
        return "make gpu"
    if "nightly" in marks:
        return "make nightly"
    return "make test-full" if marks & {"slow", "system"} else "make test"


@dataclass
class Run:
    """One run of pytest.

    Attributes:
        collected: number of tests by lane, whether or not this run selected them.
        outcomes: number of tests by outcome.
        seconds: wall time.
        durations: seconds of each test, by its id.
        kernels: what runs kernels: a GPU, `interpreter` or `emulator`; a run on either of these
            collects tests of kernels and no others.
        failed: ids of the tests that failed, and of files that cannot be imported.
        skipped: number of skipped tests by reason.
        num_broken: files that cannot be imported, and processes of xdist that have crashed.
        over_budget: seconds charged, budget and id of the tests that exceeded theirs.
        figures: properties that tests have recorded.
    """

    collected: dict[str, int]
    outcomes: dict[str, int]
    seconds: float
    durations: dict[str, float] = field(default_factory=dict)
    kernels: str = "gpu"
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    num_broken: int = 0
    over_budget: list[tuple[float, float, str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


class LaneReport:
    """Pytest plugin that appends a `Run` to a file. With xdist, the controller writes it.

    Args:
        failures: file to which each failure is appended at once; None in a worker of xdist.
    """

    def __init__(self, path: Path, failures: Path | None) -> None:
        self._path = path
        self._failures = failures
        self._began = time.monotonic()
        self._collected: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._failed: dict[str, None] = {}
        self._skipped: Counter[str] = Counter()
        self._num_broken = 0
        self._over_budget: list[tuple[float, float, str]] = []
        self._figures: dict[str, Any] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._collected = Counter(map(lane_of, items))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        self._figures.update(report.user_properties)
        charged, budget = getattr(report, "charged", 0.0), getattr(report, "budget", None)
        if budget is not None and charged > budget:
            self._over_budget.append((charged, budget, report.nodeid))
        self._num_broken += report.failed and report.when == _CRASHED
        self._note_failure(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._num_broken += report.failed
        self._note_failure(report)

    def _note_failure(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.failed or report.nodeid in self._failed:
            return
        self._failed[report.nodeid] = None
        if self._failures is not None:
            with self._failures.open("a") as file:
                file.write(json.dumps([report.nodeid, reason_of(report)]) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._collected = Counter(getattr(node, "workeroutput", {}).get("lanes", {}))

    @pytest.hookimpl(tryfirst=True)  # xdist waits for workers that hang, in an interrupted run
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["lanes"] = dict(self._collected)
            return
        run = Run(
            collected=dict(self._collected),
            outcomes=dict(self._outcomes),
            seconds=time.monotonic() - self._began,
            durations={test: round(took, 3) for test, took in self._seconds.items()},
            kernels=_kernels(session.config),
            failed=[*self._failed],
            skipped=dict(self._skipped),
            num_broken=self._num_broken,
            over_budget=self._over_budget,
            figures=self._figures,
        )
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")


def _kernels(config: pytest.Config) -> str:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    return "emulator" if config.pluginmanager.has_plugin(EMULATOR) else "gpu"


def failures_path(path: Path) -> Path:
    """Returns the file of the failures of a report's runs: a line for each, `[test, reason]`."""
    return path.with_suffix(".failures")


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns the first and the last line of a failure's error, where they differ."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason"]
    return " ... ".join(dict.fromkeys((lines[0], lines[-1])))


def register(config: pytest.Config) -> None:
    """Has pytest write a report where BATON_LANE_REPORT names a file."""
    if path := os.environ.get("BATON_LANE_REPORT"):
        failures = None if hasattr(config, "workerinput") else failures_path(Path(path))
        config.pluginmanager.register(LaneReport(Path(path), failures), "baton-lane-report")
        is_twice = bool(os.environ.get("BATON_LANE_TWICE"))
        meter = Meter(slowness() if is_twice else 1.0)
        config.pluginmanager.register(meter, "baton-meter")
        if is_twice:
            config.pluginmanager.register(Twice(), "baton-twice")


def read(path: Path) -> list[Run]:
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()]


def summary(runs: Iterable[Run]) -> str:
    """Returns outcomes, the slowest tests and what is left for other lanes."""
    runs = list(runs)
    outcomes = sum((Counter(run.outcomes) for run in runs), Counter[str]())
    # Of those without a device the first run collects all tests.
    collected: Counter[str] = Counter()
    for kernels in ("gpu", "interpreter", "emulator"):
        counts = [Counter(run.collected) for run in runs if run.kernels == kernels]
        collected.update(counts[0] if counts else {})
    seconds = sum(run.seconds for run in runs)
    lines = [
        f"{sum(outcomes.values()):,} tests in {seconds / 60:.1f} minutes: "
        + ", ".join(f"{number:,} {outcome}" for outcome, number in sorted(outcomes.items())),
        f"The {NUM_SLOWEST} slowest, in seconds:",
    ]
    slowest = sorted(
        ((took, test) for run in runs for test, took in run.durations.items()), reverse=True
    )[:NUM_SLOWEST]
    lines += [f"  {took:6.1f}  {test}" for took, test in slowest]
    lines.append("Left for other lanes:")
    lines += [
        f"  {lane:14} {collected[lane]:5,} tests: {what}." for lane, what in OTHER_LANES.items()
    ]
    return "\n".join(lines)


def over_budget(runs: Iterable[Run]) -> str:
    """Returns a line about each test that exceeded its budget."""
    return "\n".join(
        f"{test} took {charged:.1f} s; expected at most {budget:.0f} s on an idle machine. "
        "Make it quicker, cut it or mark it `nightly`."
        for run in runs
        for charged, budget, test in run.over_budget
    )


if __name__ == "__main__":
    print(summary(read(Path(sys.argv[1]))))
