"""Self-check at load: finds state outside of the KV cache in every dtype, and runs decodes."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.config import EngineConfig
from baton.engine.core import assembly
from baton.engine.executor.attention.interface import RaggedBatch
from baton.engine.executor.attention.torch_attention import TorchAttention
from baton.engine.executor.memory.cache_plan import CachePlan
from baton.engine.executor.self_check import SelfCheck
from baton.engine.llm import LLM
from baton.errors import UnsupportedModelError
from tests.engine.conftest import Checkpoints
from tests.support.engine.checkpoints import save_random
from tests.support.engine.small_configs import small_config

DTYPES = ["float32", "bfloat16", "float16"]
SERVED = ["llama", "gemma2", "qwen3_moe", "deepseek_v3"]
LAST_LAYER = 2  # of the small llama
STATEFUL = ["falcon_h1", "zaya"]
_ROOM = 3  # times the bound


def config_of(dtype: Any, kernels: Literal["auto", "torch"] = "auto") -> EngineConfig:
    return EngineConfig(device="cpu", num_blocks=8, dtype=dtype, max_model_len=60, kernels=kernels)


def load(path: Path | str, dtype: str) -> LLM:
    return LLM.from_pretrained(path, config_of(dtype))


def self_check(
    path: object, dtype: str, attention: type[TorchAttention] | None = None
) -> SelfCheck:
    """The check of a model with its own attention over the cache, or with another one."""
    config = config_of(dtype, "auto" if attention is None else "torch")
    loaded = assembly.load(str(path), config, lambda _phase, _fraction: None)
    return SelfCheck(
        loaded.model,
        attention or loaded.backend.attention,
        CachePlan([*loaded.cache.layouts], loaded.cache.places),
        loaded.info.vocab_size,
        loaded.info.max_model_len,
        getattr(torch, dtype),
        loaded.device,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", SERVED)
def test_self_check_accepts_served_families_with_room(
    checkpoints: Checkpoints, family: str, dtype: str
) -> None:
    check = self_check(checkpoints[family], dtype)
    found = {how: difference / check.bound for how, difference in check.differences(family)}
    print(found)
    assert len(found) == 5
    assert max(found.values()) < 1 / _ROOM


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", STATEFUL)
def test_self_check_refuses_state_in_every_dtype(tmp_path: Path, family: str, dtype: str) -> None:
    save_random(small_config(family), tmp_path)
    with pytest.raises(UnsupportedModelError, match="behind another sequence in one batch") as said:
        load(tmp_path, dtype)
    found = re.search(r"differ by (\S+) of their spread, allowed is ([\d.]+\d)", str(said.value))
    assert found
    assert float(found[1]) > _ROOM * float(found[2])


@pytest.mark.parametrize("family", STATEFUL)
def test_state_that_rounding_hides_is_refused(tmp_path: Path, family: str) -> None:
    """With the small weights that transformers draws, its effect is below the bound."""
    model = AutoModelForCausalLM.from_config(small_config(family))
    save_random(model.config, tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="state outside of its KV cache"):
        load(tmp_path, "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_self_check_refuses_other_first_tokens(checkpoints: Checkpoints, dtype: str) -> None:
    """A state that fades: most tokens of each range are right."""

    class Disturbed(TorchAttention):
        def forward(self, index: int, *inputs: Any) -> torch.Tensor:
            out, batch = super().forward(index, *inputs), inputs[-1]
            if index == LAST_LAYER:  # whose output other tokens do not see
                others = torch.from_numpy((batch.token_slots == 2) & (batch.positions < 3))
                out[others] *= 0.5
            return out

    check = self_check(checkpoints["llama"], dtype, Disturbed)
    with pytest.raises(UnsupportedModelError, match="behind another sequence in one batch"):
        check.run("llama")


@pytest.mark.parametrize("dtype", DTYPES)
def test_self_check_refuses_a_broken_decode(checkpoints: Checkpoints, dtype: str) -> None:
    class Broken(TorchAttention):
        def prepare(self, ragged: RaggedBatch) -> Any:
            if ragged.num_decodes:
                tables = [table[:, ::-1].copy() for table in ragged.block_tables]
                ragged = replace(ragged, block_tables=tables)
            return super().prepare(ragged)

    check = self_check(checkpoints["llama"], dtype, Broken)
    with pytest.raises(UnsupportedModelError, match="other logits by decodes than alone"):
        check.run("llama")


@pytest.mark.parametrize(
    ("table", "how"), [([7, 8], "in two chunks"), ([1, 9], "after a prefix hit")]
)
def test_self_check_refuses_a_cache_that_is_not_read_back(
    checkpoints: Checkpoints, table: list[int], how: str
) -> None:
    """The blocks of a sequence of the check are others than those with its first tokens."""

    class Forgetful(TorchAttention):
        def prepare(self, ragged: RaggedBatch) -> Any:
            tables = [rows.copy() for rows in ragged.block_tables]
            for rows in tables:
                rows[(rows == table).all(axis=1)] = [10, 11]
            return super().prepare(replace(ragged, block_tables=tables))

    check = self_check(checkpoints["llama"], "float32", Forgetful)
    with pytest.raises(UnsupportedModelError, match=f"llama .* {how} than alone"):
        check.run("llama")
