"""These modules run on a GPU (`make gpu`), and on a CPU in Triton's interpreter, in a process of
their own (`tests/engine/test_on_triton.py`). They need no package of a server's or of other
tests'."""

from pathlib import Path
from typing import Any

import pytest

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from tests.support.engine.checkpoints import save_random
from tests.support.kernels.engine_families import FAMILIES
from tests.support.kernels.interpreter import IS_INTERPRETED, configure


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


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoint of a family, made when first asked for."""
    made: dict[str, Path] = {}

    def of(family: str) -> str:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_random(FAMILIES[family](), made[family])
        return str(made[family])

    return of


@pytest.fixture
def load(device: str) -> Any:
    """Loads an engine; unless told otherwise, one on our kernels that records nothing."""

    def of(path: str, **changes: Any) -> Engine:
        settings = {
            "device": device,
            "dtype": "float32",
            "num_blocks": 24,
            "max_num_seqs": 6,
            "kernels": "triton",
            "cuda_graphs": False,
        }
        return Engine.from_pretrained(path, EngineConfig(**{**settings, **changes}))

    return of


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
