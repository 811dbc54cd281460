"""Steadiness of end-to-end tests: they run again and again beside busy processes.

    python -m tests.support.steady --rounds 10 [--files FILE ...]

Prints each test that failed at least once, how often, and the last reason. Exits with 1 if one did,
or if a run of pytest ended otherwise than by its tests.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.cluster.parent_death import dying_with_parent
from tests.support.lanes import failures_path
from tests.support.repository import ROOT

TIMEOUT = 3600.0  # seconds of one run of pytest
_COMMIT = "not (nightly or gpu)"
_THREE_AT_A_TIME = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "three at a time": (f"e2e and not alone and {_COMMIT}", _THREE_AT_A_TIME),
    "one by one": (f"alone and {_COMMIT}", ()),
}
_BUSY = "while True: pass"
_ENDED_BY_TESTS = (0, 1, 5)  # passed, failed, none in this group


@dataclass
class Failures:
    """Failures of tests over all rounds.

    Attributes:
        counts: number of failures by test.
        reasons: each test's last reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, test: str, reason: str) -> None:
        self.counts[test] += 1
        self.reasons[test] = reason

    def read(self, file: Path) -> None:
        """Adds the failures of a run of pytest (`lanes.failures_path`)."""
        for line in file.read_text().splitlines():
            self.add(*json.loads(line))

    def __str__(self) -> str:
        lines = [
            f"{number:4} {test}\n     {' '.join(self.reasons[test].split())[:300]}"
            for test, number in self.counts.most_common()
        ]
        return "\n".join(lines) or "   no test failed"


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keeps `number` cores busy for the length of the block."""
    command = dying_with_parent([sys.executable, "-c", _BUSY])
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(rounds: int, files: Sequence[str]) -> Failures:
    """Runs both groups `rounds` times, and prints what failed after each round."""
    failures = Failures()
    with TemporaryDirectory(prefix="baton-steady-") as folder, busy_processes(os.cpu_count() or 1):
        for number in range(1, rounds + 1):
            for name in GROUPS:
                _run_group(name, files, Path(folder) / "report.jsonl", failures)
            print(f"After round {number} of {rounds}:\n{failures}", flush=True)
    return failures


def _run_group(name: str, files: Sequence[str], report: Path, failures: Failures) -> None:
    expression, options = GROUPS[name]
    failed = failures_path(report)
    failed.unlink(missing_ok=True)
    command = dying_with_parent(
        [sys.executable, "-m", "pytest", "-q", "-m", expression, *options, *files]
    )
    environment = {**os.environ, "BATON_LANE_REPORT": str(report)}
    try:
        status = subprocess.run(command, cwd=ROOT, env=environment, timeout=TIMEOUT).returncode
    except subprocess.TimeoutExpired:
        failures.add(f"pytest, {name}", f"did not end within {TIMEOUT:.0f} s")
    else:
        if status not in _ENDED_BY_TESTS:
            failures.add(f"pytest, {name}", f"ended with status {status}")
    if failed.exists():
        failures.read(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--files", nargs="+", required=True)
    arguments = parser.parse_args()
    return 1 if run(arguments.rounds, arguments.files).counts else 0


if __name__ == "__main__":
    sys.exit(main())
