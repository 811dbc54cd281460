"""Memory of a fused model over packed weights."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engine.checkpoints import small_config
from tests.support.engine.engines import load

pytestmark = pytest.mark.system  # a C compiler

TIED = {
    "biases": small_config(
        "LlamaConfig", attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "norms of heads": small_config("Qwen3Config", head_dim=16, tie_word_embeddings=True),
}


@pytest.mark.parametrize("kind", TIED)
def test_loaded_model_leaves_its_file_unmapped(kind: str, tmp_path: Path) -> None:
    """All of a file that one small weight is a part of would count as memory of the process."""
    model = AutoModelForCausalLM.from_config(TIED[kind], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    engine = load(str(tmp_path), dtype="bfloat16")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    engine.close()
