"""These modules run on a GPU (`make gpu`), and on a CPU in Triton's interpreter, in a process of
their own (`tests/engine/test_on_triton.py`). They need no package of a server's or of other
tests'."""

from pathlib import Path
from typing import Any

import pytest

from tests.kernels.interpreter import IS_INTERPRETED, configure


def pytest_configure(config: pytest.Config) -> None:
    configure(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not IS_INTERPRETED and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if IS_INTERPRETED else "cuda"


@pytest.fixture
def _rows_are_computed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """What numpy's matmul gives for a row depends on the row's place among the others; matrix
    instructions, for which it stands in the interpreter, treat all rows alike."""
    if not IS_INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_: Any, left: Any, right: Any, acc: Any, *_options: Any) -> Any:
        total = acc.data.copy()
        for k in range(left.data.shape[1]):
            total += left.data[:, k : k + 1] * right.data[k]
        return TensorHandle(total, acc.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
