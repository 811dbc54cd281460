"""Random inputs of every test of a kernel, from the test's own seed."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _torch_is_seeded(seed: int) -> None:
    torch.manual_seed(seed)
