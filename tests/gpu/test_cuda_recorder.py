"""Recording of CUDA graphs beside other threads that use the GPU."""

import threading

import pytest
import torch

from baton.engine.executor.models.cuda_graphs import CudaRecorder

pytestmark = pytest.mark.gpu


def test_recorder_captures_while_another_thread_allocates() -> None:
    """In torch's default mode an allocation of any thread breaks the capture."""
    numbers, is_done = torch.ones(4, device="cuda"), threading.Event()

    def allocate() -> None:
        torch.empty(2**27, dtype=torch.uint8, device="cuda")
        is_done.set()

    def step() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            threading.Thread(target=allocate).start()
            assert is_done.wait(20.0)
        return numbers * 2

    replay = CudaRecorder().record(step)
    numbers.fill_(3.0)
    assert replay().tolist() == [6.0] * 4
