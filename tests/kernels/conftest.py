"""Fresh random inputs in every test of a kernel; a failure shows the seed that made them."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    print(f"torch.manual_seed({torch.seed()})")
    torch.cuda.manual_seed_all(torch.initial_seed())
