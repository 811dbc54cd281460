"""SIGTERM while a process starts, as process 1 of a PID namespace, as it is of a container."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton.models import locate
from tests.support.waiting import wait_until

# Far above what an end takes, far below what a lost signal costs.
PROMPTLY = 30.0
NUM_MOMENTS = 20
APART = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
PORTS = ["--port", "0", "--admin-port", "0", "--metrics-port", "0"]
PROCESSES = {
    "router": ["router", *PORTS, "--redis-url", "redis://127.0.0.1:1/0"],
    "prefill": ["prefill-worker", *PORTS],
    "decode": ["decode-worker", *PORTS],
}
LISTENING, READY = "metrics are at", "is ready at"
ENDED_EARLY = "ended by SIGTERM before it served"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes PID namespaces"),
    pytest.mark.timeout(600),
]


class FirstProcess:
    """`baton` as process 1, or under an init that is process 1."""

    def __init__(self, arguments, log: Path, init, environment) -> None:
        self.log = log
        with log.open("wb") as output:
            self._unshare = subprocess.Popen(
                [*APART, *init, sys.executable, "-P", "-m", "baton", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )
        self._children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        wait_until(self._children.read_text)
        self.pid = int(self._children.read_text())

    @property
    def catches_sigterm(self) -> bool:
        self._check_running()
        status = Path(f"/proc/{self.pid}/status").read_text()
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    def maps(self, file: str) -> bool:
        """Returns whether it or a child of it, such as its engine, has mapped the file."""
        self._check_running()
        process = psutil.Process(self.pid)
        pids = [self.pid, *(child.pid for child in process.children())]
        return any(file in Path(f"/proc/{pid}/maps").read_text() for pid in pids)

    def _check_running(self) -> None:
        assert self._unshare.poll() is None, f"it ended:\n{self.log.read_text()}"

    def says(self, text: str) -> bool:
        return text in self.log.read_text()

    def terminate(self) -> int:
        """Sends SIGTERM, as the kubelet does; returns the exit code, which must come promptly."""
        os.kill(self.pid, signal.SIGTERM)
        return self._unshare.wait(PROMPTLY)

    def kill(self) -> None:
        self._unshare.kill()
        self._unshare.wait()


@contextmanager
def first_process(arguments, folder, init=(), **environment) -> Iterator[FirstProcess]:
    process = FirstProcess(arguments, folder / "log", list(init), environment)
    try:
        yield process
    finally:
        process.kill()


def seconds_to_start(role, folder) -> float:
    """Returns the seconds from the handler of SIGTERM to the end of a start."""
    with first_process(PROCESSES[role], folder) as process:
        wait_until(lambda: process.catches_sigterm, PROMPTLY)
        began = time.monotonic()
        wait_until(lambda: process.says(LISTENING if role == "router" else READY), 120.0)
        return time.monotonic() - began


@pytest.mark.nightly
@pytest.mark.parametrize("role", PROCESSES)
def test_process_1_ends_at_sigterm_at_any_moment_of_start(role, tmp_path):
    span = seconds_to_start(role, tmp_path)
    codes = []
    for moment in range(NUM_MOMENTS):
        with first_process(PROCESSES[role], tmp_path) as process:
            wait_until(lambda p=process: p.catches_sigterm, PROMPTLY)
            time.sleep(span * moment / (NUM_MOMENTS - 1))
            codes.append(process.terminate())
            # The handler of a start, or the server's that drains.
            ending = {143: ENDED_EARLY, 0: "draining; a second signal stops at once"}[codes[-1]]
            assert process.log.read_text().count(ending) == 1
    assert codes[0] == 143


@pytest.mark.parametrize("arguments", [["--log-format", "json"], []], ids=["flag", "variable"])
def test_early_sigterm_is_one_json_line_for_json_logs(arguments, tmp_path):
    environment = {} if arguments else {"BATON_LOG_FORMAT": "json"}
    command = [*PROCESSES["router"], *arguments]
    with first_process(command, tmp_path, **environment) as process:
        wait_until(lambda: process.catches_sigterm, PROMPTLY)
        assert process.terminate() == 143
        line = json.loads(process.log.read_text())
    assert line["message"] == ENDED_EARLY
    assert (line["level"], line["role"]) == ("INFO", "router")


@pytest.mark.e2e
@pytest.mark.slow
def test_worker_ends_at_sigterm_while_it_loads_its_model(tmp_path):
    """The thread that loads is not waited for."""
    model = tmp_path / "model"
    shutil.copytree(locate("tiny"), model)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    config = LlamaConfig.from_pretrained(model, **sizes, **heads)
    with torch.device("meta"):
        large = LlamaForCausalLM(config).to(torch.bfloat16)
    # Memory as it is found may hold a NaN, which ends a start.
    zeros = {name: torch.zeros_like(w, device="cpu") for name, w in large.state_dict().items()}
    large.load_state_dict(zeros, assign=True)
    large.save_pretrained(model)
    with first_process([*PROCESSES["decode"], "--model", str(model)], tmp_path) as process:
        # Its signal handlers are set after it has said where it listens.
        ended_meanwhile = (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess)
        wait_until(lambda: process.maps("model.safetensors"), 120.0, ignoring=ended_meanwhile)
        assert process.terminate() == 0
        assert process.says("ended while the model was being loaded")
        assert not process.says(READY)


@pytest.mark.system
@pytest.mark.parametrize("role", PROCESSES)
def test_init_forwards_sigterm_before_python_runs(role, tmp_path):
    """Before a handler can be set, as the images run it."""
    init = shutil.which("tini")
    assert init, "tini is not installed; on Debian: apt-get install tini"
    with first_process(PROCESSES[role], tmp_path, init=[init, "--"]) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(children.read_text, PROMPTLY)
        assert process.terminate() == 143
