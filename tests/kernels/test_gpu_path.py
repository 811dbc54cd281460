"""`make gpu` is kept true on machines without a GPU: it imports what a GPU machine has, no more."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

# Runs where nothing is installed but the distributions of gpu_packages.txt, and what those of them
# that are installed here need besides.
PROGRAM = """
import shutil, sys
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

INSTALLED = {canonicalize_name(each.name): each for each in distributions()}
present = Path("tests/kernels/gpu_packages.txt").read_text().split()
for name in present:
    for line in (INSTALLED[name].requires if name in INSTALLED else None) or ():
        need = Requirement(line)
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            if canonicalize_name(need.name) not in present:
                present.append(canonicalize_name(need.name))
ABSENT = {
    str(each.locate_file(file))
    for name, each in INSTALLED.items()
    if name not in present
    for file in each.files or ()
}


class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, *arguments):
        spec = self._finder.find_spec(*arguments)
        return None if spec is None or spec.origin in ABSENT else spec

    def __getattr__(self, name):
        return getattr(self._finder, name)


sys.meta_path[:] = map(Without, sys.meta_path)
for module in ("grpc_status", "google.rpc.status_pb2", "msgspec", "redis"):
    try:
        __import__(module)
    except ImportError:
        continue
    raise SystemExit(module + " is not hidden")

from importlib import import_module

import pytest
from baton.engine import LLM, EngineConfig
from baton.models import locate
from baton.sampling import SamplingParams
from bench.gpu.sanitizer import TEST
from bench.gpu.stages import stages

benchmarks = sorted(Path("bench/gpu").glob("[!_]*.py"))
assert benchmarks
for file in benchmarks:
    import_module("bench.gpu." + file.stem)

shutil.copytree(locate("tiny"), sys.argv[1], ignore=shutil.ignore_patterns("tokenizer*"))
engine = LLM.from_pretrained(sys.argv[1], EngineConfig(device="cpu", num_blocks=16))
assert engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))

collect = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:anyio"]
for stage in stages(Path(sys.argv[1])):
    print("stage", stage.name)
    if "tests/gpu.ini" in stage.command:
        options = stage.command[stage.command.index("-c") :]
        assert not pytest.main([*options, *collect])
    if "bench.gpu.sanitizer" in stage.command:
        assert not pytest.main(["-c", "tests/gpu.ini", "--rootdir", ".", *collect, TEST])
"""


@pytest.mark.e2e
def test_gpu_tests_and_benchmarks_import_with_few_packages(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    (path,) = re.findall(r"^gpu: export PYTHONPATH := (\S+?)\$\(", makefile, flags=re.MULTILINE)
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
    smoke, others = re.findall("(?s)stage (?:smoke|tests)\n(.*?)(?=stage |$)", result.stdout)
    for name in ("late_gpu", "two_processes", "cuda_ipc", "recorded_steps"):
        assert name in smoke
    assert "test_gpu_attention" in others
    assert "test_late_gpu" not in others
