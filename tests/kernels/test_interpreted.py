"""Runs the tests of the kernels on the CPU, in Triton's interpreter and a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(selection: str, timeout: float) -> None:
    command = [sys.executable, "-m", "pytest", "tests/kernels/interpreted", "-m", selection]
    result = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider", "--durations=5"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    print(result.stdout)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


def test_kernels_agree_with_their_references_in_the_interpreter() -> None:
    run("not slow and not gpu", timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_agree_with_their_references_in_every_pair_of_shapes_and_types() -> None:
    run("slow and not gpu", timeout=840)
