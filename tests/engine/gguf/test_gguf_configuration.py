"""Settings of GGUF files as `config.json` has them."""

from pathlib import Path
from typing import Any

import pytest

from baton.models.gguf.configuration import configuration
from baton.models.gguf.header import read_header
from tests.support.engine.checkpoints import small_config
from tests.support.gguf.models import random_model, small_gguf
from tests.support.gguf.vocabularies import sentence_piece
from tests.support.gguf.writing import write_gguf


@pytest.mark.parametrize(
    ("type_name", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q8_0", "bfloat16")]
)
def test_gguf_names_the_dtype_of_gpus(type_name: str, dtype: str, tmp_path: Path) -> None:
    file = small_gguf(tmp_path / "m.gguf", sentence_piece(), type_of=lambda _name: type_name)
    assert configuration(read_header([file]))["dtype"] == dtype


# Families with what their files may have, and what becomes of it.
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "no window": ("Phi3Config", {"phi3.attention.sliding_window": 0}, {"sliding_window": None}),
    "no softcapping": (
        "Gemma2Config",
        {"gemma2.final_logit_softcapping": 0.0, "gemma2.attn_logit_softcapping": 0.0},
        {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    ),
    "window": ("Phi3Config", {"phi3.attention.sliding_window": 9}, {"sliding_window": 9}),
    "layout": ("LlamaConfig", {"llama.tensor_data_layout": "Meta AI original pth"}, {}),
    "largest": (
        "Gemma2Config",
        {"gemma2.block_count": 46, "gemma2.embedding_length": 72},
        {"query_pre_attn_scalar": 18},
    ),
    "linear": (
        "LlamaConfig",
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "of one layer each": ("LlamaConfig", {"llama.feed_forward_length": [96]}, {}),
    "ends": ("LlamaConfig", {"tokenizer.ggml.eom_token_id": 7}, {"eos_token_id": [2, 7]}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_gguf_setting_has_its_place_in_configuration(name: str, tmp_path: Path) -> None:
    class_name, metadata, expected = SETTINGS[name]
    file = tmp_path / "model.gguf"
    config = small_config(class_name, num_hidden_layers=1, hidden_size=32, pad_token_id=0)
    write_gguf(file, random_model(config), sentence_piece(), metadata=metadata)
    found = configuration(read_header([file]))
    assert {key: found[key] for key in expected} == expected
