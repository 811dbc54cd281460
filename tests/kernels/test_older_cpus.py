"""The C library compiled for CPUs with fewer instruction sets than this one: its tests again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

TESTS = (
    "tests/kernels/test_cpu_linear.py",
    "tests/kernels/test_cpu_rowwise.py",
    "tests/engine/executor/test_in_place_attention.py",
    "tests/engine/test_any_batch.py",
)
# Without vectors of AVX; AVX2; AVX-512 without bfloat16. Newer ones come last: of each the CPU of
# the test must have all.
KINDS = {
    "x86-64": set(),
    "haswell": {"avx2", "fma"},
    "skylake-avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compute_the_same_on_older_cpus(kind: str, tmp_path: Path) -> None:
    if missing := KINDS[kind] - set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nexec gcc "$@" -march={kind}\n')  # the last one counts
    compiler.chmod(0o755)
    environment = {**os.environ, "CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not nightly", "-n", "0", *TESTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-4000:]
