"""These tests need a GPU and run at real sizes: `make gpu`. They import neither redis nor
opentelemetry, so that a machine with little else than torch and triton can run them."""

import pytest
import torch


@pytest.fixture
def gpu() -> torch.device:
    assert torch.cuda.is_available(), "torch sees no GPU on this machine"
    return torch.device("cuda")
