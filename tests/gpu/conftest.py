"""These modules run on a GPU (`make gpu`), and on a CPU in Triton's interpreter, in a process of
their own (`tests/engine/test_on_triton.py`). They need no package of a server's or of other
tests'."""

import os
from pathlib import Path

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_configure(config: pytest.Config) -> None:
    # Infinities are as good as any number on a GPU, and numpy warns of each.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not IS_INTERPRETED and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if IS_INTERPRETED else "cuda"
