"""NVIDIA's compute-sanitizer over attention kernels: accesses out of bounds, and data races.

    python -m bench.gpu.sanitizer FILE

writes a JSON file after each tool. Where compute-sanitizer is not installed, it has a note.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from bench.stages import BUDGET_VARIABLE

TOOLS: Final = ("memcheck", "racecheck")
TEST: Final = (
    "tests/kernels/gpu/test_gpu_attention.py"
    "::test_attention_matches_float64_for_any_query_group_size[16-8]"
)
"""A test of prefill and of decode attention in one batch."""

_PLACE: Final = "/usr/local/cuda/bin"
_SHARE: Final = 0.9  # of a stage's budget
_FOUND: Final = 9  # exit status for errors of the tool itself, which pytest does not use


def sanitizer() -> str | None:
    """Returns the path of compute-sanitizer; None if it is not installed."""
    return shutil.which("compute-sanitizer", path=os.pathsep.join((os.environ["PATH"], _PLACE)))


def check(program: str, report: Path, seconds: float) -> None:
    """Runs the test under each tool, and writes to `report` why that failed. A tool that is not
    done after `seconds` in all is a note."""
    ends = time.monotonic() + seconds
    content: dict[str, Any] = {"figures": {}, "failures": [], "notes": []}
    pytest = (sys.executable, "-m", "pytest", "-q", "-c", "tests/gpu.ini", "--rootdir", ".", TEST)
    for tool in TOOLS:
        command = (program, "--tool", tool, "--error-exitcode", str(_FOUND), *pytest)
        try:
            status = subprocess.run(
                command, check=False, timeout=max(0.0, ends - time.monotonic())
            ).returncode
        except subprocess.TimeoutExpired:
            content["notes"].append(f"{tool}: not done in time")
        else:
            content["figures"][tool] = status
            if status:
                content["failures"].append(f"{tool}: exit status {status}; the log says why")
        report.write_text(json.dumps(content))


def main() -> None:
    report = Path(sys.argv[1])
    if (program := sanitizer()) is not None:
        return check(program, report, _SHARE * float(os.environ.get(BUDGET_VARIABLE, "inf")))
    note = f"compute-sanitizer is neither on the path nor in {_PLACE}"
    report.write_text(json.dumps({"figures": {}, "failures": [], "notes": [note]}))
    return None


if __name__ == "__main__":
    main()
