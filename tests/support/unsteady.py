"""Second runs of a lane's tests, alone: of the one that failed, and of those over their budget.

    python -m tests.support.unsteady FILE STATUS

FILE is the lane's report (`lanes`), STATUS the exit statuses of its runs of pytest, combined by
bitwise or. Exits with 0 if nothing failed, or if a single test failed and then passed NUM_REPEATS
times: it is printed as UNSTEADY. Whatever is no failed test stays red: a crash, an error of
collection, a run without tests, an interrupt, and a test that exceeds its budget again.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.lanes import EMULATOR, Run, over_budget, read

NUM_REPEATS = 5
TIMEOUT = 600.0  # seconds of one repetition
MAX_MEASURED = 20

RunAlone = Callable[[str, str], bool]
"""Runs the test of an id, on what runs its kernels (`Run.kernels`); returns whether it passes."""
MeasureAlone = Callable[[str, str], list[Run]]
"""Runs a test in the same way; returns the lane report of that run."""


def exit_status(runs: Sequence[Run], status: int, run_alone: RunAlone) -> int:
    """Returns a lane's exit status, after repetitions of a single failed test; says what they
    show."""
    failed = [(test, run.kernels) for run in runs for test in run.failed]
    is_repeatable = status == pytest.ExitCode.TESTS_FAILED and not any(r.num_broken for r in runs)
    if not is_repeatable or len(failed) != 1:
        return status
    test, kernels = failed[0]
    num_passed = 0
    while num_passed < NUM_REPEATS and run_alone(test, kernels):
        num_passed += 1
    if num_passed < NUM_REPEATS:
        print(f"FAILED again, alone, after it had passed {num_passed} times: {test}")
        return status
    print(f"UNSTEADY {test}: failed once, then passed {NUM_REPEATS} times alone")
    return 0


def over_budget_again(runs: Sequence[Run], measure_alone: MeasureAlone) -> str:
    """Returns a line about each test that exceeded its budget in the lane and alone; without second
    runs if there are more than `MAX_MEASURED`."""
    tests = [(test, run.kernels) for run in runs for _, _, test in run.over_budget]
    if len(tests) > MAX_MEASURED:
        return over_budget(runs)
    return over_budget([again for each in tests for again in measure_alone(*each)])


def measure_alone(test: str, kernels: str) -> list[Run]:
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        run_alone(test, kernels, report)
        return read(report) if report.exists() else []


def run_alone(test: str, kernels: str, report: Path | None = None) -> bool:
    """Runs a test in a pytest of its own, whose output is printed if the test fails. A test that
    does not run, or is left out, has not passed. `report`: file of a lane report
    on the second of two times."""
    environment = {k: v for k, v in os.environ.items() if k != "BATON_LANE_REPORT"}
    if report is not None:
        environment |= {"BATON_LANE_REPORT": str(report), "BATON_LANE_TWICE": "1"}
    if kernels == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    plugins = ["-p", EMULATOR] if kernels == "emulator" else []
    command = [sys.executable, "-m", "pytest", "--quiet", *plugins, "-m", "", test]
    try:
        done = subprocess.run(
            command,
            env=environment,
            timeout=TIMEOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        print(f"{test} did not end within {TIMEOUT:.0f} s")
        return False
    has_passed = done.returncode == 0 and re.search(r"\b1 passed", done.stdout) is not None
    print(f"{test}: passed again" if has_passed else done.stdout)
    return has_passed


if __name__ == "__main__":
    lane = read(Path(sys.argv[1]))
    slow = over_budget_again(lane, measure_alone)
    print(slow)
    sys.exit(exit_status(lane, int(sys.argv[2]), run_alone) or bool(slow))
