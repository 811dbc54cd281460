"""Kernels of benchmarks that are compiled without a GPU, carried, and not compiled again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.bundle import pack, unpack
from tests.support.repository import ROOT

pytest.importorskip("tests.support.ptx.driver")

# Prints the kernels that the benchmarks launch, and how many of them were cached.
PROGRAM = """
import triton
from tests.support.kernels.compiled_ahead import (
    SINGLE_LAYER, WithoutNumbers, replace_gpu, run_benchmarks
)

replace_gpu()
found = []
triton.knobs.compilation.listener = lambda **told: found.append(told["cache_hit"])
with WithoutNumbers():
    run_benchmarks(SINGLE_LAYER)
print(len(found), sum(found))
"""


def benchmarked(cache: Path) -> tuple[int, int]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", PROGRAM]
    printed = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    launched, cached = map(int, printed.split())
    return launched, cached


@pytest.mark.nightly
def test_benchmarks_compile_nothing_after_bundle_is_unpacked(tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    launched, cached = benchmarked(first)
    assert launched >= 40
    assert pack(first, tmp_path) == launched - cached
    first.rename(tmp_path / "elsewhere")
    assert unpack(tmp_path, other) == launched - cached
    assert benchmarked(other) == (launched, launched)
