"""vLLM's CPU build, where the command `vllm` is on the path: its Python, and a server of it."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from baton.cli.local.ports import HOST, free_port
from bench.report import NotPossibleError

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}  # the space in GiB
_START_SECONDS = 300.0


def is_installed() -> bool:
    return shutil.which("vllm") is not None


def interpreter() -> Path:
    """Returns the Python of the environment that the command `vllm` belongs to.

    Raises `NotPossibleError` if the command is not on the path.
    """
    command = shutil.which("vllm")
    if command is None:
        raise NotPossibleError(
            "the command vllm is not on the path; install vllm-cpu in a virtual environment of its "
            "own and append its bin folder to PATH"
        )
    return Path(command).resolve().with_name("python")


@contextmanager
def server(folder: Path, *options: str) -> Iterator[str]:
    """Runs a server of vLLM for the block; yields its HTTP address."""
    port = free_port(set())
    # Not `vllm serve`, which fails in vllm-cpu 0.32 since no package is named vllm.
    module = "vllm.entrypoints.openai.api_server"
    command = [str(interpreter()), "-m", module, "--model", str(folder)]
    where = ["--host", HOST, "--port", str(port), "--served-model-name", "model"]
    how = ["--dtype", "float32", "--max-model-len", "2048", "--no-enable-prefix-caching", *options]
    with (folder / f"vllm-{port}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *where, *how],
            env={**os.environ, **ENVIRONMENT},
            stdout=log,
            stderr=log,
        )
    try:
        _await_models(f"http://{HOST}:{port}", process, Path(log.name))
        yield f"http://{HOST}:{port}"
    finally:
        process.terminate()
        process.wait()


def _await_models(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    expires = time.monotonic() + _START_SECONDS
    while time.monotonic() < expires and process.poll() is None:
        try:
            httpx.get(f"{address}/v1/models").raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.5)
        else:
            return
    end = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    why = "ended" if process.poll() is not None else f"was not ready in {_START_SECONDS:g} s"
    raise RuntimeError(f"vLLM {why}; the end of its log:\n{end}")
