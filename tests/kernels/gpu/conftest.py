"""These tests need a GPU and run at real sizes: `make gpu`. They import neither redis nor
opentelemetry, so that a machine with little else than torch and triton can run them."""

import pytest
import torch

from baton_kernels.gpu import FP8_CAPABILITY
from tests.support.kernels.returned_memory import _memory_is_returned  # noqa: F401


@pytest.fixture
def gpu() -> torch.device:
    assert torch.cuda.is_available(), "torch sees no GPU on this machine"
    return torch.device("cuda")


def skip_without_fp8(gpu: torch.device, is_fp8: bool) -> None:
    if is_fp8 and torch.cuda.get_device_capability(gpu) < FP8_CAPABILITY:
        pytest.skip("fp8 is refused below compute capability 8.9")
