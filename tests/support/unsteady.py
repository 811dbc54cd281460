"""Unsteady tests: the failed test of a lane runs again, alone, and its lane is green if it passes.

    python -m tests.support.unsteady FILE STATUS

FILE is the lane's report (`lanes`), STATUS the exit statuses of its runs of pytest, combined by
bitwise or. Exits with 0 if nothing failed, or if a single test failed and then passed NUM_REPEATS
times: it is printed as UNSTEADY. Whatever is no failed test stays red: a crash, an error of
collection, a run without tests, an interrupt.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.lanes import EMULATOR, Run, read

NUM_REPEATS = 5
TIMEOUT = 600.0  # seconds of one repetition

RunAlone = Callable[[str, str], bool]
"""Runs the test of an id, on what runs its kernels (`Run.kernels`); returns whether it passes."""


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


def run_alone(test: str, kernels: str) -> bool:
    """Runs a test in a pytest of its own, whose output is printed if the test fails. A test that
    does not run, or is left out, has not passed."""
    environment = {k: v for k, v in os.environ.items() if k != "BATON_LANE_REPORT"}
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
    sys.exit(exit_status(read(Path(sys.argv[1])), int(sys.argv[2]), run_alone))
