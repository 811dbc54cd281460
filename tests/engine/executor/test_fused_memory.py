"""Memory of a fused model over packed weights."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.core import assembly
from tests.support.engine.checkpoints import small_config
from tests.support.engine.engines import config_of

pytestmark = pytest.mark.system  # a C compiler

TIED = {
    "biases": small_config(
        "LlamaConfig", attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "norms of heads": small_config("Qwen3Config", head_dim=16, tie_word_embeddings=True),
}


@pytest.mark.parametrize("kind", TIED)
def test_file_is_unmapped_before_the_kv_cache_is_sized(kind: str, tmp_path: Path) -> None:
    """All of a file that one small weight is a part of would count as memory of the process, and so
    would the plain weights beside the packed ones."""
    model = AutoModelForCausalLM.from_config(TIED[kind], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    is_mapped = {}

    def on_progress(phase: str, _fraction: float) -> None:
        is_mapped[phase] = str(tmp_path) in Path("/proc/self/maps").read_text()

    assembly.load(str(tmp_path), config_of(dtype="bfloat16"), on_progress)
    assert is_mapped["probing layers"]
    assert not is_mapped["allocating the KV cache"]
