"""Engines and modules on our kernels: on a GPU (`make gpu`), or on a CPU in Triton's interpreter
(`TRITON_INTERPRET=1 pytest -m interpreted`). They need no package of a server's or of other
tests'."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.llm import LLM
from tests.support.engine.checkpoints import save_random
from tests.support.engine.quantized.written import save_quantized
from tests.support.kernels.engine_families import FAMILIES, QUANTIZED
from tests.support.kernels.interpreter import (  # noqa: F401
    ON_CPU,
    compute_rows_alike,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_itemcollected,
)
from tests.support.kernels.returned_memory import _memory_is_returned  # noqa: F401


@pytest.fixture(autouse=True)
def _torch_is_seeded(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if ON_CPU else "cuda"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoint of a family, or a quantized one, made when first asked for."""
    made: dict[str, Path] = {}

    def of(name: str) -> str:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("models") / name
            if name in QUANTIZED:
                family, kind = QUANTIZED[name]
                save_quantized(kind, Path(of(family)), made[name])
            else:
                save_random(FAMILIES[name](), made[name])
        return str(made[name])

    return of


@pytest.fixture(scope="session")
def settings(device: str) -> dict[str, Any]:
    """Settings of an engine on our kernels that records nothing."""
    return {
        "device": device,
        "dtype": "float32",
        "num_blocks": 24,
        "max_num_seqs": 6,
        "kernels": "triton",
        "cuda_graphs": False,
    }


@pytest.fixture
def load(settings: dict[str, Any]) -> Any:
    """Loads an engine with `settings`, unless told otherwise."""

    def of(path: str, **changes: Any) -> LLM:
        return LLM.from_pretrained(path, EngineConfig(**{**settings, **changes}))

    return of


@pytest.fixture
def _rows_are_computed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_CPU:
        compute_rows_alike(monkeypatch)
