"""Self-check at load: finds state outside of the KV cache in every dtype, and runs decodes."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.attention.interface import RaggedBatch
from baton.engine.attention.torch_attention import TorchAttention
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.self_check import SelfCheck
from baton.errors import UnsupportedModelError
from tests.engine.conftest import Checkpoints
from tests.support.engine.checkpoints import save_random
from tests.support.engine.small_configs import small_config

DTYPES = ["float32", "bfloat16", "float16"]
SERVED = ["llama", "gemma2", "qwen3_moe", "deepseek_v3"]
LAST_LAYER = 2  # of the small llama
STATEFUL = ["falcon_h1", "zaya"]
_ROOM = 3  # times the bound


def load(path: Path | str, dtype: str, kernels: Literal["auto", "torch"] = "auto") -> Engine:
    config = EngineConfig(
        device="cpu", num_blocks=8, dtype=dtype, max_model_len=60, kernels=kernels
    )
    return Engine.from_pretrained(path, config)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the check measured, in parts of the bound, by the way to compute the sequence."""
    found: dict[str, float] = {}
    differences = SelfCheck.differences

    def record(self: SelfCheck, name: str) -> list[tuple[str, float]]:
        measured = list(differences(self, name))
        found.update({how: difference / self.bound for how, difference in measured})
        return measured

    monkeypatch.setattr(SelfCheck, "differences", record)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", SERVED)
def test_self_check_accepts_served_families_with_room(
    checkpoints: Checkpoints, found: dict[str, float], family: str, dtype: str
) -> None:
    load(checkpoints[family], dtype)
    print(found)
    assert len(found) == 5
    assert max(found.values()) < 1 / _ROOM


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", STATEFUL)
def test_self_check_refuses_state_in_every_dtype(
    tmp_path: Path, found: dict[str, float], family: str, dtype: str
) -> None:
    save_random(small_config(family), tmp_path)
    with pytest.raises(UnsupportedModelError, match="behind another sequence in one batch"):
        load(tmp_path, dtype)
    print(found)
    assert found["behind another sequence in one batch"] > _ROOM


@pytest.mark.parametrize("family", STATEFUL)
def test_state_that_rounding_hides_is_refused(tmp_path: Path, family: str) -> None:
    """With the small weights that transformers draws, its effect is below the bound."""
    model = AutoModelForCausalLM.from_config(small_config(family))
    save_random(model.config, tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="state outside of its KV cache"):
        load(tmp_path, "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_self_check_refuses_other_first_tokens(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A state that fades: most tokens of each range are right."""
    forward = TorchAttention.forward

    def disturbed(self, index, layer, query, key, value, batch):  # type: ignore[no-untyped-def]
        out = forward(self, index, layer, query, key, value, batch)
        if index == LAST_LAYER:  # whose output other tokens do not see
            others = torch.from_numpy((batch.token_slots == 2) & (batch.positions < 3))
            out[others] *= 0.5
        return out

    monkeypatch.setattr(TorchAttention, "forward", disturbed)
    with pytest.raises(UnsupportedModelError, match="behind another sequence in one batch"):
        load(checkpoints["llama"], dtype, kernels="torch")


@pytest.mark.parametrize("dtype", DTYPES)
def test_self_check_refuses_a_broken_decode(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    prepare = TorchAttention.prepare

    def broken(self: TorchAttention, ragged: RaggedBatch) -> object:
        if ragged.num_decodes:
            tables = [table[:, ::-1].copy() for table in ragged.block_tables]
            ragged = replace(ragged, block_tables=tables)
        return prepare(self, ragged)

    monkeypatch.setattr(TorchAttention, "prepare", broken)
    with pytest.raises(UnsupportedModelError, match="other logits by decodes than alone"):
        load(checkpoints["llama"], dtype, kernels="torch")
