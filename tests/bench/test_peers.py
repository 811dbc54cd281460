"""Benchmark against vLLM's CPU build: over a stand-in of its package, and over the real one."""

import logging
import os
import shutil
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.engine import peers, vllm_cpu
from bench.report import NotPossibleError
from bench.workload import save_model

STAND_IN = """
from types import SimpleNamespace

from baton import engine
from baton.sampling import SamplingParams


class LLM:
    def __init__(self, folder, *, dtype, enable_prefix_caching):
        print("a line of log on standard output")
        is_caching = enable_prefix_caching
        config = engine.EngineConfig(device="cpu", dtype=dtype, prefix_caching=is_caching)
        self._engine = engine.LLM.from_pretrained(folder, config)

    def generate(self, inputs, params, *, use_tqdm):
        print("another one")
        prompts = [each["prompt_token_ids"] for each in inputs]
        return [SimpleNamespace(outputs=[r]) for r in self._engine.generate(prompts, params)]
"""
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
LENGTHS = ((3, 8), (20, 40))
CASES = [f"small, prompts of {a} to {b}: 16 of 16 equal" for a, b in LENGTHS]
ON_PATH = shutil.which("vllm")


@pytest.fixture
def without_vllm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def with_stand_in(monkeypatch, tmp_path):
    """A command `vllm` on the path, and beside it a Python that imports the stand-in."""
    package, folder = tmp_path / "packages" / "vllm", tmp_path / "bin"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    folder.mkdir()
    python = f'PYTHONPATH="{package.parent}:$PYTHONPATH" exec "{sys.executable}" "$@"'
    for name, line in (("vllm", "exit 1"), ("python", python)):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


async def compared(folder: Path) -> list[str]:
    """Compares on a small model; returns the cases."""
    save_model(folder, **SIZES)
    python = str(vllm_cpu.interpreter())
    rows = await peers.compare(str(folder), "small", "float32", python, LENGTHS, repeats=1)
    assert all(row.value > 0 and row.ratio == row.value / row.reference for row in rows)
    assert all(row.aim == peers.AIM for row in rows)
    return [row.case for row in rows]


@pytest.mark.e2e
@pytest.mark.alone  # it computes on all cores
@pytest.mark.nightly
async def test_peers_compares_engine_and_stand_in_in_turns(with_stand_in, tmp_path):
    assert await compared(tmp_path) == CASES


@pytest.mark.e2e
@pytest.mark.alone  # it computes on all cores
@pytest.mark.slow
@pytest.mark.skipif(ON_PATH is None, reason="the command vllm is not on the path")
async def test_peers_compares_engine_and_vllm_in_turns(tmp_path):
    assert await compared(tmp_path) == CASES


def test_peers_names_what_to_install_without_vllm(without_vllm):
    with pytest.raises(NotPossibleError, match="install vllm-cpu in a virtual environment"):
        peers.run(1)


def test_bench_all_continues_without_vllm(without_vllm, capsys):
    runs = {"peers": peers.run, "engine": lambda _repeats: []}
    main(["all"], names=[*runs], benchmark=runs.__getitem__)
    logging.disable(logging.NOTSET)  # main() disables warnings for good
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("bench peers: left out, the command vllm is not on the path")
    assert lines[2] == "bench engine: running"


def test_vllm_interpreter_is_beside_the_linked_command(with_stand_in, monkeypatch, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    (links / "vllm").symlink_to(tmp_path / "bin" / "vllm")
    monkeypatch.setenv("PATH", str(links))
    assert vllm_cpu.interpreter() == tmp_path / "bin" / "python"
