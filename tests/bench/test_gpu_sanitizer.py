"""compute-sanitizer as the benchmark of a GPU calls it, played by a shell script."""

import json
from pathlib import Path

from bench.gpu.sanitizer import check

# memcheck finds an error; racecheck takes too long.
SANITIZER = """#!/bin/sh
case "$*" in
  *"--tool memcheck"*python*test_gpu_attention*) exit 9 ;;
esac
exec sleep 60
"""


def test_sanitizer_fails_for_errors_and_notes_lack_of_time(tmp_path: Path) -> None:
    program, report = tmp_path / "compute-sanitizer", tmp_path / "report.json"
    program.write_text(SANITIZER)
    program.chmod(0o755)
    check(str(program), report, seconds=1.0)
    assert json.loads(report.read_text()) == {
        "figures": {"memcheck": 9},
        "failures": ["memcheck: exit status 9; the log says why"],
        "notes": ["racecheck: not done in time"],
    }
