"""GPU memory of a module's tests, returned at its end: fixture of a conftest."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _memory_is_returned() -> Iterator[None]:
    """Frees the memory that torch keeps for later, at the end of each module: tests run side by
    side on one GPU."""
    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
