"""Memory of engines that size their cache themselves: each takes its share, also beside another."""

import json
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.kernels.engine_families import tokens
from tests.support.repository import ROOT

SEGMENTS = 2**26  # bytes that torch reserves beyond what it allocates


# Other tests have the rest of the GPU.
@pytest.mark.gpu  # on a CPU nothing is measured
@pytest.mark.parametrize("shares", [[0.03], [0.02, 0.03]], ids=["alone", "two at once"])
def test_engines_reserve_no_more_than_their_shares(
    folder: Any, load: Any, settings: dict[str, Any], shares: list[float]
) -> None:
    path = folder("llama")
    expected = tokens(load(path, kernels="torch", device="cpu"))
    command = [sys.executable, "-m", "tests.support.kernels.measured_engine", path]
    changes = {**settings, "num_blocks": None, "cuda_graphs": True}
    with ExitStack() as stack:
        processes = []
        for share in shares:
            encoded = json.dumps({**changes, "gpu_memory_utilization": share})
            process = subprocess.Popen(
                [*command, encoded],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        for process, share in zip(processes, shares, strict=True):
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
            assert found["reserved"] <= share * found["total"] + SEGMENTS
            assert min(found["num_blocks"]) > settings["num_blocks"]
            assert list(map(tuple, found["token_ids"])) == list(map(tuple, expected))
