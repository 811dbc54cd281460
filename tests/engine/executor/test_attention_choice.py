"""Choice of attention's kernels: what a library cannot do is refused with the reason."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.executor.attention.interface import LayerAttention
from baton.engine.executor.attention.library_choice import LIBRARIES, Library, LibraryModel
from baton.engine.executor.attention.mask_rule import MaskRule
from baton.engine.llm import LLM
from baton.errors import InvalidArgumentError
from tests.support.engine.checkpoints import save_random
from tests.support.kernels.engine_families import FAMILIES

CPU = torch.device("cpu")  # seen as an H100
LAYER = LayerAttention(0.1, MaskRule(window=7), softcap=30.0)
MODEL = LibraryModel(
    torch.bfloat16, torch.bfloat16, frozenset({64, 128}), [LAYER], deterministic=False
)
SINKS = replace(LAYER, sinks=torch.zeros(2))


@pytest.fixture(params=[*LIBRARIES])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library that is installed."""
    found = LIBRARIES[request.param]
    monkeypatch.setitem(sys.modules, found.module, SimpleNamespace())
    return found


def test_library_serves_windows_and_soft_caps_in_halves(library: Library) -> None:
    assert library.why_not(MODEL, CPU) is None
    assert library.why_not(replace(MODEL, dtype=torch.float16, kv_dtype=torch.float16), CPU) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"deterministic": True}, "deterministic is set"),
        ({"dtype": torch.float32}, "computes in float32; expected float16 or bfloat16. Use"),
        ({"kv_dtype": torch.float8_e4m3fn}, "is float8_e4m3fn; expected bfloat16. Use"),
        ({"head_dims": frozenset({72, 128})}, "heads have 72 numbers; expected one of"),
        ({"layers": [LAYER, SINKS]}, "attention sinks. Use attention_backend=triton"),
    ],
)
def test_library_rejects_a_model_with_the_reason(
    library: Library, changes: dict[str, Any], why: str
) -> None:
    assert why in (library.why_not(replace(MODEL, **changes), CPU) or "")


def test_library_rejects_a_gpu_without_kernels(library: Library) -> None:
    old = replace(library, runs_on=lambda _: False)
    assert "compute capability 9.0; expected" in (old.why_not(MODEL, CPU) or "")


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("flashinfer", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]),
        ("flash-attn", [(9, 0)]),
    ],
)
def test_library_runs_on_gpus_with_its_kernels(name: str, served: list[tuple[int, int]]) -> None:
    gpus = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
    assert [gpu for gpu in gpus if LIBRARIES[name].runs_on(gpu)] == served


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_says_how_to_install_it_when_missing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, LIBRARIES[name].module, None)
    why_not = LIBRARIES[name].why_not(MODEL, CPU) or ""
    assert f"{LIBRARIES[name].module} cannot be imported" in why_not
    assert "or use attention_backend=triton" in why_not


def test_config_rejects_a_backend_without_its_kernels() -> None:
    with pytest.raises(InvalidArgumentError, match="attention_backend: is 'flash-attn', which"):
        EngineConfig(attention_backend="flash-attn", kernels="torch")
    with pytest.raises(InvalidArgumentError, match="must be one of auto, triton, flashinfer"):
        EngineConfig(attention_backend="xformers")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["triton", *LIBRARIES])
def test_engine_rejects_a_backend_of_gpus_on_a_cpu(tmp_path: Path, name: Any) -> None:
    save_random(FAMILIES["llama"](), tmp_path)
    config = EngineConfig(device="cpu", num_blocks=8, attention_backend=name)
    with pytest.raises(InvalidArgumentError, match=f"attention_backend: is '{name}', which needs"):
        LLM.from_pretrained(str(tmp_path), config)
