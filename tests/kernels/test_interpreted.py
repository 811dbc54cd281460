"""Runs the tests of the kernels on the CPU, in Triton's interpreter and a process of their own."""

import os
import subprocess
import sys

import pytest

from tests.support.repository import ROOT

# What takes long, and is told by the rest as well where it is far off.
LONG = "in_any_batch or of_any_size or is_shared_out or tiles_of_the_mode or ties_are_ordered"


def run(selection: str, names: str, timeout: float) -> None:
    folder = "tests/kernels/interpreted"
    command = [sys.executable, "-m", "pytest", folder, "-m", selection, "-k", names]
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
    run("not slow and not gpu", f"not ({LONG})", timeout=280)


@pytest.mark.slow
def test_a_row_is_the_same_in_any_batch_and_chunk_in_the_interpreter() -> None:
    run("not slow and not gpu", LONG, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_agree_with_their_references_in_every_pair_of_shapes_and_types() -> None:
    run("slow and not gpu", "test", timeout=840)
